"""Media bytes to patches: what the vision tower takes.

Owns the patch order and, for comparison, the normalisation: `normalised` patches equal transformers 5.24's PIL image
processor to the bit for the published settings. The tower takes the bytes as they are, since it folds the normalisation
into its weights. Knows nothing of batches, sockets or torch. Pure but for the decoders; runs in the encoder's media
threads. Legend: `P` patches, `T` frames and `p` pixels a side of one, `m` patches a side of a token.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from common.errors import UnsupportedMedia
from common.image_header import DEFAULT_MAX_CANVAS_PIXELS
from common.metrics import SECONDS_BUCKETS, Histogram
from common.processor_config import ImageSettings, ProcessorConfig
from common.vision_grid import Grid, image_grid, num_patches
from encoder_svc.image_decode import RgbArray, load_rgb_image, resize_bicubic
from encoder_svc.video_decode import DEFAULT_VIDEO_LIMITS, VideoProbe, load_sampled_frames, probe_video
from encoder_svc.video_source import VideoLimits

DECODE_SECONDS = Histogram(
    "tandem_encoder_decode_seconds",
    "Files to pixels, a part of preprocessing; with their scaling for videos",
    ["modality"],
    buckets=SECONDS_BUCKETS,
)

PatchArray = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


@dataclass(frozen=True)
class PreparedMedia:
    """One item for the tower: its patches `[P, columns]`, and its grid, whose product is P.

    uint8: pixels as in the picture, columns in the order (T, p, p, 3), or (p, p, 3) for a still image.
    float32: normalised, columns in the order (3, T, p, p).
    """

    pixel_values: PatchArray
    grid_thw: Grid


def read_image(
    data: bytes, processor: ProcessorConfig, *, max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS
) -> PreparedMedia:
    """An image's patches, uint8. The grid is the one that its header gives in the gateway."""
    settings = processor.image
    began = time.perf_counter()
    image = load_rgb_image(data, max_canvas_pixels=max_canvas_pixels)
    DECODE_SECONDS.labels("image").observe(time.perf_counter() - began)
    grid = image_grid(image.width, image.height, settings)
    resized = resize_bicubic(image, grid[1] * settings.patch_size, grid[2] * settings.patch_size)
    patches = np.empty((num_patches(grid), 3 * settings.patch_size**2), np.uint8)
    fill_frame(patches[:, None], resized, settings)
    return PreparedMedia(patches, grid)


def read_video(
    data: bytes,
    processor: ProcessorConfig,
    *,
    limits: VideoLimits = DEFAULT_VIDEO_LIMITS,
    probe: VideoProbe | None = None,
) -> PreparedMedia:
    """A video's patches, uint8. A `probe` of the same bytes and settings spares one of the two decoding passes."""
    settings = processor.video
    probe = probe or probe_video(data, processor, limits=limits)
    height, width = probe.grid_thw[1] * settings.patch_size, probe.grid_thw[2] * settings.patch_size
    frames = load_sampled_frames(data, probe, height, width, limits=limits)
    return pack_frames(_timed(frames), probe.grid_thw, settings)


def _timed(frames: Iterator[RgbArray]) -> Iterator[RgbArray]:
    """The frames of one video, and what it took to get them counted."""
    seconds = 0.0
    while True:
        began = time.perf_counter()
        frame = next(frames, None)
        seconds += time.perf_counter() - began
        if frame is None:
            break
        yield frame
    DECODE_SECONDS.labels("video").observe(seconds)


def pack_frames(frames: Iterable[RgbArray], grid: Grid, settings: ImageSettings) -> PreparedMedia:
    """The patches of resized frames, uint8, a temporal patch at a time, so that few frames are held at once."""
    temporal = settings.temporal_patch_size
    patches = np.empty((grid[0], grid[1] * grid[2], temporal, 3 * settings.patch_size**2), np.uint8)
    num_filled = 0
    for group in _grouped(frames, temporal):
        if num_filled < grid[0]:
            for slot in range(temporal):  # the last frame fills what is missing
                fill_frame(patches[num_filled, :, slot : slot + 1], group[min(slot, len(group) - 1)], settings)
        num_filled += 1
    if num_filled != grid[0]:
        raise UnsupportedMedia(f"the video gave {num_filled} of {grid[0]} temporal patches: send it again")
    return PreparedMedia(patches.reshape(num_patches(grid), -1), grid)


def _grouped(frames: Iterable[RgbArray], size: int) -> Iterator[list[RgbArray]]:
    iterator = iter(frames)
    while group := list(islice(iterator, size)):
        yield group


def fill_frame(out: npt.NDArray[np.uint8], frame: RgbArray, settings: ImageSettings) -> None:
    """Write one frame in the tower's patch order.

    out    [h*w, 1, p*p*3]  uint8, written: rows by token (h/m, w/m, m, m), columns (p, p, 3); may have strides
    frame  [h*p, w*p, 3]    uint8
    """
    patch, merge = settings.patch_size, settings.merge_size
    rows, cols = frame.shape[0] // (patch * merge), frame.shape[1] // (patch * merge)
    # A row of a patch is one element, so that numpy moves 48 bytes at a time.
    pixels = np.dtype((np.void, 3 * patch))
    source = np.ascontiguousarray(frame).reshape(frame.shape[0], -1).view(pixels)
    blocks = source.reshape(rows, merge, patch, cols, merge).transpose(0, 3, 1, 4, 2)
    out.view(pixels).reshape(rows, cols, merge, merge, patch)[...] = blocks


def normalised(prepared: PreparedMedia, settings: ImageSettings) -> PreparedMedia:
    """The same patches in the reference's form: float32, with both frames of a still image."""
    temporal, area = settings.temporal_patch_size, settings.patch_size**2
    # float32(x / 255) is what the reference's float64 product rounds to for each of the 256 values; x * (1/255) is not.
    values = np.arange(256, dtype=np.float32) / np.float32(1 / settings.rescale_factor)
    patches = prepared.pixel_values.reshape(len(prepared.pixel_values), -1, area, 3)
    out = np.empty((len(patches), 3, temporal, area), np.float32)
    for channel in range(3):
        table = (values - np.float32(settings.image_mean[channel])) / np.float32(settings.image_std[channel])
        out[:, channel] = table[patches[..., channel]]  # one frame stands for all
    return PreparedMedia(out.reshape(len(out), -1), prepared.grid_thw)


def preprocess_image(data: bytes, processor: ProcessorConfig) -> PreparedMedia:
    """What the reference's image processor returns."""
    return normalised(read_image(data, processor), processor.image)


def preprocess_video(
    data: bytes, processor: ProcessorConfig, *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS
) -> PreparedMedia:
    """What the reference's video processor returns."""
    return normalised(read_video(data, processor, limits=limits), processor.video)
