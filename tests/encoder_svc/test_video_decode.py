"""A video is the frames that really decode; probe and preprocessing agree; nothing outside the bytes is touched."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from common.errors import MediaTooLarge, TandemError, UnsupportedMedia
from common.image_header import IMAGE_FORMATS
from common.messages import MediaOptions
from encoder_svc.image_decode import load_rgb
from encoder_svc.preprocess import preprocess_video, read_video
from encoder_svc.video_decode import load_sampled_frames, probe_video
from encoder_svc.video_source import VideoLimits, readable_packets
from tests.media_samples import (
    DEMO_PROCESSOR,
    encoded,
    flat_frames,
    gif_file,
    picture,
    png,
    rotated_mp4,
    video_file,
)
from tests.paths import SHARED, needs_shared

CONTAINERS = [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9")]


def case(name: str) -> tuple[bytes, Any]:
    folder = SHARED / "cases" / name
    return (folder / "in.mp4").read_bytes(), json.loads((folder / "expected.json").read_text())


def grey_levels(data: bytes) -> list[float]:
    """The mean grey of each sampled frame, for videos of flat frames."""
    probe = probe_video(data, DEMO_PROCESSOR)
    return [float(frame.mean()) for frame in load_sampled_frames(data, probe, 32, 64)]


@needs_shared
@pytest.mark.parametrize("name", ["VID-02", "VID-08"])
def test_the_cases_have_their_grid_and_times(name: str) -> None:
    data, expected = case(name)
    probe = probe_video(data, DEMO_PROCESSOR)
    assert list(probe.grid_thw) == expected["grid"]
    assert [f"{seconds:.1f}" for seconds in probe.timestamps] == expected["times"]
    assert probe.frame_indices == expected.get("sampled", [0, 1, 2])
    assert preprocess_video(data, DEMO_PROCESSOR).grid_thw == probe.grid_thw


@needs_shared
def test_one_frame_is_doubled_as_in_case_vid_01() -> None:
    data, _ = case("VID-01")
    prepared = preprocess_video(data, DEMO_PROCESSOR)
    assert prepared.grid_thw[0] == 1
    frames = prepared.pixel_values.reshape(-1, 3, 2, 256)
    np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])


@needs_shared
def test_a_cut_file_is_its_readable_frames_as_in_case_vid_07() -> None:
    data, _ = case("VID-07")
    probe = probe_video(data, DEMO_PROCESSOR)
    assert 4 < probe.num_frames < 48
    assert probe.frame_indices[-1] == probe.num_frames - 1
    assert preprocess_video(data, DEMO_PROCESSOR).grid_thw == probe.grid_thw


@needs_shared
def test_a_header_without_frames_is_refused_as_in_case_vid_04() -> None:
    data, _ = case("VID-08")
    with pytest.raises(UnsupportedMedia):
        probe_video(data[:40], DEMO_PROCESSOR)


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_the_sampled_frames_are_the_right_ones(container: str, codec: str) -> None:
    frames = flat_frames(48)
    data = video_file(frames, 24, container, codec)
    probe = probe_video(data, DEMO_PROCESSOR)
    assert (probe.num_frames, probe.fps, probe.width, probe.height) == (48, 24.0, 64, 32)
    assert probe.frame_indices == [0, 16, 31, 47]
    expected = [frames[index].mean() for index in probe.frame_indices]
    np.testing.assert_allclose(grey_levels(data), expected, atol=3)


def test_a_gif_plays_at_its_durations() -> None:
    data = gif_file(flat_frames(6), duration_ms=500)
    probe = probe_video(data, DEMO_PROCESSOR)
    assert (probe.num_frames, probe.fps) == (6, 2.0)
    assert probe.timestamps == [0.25, 1.25, 2.25]
    np.testing.assert_allclose(grey_levels(data), [frame.mean() for frame in flat_frames(6)], atol=1)


def test_a_gif_without_durations_plays_at_ten_frames_a_second() -> None:
    assert probe_video(gif_file(flat_frames(5), duration_ms=0), DEMO_PROCESSOR).fps == 10.0


def test_a_gif_of_one_picture_is_that_picture() -> None:
    transparent = Image.fromarray(picture(64, 64)).quantize(8)
    data = encoded(transparent, "GIF", transparency=2)
    probe = probe_video(data, DEMO_PROCESSOR)
    (frame,) = load_sampled_frames(data, probe, 64, 64)
    np.testing.assert_array_equal(frame, load_rgb(data))
    assert probe.grid_thw[0] == 1


def test_a_phone_video_is_turned_upright() -> None:
    frame = np.full((64, 96, 3), 20, np.uint8)
    frame[:, :32] = 220  # bright on the left; on top after a quarter turn clockwise
    flat = video_file([frame] * 4)
    turned = rotated_mp4(flat)
    probe = probe_video(turned, DEMO_PROCESSOR)
    assert (probe.width, probe.height) == (64, 96)
    first = next(load_sampled_frames(turned, probe, 96, 64))
    assert first[:28].mean() > 200
    assert first[36:].mean() < 40


def test_a_kept_probe_gives_the_same_patches() -> None:
    data = video_file([picture(96, 64, seed) for seed in range(9)], 4)
    probe = probe_video(data, DEMO_PROCESSOR)
    np.testing.assert_array_equal(
        read_video(data, DEMO_PROCESSOR, probe=probe).pixel_values,
        read_video(data, DEMO_PROCESSOR).pixel_values,
    )


def test_more_frames_than_there_are_repeats_them_as_the_reference_does() -> None:
    processor = DEMO_PROCESSOR.with_options(MediaOptions(num_frames=6))
    data = video_file(flat_frames(3))
    probe = probe_video(data, processor)
    assert probe.frame_indices == [0, 0, 1, 1, 2, 2]
    assert preprocess_video(data, processor).grid_thw[0] == 3


class BreakingContainer:
    """A container whose demuxer fails behind its second packet, without the flush that a clean end brings."""

    def demux(self, stream: object) -> Iterator[str]:
        yield from ("first", "second")
        raise av.error.InvalidDataError(1, "damaged")


def test_a_demuxer_that_fails_still_lets_the_decoder_give_its_last_frames() -> None:
    assert list(readable_packets(BreakingContainer(), None)) == ["first", "second", None]


def test_large_frames_share_the_pixel_budget() -> None:
    processor = msgspec.structs.replace(
        DEMO_PROCESSOR, video=msgspec.structs.replace(DEMO_PROCESSOR.video, max_pixels=40_000)
    )
    prepared = preprocess_video(video_file(flat_frames(4, 640, 480)), processor)
    assert prepared.grid_thw[0] * prepared.grid_thw[1] * prepared.grid_thw[2] * 512 <= 40_000


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (VideoLimits(max_bytes=100), "limit of 100"),
        (VideoLimits(max_frames=9), "more than 9 frames"),
        (VideoLimits(max_canvas_pixels=64 * 32 - 1), "64 x 32"),
        (VideoLimits(max_duration_s=0.4), "limit of 0 s"),
        (VideoLimits(max_decode_s=-1.0), "to decode"),
    ],
)
@pytest.mark.parametrize("kind", ["mp4", "webm", "gif"])
def test_every_limit_holds_in_every_container(limits: VideoLimits, named: str, kind: str) -> None:
    frames = flat_frames(10)
    data = {
        "mp4": lambda: video_file(frames, 10),
        "webm": lambda: video_file(frames, 10, "webm", "libvpx"),
        "gif": lambda: gif_file(frames),
    }[kind]()
    with pytest.raises(MediaTooLarge, match=named):
        probe_video(data, DEMO_PROCESSOR, limits=limits)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"RIFF\x00\x00\x00\x00AVI LIST",
        png(32, 32),
    ],
    ids=["empty", "text", "concat", "hls", "dash", "avi", "png"],
)
def test_other_containers_are_refused_by_their_first_bytes(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia, match="send MP4, MOV, WebM, MKV, GIF or a list of JPEG frames"):
        probe_video(data, DEMO_PROCESSOR)


@pytest.mark.skipif("AVIF" not in IMAGE_FORMATS, reason="this Pillow has no AVIF")
def test_a_still_in_a_video_container_is_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="image_url"):
        probe_video(encoded(Image.fromarray(picture(32, 32)), "AVIF"), DEMO_PROCESSOR)


def test_a_codec_outside_the_list_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMedia, match="codec mpeg2video"):
        probe_video(video_file(flat_frames(3), 25, "mp4", "mpeg2video"), DEMO_PROCESSOR)


def mac_alias(path: Path) -> bytes:
    """A data reference of QuickTime's alias kind, the one that ffmpeg can follow, to an absolute path."""
    name = str(path).encode()
    name += b"\0" * (len(name) % 2)
    body = bytes(4 + 10 + 1 + 27 + 12 + 1 + 63 + 16 + 4 + 16)
    body += struct.pack(">HH", 2, len(name)) + name + struct.pack(">HH", 0xFFFF, 0)
    return struct.pack(">I", 8 + len(body)) + b"alis" + body


def linked_mp4(whole: bytes, target: Path) -> bytes:
    """An MP4 whose own frame data is empty and whose track points at the frame data of another file."""
    own, link = struct.pack(">I", 12) + b"url " + b"\0\0\0\1", mac_alias(target)
    linked = whole.replace(own, link)
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = linked.index(box) - 4
        (size,) = struct.unpack_from(">I", linked, start)
        linked = linked[:start] + struct.pack(">I", size + len(link) - len(own)) + linked[start + 4 :]
    start = linked.index(b"mdat") + 4
    (size,) = struct.unpack_from(">I", linked, start - 8)
    return linked[:start] + bytes(size - 8) + linked[start + size - 8 :]


def test_an_mp4_whose_frames_lie_in_another_file_does_not_open_it(tmp_path: Path) -> None:
    whole = video_file(flat_frames(4))
    secret, linked = tmp_path / "secret.mp4", tmp_path / "linked.mp4"
    secret.write_bytes(whole)
    linked.write_bytes(linked_mp4(whole, secret))
    # The link is a working one: ffmpeg follows it where it is allowed to.
    with av.open(str(linked), options={"enable_drefs": "1", "use_absolute_path": "1"}) as container:
        assert len(list(container.decode(video=0))) == 4
    with pytest.raises(UnsupportedMedia):
        probe_video(linked.read_bytes(), DEMO_PROCESSOR)


SAMPLES = [
    video_file([picture(32, 32, seed) for seed in range(5)], 5, container, codec) for container, codec in CONTAINERS
] + [gif_file([picture(32, 32, seed) for seed in range(5)])]
FUZZ_LIMITS = VideoLimits(max_frames=200, max_canvas_pixels=1_000_000, max_decode_s=5.0)


@settings(deadline=10_000, max_examples=150)
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_mutated_video_gives_its_probe_or_one_of_our_errors(sample: bytes, data: st.DataObject) -> None:
    mutated = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 8))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(mutated[: data.draw(st.integers(len(mutated) // 3, len(mutated)))])
    try:
        probe = probe_video(cut, DEMO_PROCESSOR, limits=FUZZ_LIMITS)
    except TandemError:
        return
    assert probe_video(cut, DEMO_PROCESSOR, limits=FUZZ_LIMITS) == probe
    prepared = preprocess_video(cut, DEMO_PROCESSOR, limits=FUZZ_LIMITS)
    assert prepared.grid_thw == probe.grid_thw
    assert np.isfinite(prepared.pixel_values).all()
