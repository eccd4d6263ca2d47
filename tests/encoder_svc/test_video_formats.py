"""The table of video formats: each container and codec, lists of JPEG frames, and files that are cut or are none."""

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from common.errors import Cancelled, MediaTooLarge, TandemError, UnsupportedMedia
from encoder_svc.image_decode import load_rgb
from encoder_svc.jpeg_frames import split_jpegs
from encoder_svc.preprocess import preprocess_video
from encoder_svc.video_decode import load_sampled_frames, probe_video
from encoder_svc.video_source import VideoLimits
from tests.media_samples import DEMO_PROCESSOR, encoded, flat_frames, gif_file, picture, video_file


def jpegs(count: int, width: int = 64, height: int = 32, **options: object) -> list[bytes]:
    return [encoded(Image.fromarray(frame), "JPEG", **options) for frame in flat_frames(count, width, height)]


def greys(data: bytes) -> list[float]:
    probe = probe_video(data, DEMO_PROCESSOR)
    return [float(frame.mean()) for frame in load_sampled_frames(data, probe, 32, 64)]


def old_mov(data: bytes) -> bytes:
    """A MOV without its type box, as QuickTime wrote them first: it may begin with its pictures."""
    size = int.from_bytes(data[:4], "big")
    return data[size:]


FILES = {
    "mp4 h264": lambda: video_file(flat_frames(12), 6, "mp4", "libx264"),
    "mov mpeg4": lambda: video_file(flat_frames(12), 6, "mov", "mpeg4"),
    "mov h264": lambda: video_file(flat_frames(12), 6, "mov", "libx264"),
    "mkv h264": lambda: video_file(flat_frames(12), 6, "matroska", "libx264"),
    "mkv mpeg4": lambda: video_file(flat_frames(12), 6, "matroska", "mpeg4"),
    "webm vp9": lambda: video_file(flat_frames(12), 6, "webm", "libvpx-vp9"),
    "gif": lambda: gif_file(flat_frames(12), 100),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_its_frames_in_order(name: str) -> None:
    data = FILES[name]()
    probe = probe_video(data, DEMO_PROCESSOR)
    assert (probe.num_frames, probe.width, probe.height) == (12, 64, 32)
    expected = [flat_frames(12)[index].mean() for index in probe.frame_indices]
    np.testing.assert_allclose(greys(data), expected, atol=4)
    assert preprocess_video(data, DEMO_PROCESSOR).grid_thw == probe.grid_thw


def test_a_mov_that_begins_without_its_type_is_read() -> None:
    data = video_file(flat_frames(12), 6, "mov", "mpeg4")
    cut = old_mov(data)
    assert cut[4:8] in (b"wide", b"mdat", b"moov", b"free")
    padded = (len(data) - len(cut)).to_bytes(4, "big") + b"free" + bytes(len(data) - len(cut) - 8) + cut
    assert probe_video(padded, DEMO_PROCESSOR).num_frames == 12


def test_a_list_of_jpeg_frames_plays_at_24_a_second() -> None:
    data = b"".join(jpegs(48))
    probe = probe_video(data, DEMO_PROCESSOR)
    assert (probe.num_frames, probe.fps, probe.frame_indices) == (48, None, [0, 16, 31, 47])
    np.testing.assert_allclose(greys(data), [flat_frames(48)[i].mean() for i in (0, 16, 31, 47)], atol=2)


def test_a_frame_of_a_list_is_the_picture_that_an_image_url_gives() -> None:
    thumbnail = jpegs(1, 16, 16)[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(picture(64, 96))
    frames = [
        encoded(stored, "JPEG", exif=exif.tobytes(), comment=thumbnail),  # a whole JPEG inside of its header
        encoded(stored, "JPEG", progressive=True, restart_marker_blocks=2),
        encoded(stored.convert("L"), "JPEG", quality=100),
    ]
    assert [bytes(frame) for frame in split_jpegs(b"".join(frames), 10)] == frames
    probe = probe_video(b"".join(frames), DEMO_PROCESSOR)
    assert (probe.num_frames, probe.width, probe.height) == (3, 96, 64)
    first = next(load_sampled_frames(b"".join(frames), probe, 64, 96))
    np.testing.assert_array_equal(first, load_rgb(frames[0]))


def test_a_broken_frame_of_a_list_is_named() -> None:
    frames = jpegs(4)
    frames[2] = frames[2][:3] + bytes(200)
    with pytest.raises(UnsupportedMedia, match="frame 2 of the list"):
        probe_video(b"".join(frames[:3]), DEMO_PROCESSOR)
    with pytest.raises(UnsupportedMedia, match="behind 2 JPEG frames"):
        probe_video(b"".join(jpegs(2)) + b"something else", DEMO_PROCESSOR)


def test_a_list_is_bounded_in_frames_and_in_pixels() -> None:
    data = b"".join(jpegs(5))
    with pytest.raises(MediaTooLarge, match="more than 4 frames"):
        probe_video(data, DEMO_PROCESSOR, limits=VideoLimits(max_frames=4))
    with pytest.raises(MediaTooLarge, match="64 x 32"):
        probe_video(data, DEMO_PROCESSOR, limits=VideoLimits(max_canvas_pixels=64 * 32 - 1))


def audio_only(container: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=48_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        frame.rate, frame.pts, frame.time_base = 48_000, 0, Fraction(1, 48_000)
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("mov", "aac"), ("matroska", "aac")])
def test_a_file_with_sound_alone_is_refused_by_what_it_lacks(container: str, codec: str) -> None:
    with pytest.raises(UnsupportedMedia, match="no video track"):
        probe_video(audio_only(container, codec), DEMO_PROCESSOR)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_file_that_is_cut_gives_its_readable_frames_or_is_refused(name: str, share: float) -> None:
    data = FILES[name]()
    cut = data[: int(len(data) * share)]
    try:
        probe = probe_video(cut, DEMO_PROCESSOR)
    except UnsupportedMedia:
        return
    assert 0 < probe.num_frames <= 12
    assert preprocess_video(cut, DEMO_PROCESSOR).grid_thw == probe.grid_thw


@pytest.mark.parametrize("name", [*FILES, "jpeg list"])
def test_reading_stops_when_nobody_waits_any_more(name: str) -> None:
    data = b"".join(jpegs(12)) if name == "jpeg list" else FILES[name]()
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Cancelled, match="nobody waits"):
        probe_video(data, DEMO_PROCESSOR, limits=VideoLimits(is_over=is_over))
    assert asked == 4


def file_at_times(times: Sequence[int], container: str, codec: str) -> bytes:
    """Frames that are shown at multiples of a tenth of a second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        assert isinstance(stream, av.video.stream.VideoStream)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 10)
        for pixels, time in zip(flat_frames(len(times)), times, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 10)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "mpeg4"), ("mov", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9")],
)
def test_a_file_of_variable_rate_plays_at_the_mean_of_its_frames_in_every_container(container: str, codec: str) -> None:
    times = [0, 1, 2, 3, 4, 5, 10, 15, 20, 25, 30, 35]  # the last of them for a tenth of a second
    data = file_at_times(times, container, codec)
    probe = probe_video(data, DEMO_PROCESSOR)
    assert probe.num_frames == 12
    assert probe.fps == pytest.approx(12 / 3.6)
    assert probe.frame_indices == [0, 2, 4, 6, 7, 9, 11]
    assert probe.timestamps == pytest.approx([0.3, 1.5, 2.4, 3.3])
    np.testing.assert_allclose(greys(data), [flat_frames(12)[index].mean() for index in probe.frame_indices], atol=4)


@pytest.mark.parametrize(
    ("container", "limits", "named"),
    [
        ("mp4", {"max_frames": 11}, "more than 11 frames"),
        ("mov", {"max_frames": 11}, "more than 11 frames"),
        ("mp4", {"max_duration_s": 1}, "lasts 2 s"),
        ("mov", {"max_duration_s": 1}, "lasts 2 s"),
        ("matroska", {"max_duration_s": 1}, "lasts 2 s"),  # whose header tells no number of frames
    ],
)
def test_what_a_header_promises_beyond_a_limit_is_refused_before_anything_is_decoded(
    container: str, limits: dict[str, int], named: str
) -> None:
    data = video_file(flat_frames(12), 6, container, "mpeg4")
    with pytest.raises(MediaTooLarge, match=named):
        probe_video(data, DEMO_PROCESSOR, limits=VideoLimits(**limits, max_decode_s=-1.0))  # nothing may be decoded


@pytest.mark.parametrize("fps", [5, 24, 30])
@pytest.mark.parametrize(("container", "codec"), [("matroska", "libx264"), ("webm", "libvpx-vp9"), ("mp4", "mpeg4")])
def test_a_steady_rate_is_the_stated_one_to_the_bit(container: str, codec: str, fps: int) -> None:
    assert probe_video(video_file(flat_frames(12), fps, container, codec), DEMO_PROCESSOR).fps == float(fps)


JPEGS = b"".join(jpegs(3, 16, 16))


@given(st.lists(st.tuples(st.integers(0, len(JPEGS) - 1), st.integers(0, 255)), max_size=6), st.integers(3, len(JPEGS)))
def test_whatever_is_done_to_a_list_of_jpegs_its_pieces_are_the_whole(changes: list[tuple[int, int]], end: int) -> None:
    data = bytearray(JPEGS)
    for index, value in changes:
        data[index] = value
    try:
        pieces = split_jpegs(bytes(data[:end]), 10)
    except TandemError:
        return
    assert b"".join(pieces) == data[:end]
