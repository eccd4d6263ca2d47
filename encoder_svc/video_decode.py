"""Which frames of a video are seen, and those frames resized.

Owns the one decision about a video's frames (`probe_video`): the frames that really decode are counted, whatever the
header says, and sampled as transformers 5.24 does. The gateway's probe and the encoder's preprocessing both use it,
so they cannot disagree. Knows nothing of patches or prompts. Runs in the encoder's media threads.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from common.errors import UnsupportedMedia
from common.processor_config import ProcessorConfig
from common.vision_grid import Grid, frame_rate, group_timestamps, sample_frames, video_grid
from encoder_svc.image_decode import RgbArray, resize_bicubic
from encoder_svc.video_source import VideoLimits, bounded_frames, check_duration, open_video

DEFAULT_VIDEO_LIMITS = VideoLimits()


@dataclass(frozen=True)
class VideoProbe:
    """A video's facts. `num_frames` counts frames that decode; `timestamps` has one value a temporal patch."""

    grid_thw: Grid
    frame_indices: list[int]
    timestamps: list[float]
    num_frames: int
    fps: float | None
    width: int
    height: int


def probe_video(data: bytes, processor: ProcessorConfig, *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS) -> VideoProbe:
    """Decode a video once to learn what it holds. Deterministic in its arguments, so the result may be kept."""
    source = open_video(data, limits)
    num_frames = width = height = 0
    with closing(bounded_frames(source, limits)) as frames:
        for frame in frames:
            if num_frames == 0:
                width, height = frame.width, frame.height
            num_frames += 1
    fps = _believable_fps(source.fps())
    check_duration(num_frames / frame_rate(fps), limits)
    settings = processor.video
    indices = sample_frames(num_frames, fps, settings)
    return VideoProbe(
        grid_thw=video_grid(len(indices), width, height, settings),
        frame_indices=indices,
        timestamps=group_timestamps(indices, fps, settings.temporal_patch_size),
        num_frames=num_frames,
        fps=fps,
        width=width,
        height=height,
    )


def load_sampled_frames(
    data: bytes, probe: VideoProbe, height: int, width: int, *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS
) -> Iterator[RgbArray]:
    """The probe's frames in order, each resized to `[height, width, 3]` uint8; repeated indices give a frame again."""
    wanted = iter(probe.frame_indices)
    next_index = next(wanted, None)
    with closing(bounded_frames(open_video(data, limits), limits)) as frames:
        for index, frame in enumerate(frames):
            if index != next_index:
                continue
            resized = resize_bicubic(frame.to_rgb(), height, width)
            while index == next_index:
                yield resized
                next_index = next(wanted, None)
            if next_index is None:
                return
    raise UnsupportedMedia(f"the video's frame {next_index} of {probe.num_frames} cannot be decoded: send it again")


def _believable_fps(fps: float | None) -> float | None:
    return fps if fps is not None and math.isfinite(fps) and frame_rate(fps) == fps else None
