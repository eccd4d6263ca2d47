"""From sizes to grids, frames and prompt pieces: the arithmetic that gateway and encoder must share.

Owns the resize targets of images and videos, frame sampling, time stamps and the pieces of a video prompt. Pure:
knows nothing of pixels, files, tokenizers or clocks, so any thread may call it. A grid is `(t, h, w)` in patches.
Source of the arithmetic: transformers 5.24, `smart_resize` of Qwen2-VL images and Qwen3-VL videos. Python's `round`
is half to even, as there; a port that rounds half up gives other grids at 272, 304 or 336 pixels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import InvalidRequest, UnsupportedMedia
from common.processor_config import ImageSettings, MediaTokenIds, VideoSettings

MAX_ASPECT_RATIO = 200
DEFAULT_VIDEO_FPS = 24.0  # the reference's guess for a video that does not say

Grid = tuple[int, int, int]


class FrameGroup(NamedTuple):
    """One temporal patch of a video in the prompt: its time stamp text and how many vision tokens follow."""

    text: str
    num_vision_tokens: int


def smart_resize_image(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The (height, width) an image is resized to: multiples of `factor`, area within the pixel limits."""
    _check_aspect_ratio(height, width, "image")
    factor = settings.factor
    target_h = round(height / factor) * factor
    target_w = round(width / factor) * factor
    return _fit_area(height, width, 1, target_h * target_w, (target_h, target_w), settings, settings.max_pixels)


def smart_resize_video(num_frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
    """The (height, width) all frames are resized to; `num_frames` counts sampled frames, before the padding.

    The area test uses the frame count rounded half to even, the scale uses the raw count: as the reference does. A
    single frame counts as one full temporal patch, which the reference refuses.
    """
    factor, temporal = settings.factor, settings.temporal_patch_size
    num_frames = max(num_frames, temporal)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width, "video")
    target_h = round(height / factor) * factor
    target_w = round(width / factor) * factor
    rounded_frames = round(num_frames / temporal) * temporal
    return _fit_area(
        height,
        width,
        num_frames,
        rounded_frames * target_h * target_w,
        (target_h, target_w),
        settings,
        max_video_pixels(num_frames, settings),
    )


def max_video_pixels(num_frames: int, settings: VideoSettings) -> int:
    """The pixel budget of all sampled frames together."""
    if not settings.cap_pixels_per_frame:
        return settings.max_pixels
    frame_cap = settings.max_video_tokens * settings.factor**2
    per_frame = max(min(frame_cap, settings.max_pixels // num_frames), int(settings.min_pixels * 1.05))
    return per_frame * num_frames


def image_grid(width: int, height: int, settings: ImageSettings) -> Grid:
    """The grid of an upright image of `width` x `height` pixels."""
    target_h, target_w = smart_resize_image(height, width, settings)
    return 1, target_h // settings.patch_size, target_w // settings.patch_size


def video_grid(num_frames: int, width: int, height: int, settings: VideoSettings) -> Grid:
    """The grid of a video of which `num_frames` frames were sampled."""
    target_h, target_w = smart_resize_video(num_frames, height, width, settings)
    grid_t = -(-num_frames // settings.temporal_patch_size)
    return grid_t, target_h // settings.patch_size, target_w // settings.patch_size


def num_patches(grid: Grid) -> int:
    """Rows of `pixel_values`."""
    return grid[0] * grid[1] * grid[2]


def num_vision_tokens(grid: Grid, merge_size: int) -> int:
    """Tokens that a grid takes in the prompt: one for each merge block of each temporal patch."""
    return num_patches(grid) // merge_size**2


def frame_rate(fps: float | None) -> float:
    """The rate to count with: a container's claim if it is believable, else the reference's guess."""
    return fps if fps is not None and 1e-3 <= fps <= 1e4 else DEFAULT_VIDEO_FPS


def sample_frames(total_frames: int, fps: float | None, settings: VideoSettings) -> list[int]:
    """Indices of the sampled frames: `settings.fps` a second, evenly spread, first and last included.

    A request's `num_frames` is taken as it is, as by the reference: a shorter video gives frames more than once.
    """
    if total_frames < 1:
        raise UnsupportedMedia("the video has no readable frame: send a video of at least one frame")
    wanted = int(total_frames / frame_rate(fps) * settings.fps)
    count = settings.num_frames or min(max(wanted, settings.min_frames), settings.max_frames, total_frames)
    # numpy's linspace, because its rounding of the inner points is the reference's.
    indices: list[int] = np.linspace(0, total_frames - 1, count).round().astype(int).tolist()
    return indices


def group_timestamps(frame_indices: Sequence[int], fps: float | None, temporal_patch_size: int) -> list[float]:
    """Seconds of each temporal patch: the mean of its first and last frame; the last frame is repeated to fill."""
    rate = frame_rate(fps)
    missing = -len(frame_indices) % temporal_patch_size
    times = [index / rate for index in [*frame_indices, *([frame_indices[-1]] * missing)]]
    return [
        (times[start] + times[start + temporal_patch_size - 1]) / 2
        for start in range(0, len(times), temporal_patch_size)
    ]


def is_consistent_video(
    grid: Grid, frame_indices: Sequence[int], timestamps: Sequence[float], settings: VideoSettings
) -> bool:
    """Whether facts of a video that come from elsewhere can be true: each part must fit the others."""
    num_groups, height, width = grid
    return (
        len(timestamps) == num_groups == -(-len(frame_indices) // settings.temporal_patch_size)
        and height % settings.merge_size == 0
        and width % settings.merge_size == 0
    )


def video_frame_groups(timestamps: Sequence[float], grid: Grid, merge_size: int) -> list[FrameGroup]:
    """The prompt of a video as groups. One time stamp for each temporal patch, or the video was not this grid's."""
    if len(timestamps) != grid[0]:
        raise InvalidRequest(
            f"the video has {len(timestamps)} time stamps for a grid of {grid[0]} temporal patches: send it again"
        )
    tokens = num_vision_tokens((1, grid[1], grid[2]), merge_size)
    return [FrameGroup(f"<{seconds:.1f} seconds>", tokens) for seconds in timestamps]


def image_placeholder_tokens(grid: Grid, merge_size: int, tokens: MediaTokenIds) -> list[int]:
    """What replaces one image placeholder. The template's vision_start and vision_end around it stay."""
    return [tokens.image_token_id] * num_vision_tokens(grid, merge_size)


def video_prompt(
    groups: Sequence[FrameGroup], tokens: MediaTokenIds, *, keep_outer_pair: bool = True
) -> list[str | int]:
    """What replaces a template's `vision_start video_pad vision_end`: strings to tokenize, and token ids.

    For each group: its text, vision_start, the placeholders, vision_end. transformers 5.24 leaves the template's own
    pair around the groups (`keep_outer_pair`, the default); before 5, and in training, the pair was replaced as well.
    Without the pair the first text touches the prompt's text before the video: join the two before tokenizing.
    """
    pieces: list[str | int] = [tokens.vision_start_token_id] if keep_outer_pair else []
    for group in groups:
        pieces += [group.text, tokens.vision_start_token_id]
        pieces += [tokens.video_token_id] * group.num_vision_tokens
        pieces.append(tokens.vision_end_token_id)
    if keep_outer_pair:
        pieces.append(tokens.vision_end_token_id)
    return pieces


def _check_aspect_ratio(height: int, width: int, kind: str) -> None:
    if height < 1 or width < 1:
        raise UnsupportedMedia(f"the {kind} is {width} x {height} pixels: each side needs at least 1")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise InvalidRequest(
            f"the {kind} is {width} x {height} pixels, an aspect ratio of {ratio:.1f}: "
            f"at most {MAX_ASPECT_RATIO} is possible, so crop or pad it"
        )


def _fit_area(
    height: int,
    width: int,
    num_frames: int,
    target_area: int,
    target: tuple[int, int],
    settings: ImageSettings,
    max_pixels: int,
) -> tuple[int, int]:
    """Scale (height, width) into the pixel limits when the rounded `target` is outside of them."""
    factor = settings.factor
    if target_area > max_pixels:
        beta = math.sqrt((num_frames * height * width) / max_pixels)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if target_area < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (num_frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return target
