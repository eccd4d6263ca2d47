"""The golden videos as files: each container, filled without loss, gives the reference's frames, times and pixels.

And a file whose packets are moved to another container is the same video: what is decoded depends on no container.
"""

import io
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest

from common.vision_grid import group_timestamps
from encoder_svc.preprocess import preprocess_video
from encoder_svc.video_decode import load_sampled_frames, probe_video
from tests.media_samples import DEMO_PROCESSOR, flat_frames, picture, rotated_mp4, video_file
from tests.paths import SHARED, needs_shared

GOLDEN = SHARED / "golden"
# A file always says how fast it plays, so the row whose rate is unknown is none.
ROWS: list[dict[str, Any]] = [
    row
    for row in (json.loads((GOLDEN / "golden.json").read_text()) if (GOLDEN / "golden.json").is_file() else [])
    if row["video_grid_thw"] and None not in row["fps"]
]
# Container, and what fills it without loss: red, green and blue as they are.
CONTAINERS = {
    "mp4": ("libx264rgb", "rgb24", {"qp": "0"}),
    "mov": ("libx264rgb", "rgb24", {"qp": "0"}),
    "matroska": ("libx264rgb", "rgb24", {"qp": "0"}),
    "webm": ("libvpx-vp9", "gbrp", {"lossless": "1"}),
}


def lossless_file(frames: npt.NDArray[np.uint8], fps: float, container: str) -> bytes:
    """A file of exactly these frames [n, height, width, 3]."""
    codec, pixel_format, options = CONTAINERS[container]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=options)
        assert isinstance(stream, av.video.stream.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixel_format
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


@needs_shared
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_golden_video_in_a_file_gives_the_golden_frames_times_and_patches(
    row: dict[str, Any], container: str
) -> None:
    with np.load(GOLDEN / "golden.npz") as arrays:
        golden = arrays[f"{row['name']}.pixel_values_videos"].astype(np.float32)
        videos = [arrays[f"{row['name']}.video{index}"] for index in range(len(row["fps"]))]
    patches = []
    for index, frames in enumerate(videos):
        if frames.shape[1] == 3 and frames.shape[-1] != 3:
            frames = frames.transpose(0, 2, 3, 1)
        data = lossless_file(frames, row["fps"][index], container)
        probe = probe_video(data, DEMO_PROCESSOR)
        assert (probe.num_frames, probe.frame_indices) == (row["num_frames"][index], row["sampled_frames"][index])
        assert list(probe.grid_thw) == row["video_grid_thw"][index]
        assert probe.timestamps == pytest.approx(
            group_timestamps(row["sampled_frames"][index], row["fps"][index], 2), abs=0.01
        )
        patches.append(preprocess_video(data, DEMO_PROCESSOR).pixel_values)
    difference = np.abs(np.concatenate(patches) - golden)
    assert difference.max() <= 0.03
    assert difference.mean() <= 0.003


def moved(data: bytes, container: str) -> bytes:
    """The same packets in another container."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(buffer, "w", format=container) as output:
        stream = source.streams.video[0]
        copy = output.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                output.mux(packet)
    return buffer.getvalue()


def noise(count: int) -> Sequence[npt.NDArray[np.uint8]]:
    return [picture(96, 64, seed) for seed in range(count)]


SOURCES: dict[str, Callable[[], bytes]] = {
    "h264 with frames out of order": lambda: video_file(noise(31), 24, "mp4", "libx264"),
    "mpeg4": lambda: video_file(noise(12), 5, "mp4", "mpeg4"),
    "h264 turned by a quarter": lambda: rotated_mp4(video_file(flat_frames(12), 6, "mp4", "libx264")),
}


@pytest.mark.parametrize("container", ["mov", "matroska"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_video_moved_to_another_container_has_the_same_frames_times_and_patches(name: str, container: str) -> None:
    data = SOURCES[name]()
    other = moved(data, container)
    assert other[:12] != data[:12]
    probe, moved_probe = probe_video(data, DEMO_PROCESSOR), probe_video(other, DEMO_PROCESSOR)
    assert moved_probe == probe
    frames, moved_frames = (list(load_sampled_frames(file, probe, 64, 96)) for file in (data, other))
    np.testing.assert_array_equal(moved_frames, frames)
    expected, got = (preprocess_video(file, DEMO_PROCESSOR) for file in (data, other))
    assert got.grid_thw == expected.grid_thw
    np.testing.assert_array_equal(got.pixel_values, expected.pixel_values)
