"""Small media files for tests, made in memory, and the settings of the demo model."""

import json
import struct
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from common.processor_config import ImageSettings, MediaTokenIds, ProcessorConfig, VideoSettings

DEMO_COMMON: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "rescale_factor": 1 / 255,
}
DEMO_PROCESSOR = ProcessorConfig(
    image=ImageSettings(**DEMO_COMMON, min_pixels=16_384, max_pixels=262_144),
    video=VideoSettings(
        **DEMO_COMMON,
        min_pixels=4_096,
        max_pixels=1_572_864,
        fps=2.0,
        min_frames=4,
        max_frames=768,
        cap_pixels_per_frame=False,
        max_video_tokens=768,
    ),
    tokens=MediaTokenIds(
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653
    ),
)


def picture(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise, so that any mistake of order or orientation shows: `[height, width, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """An image file's bytes."""
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of noise."""
    return encoded(Image.fromarray(picture(width, height, seed)))


def flat_frames(num_frames: int, width: int = 64, height: int = 32) -> list[npt.NDArray[np.uint8]]:
    """Frames of one grey each, from dark to light, so that a decoded frame tells its index."""
    levels = np.linspace(20, 235, num_frames).round().astype(int)
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def video_file(
    frames: Sequence[npt.NDArray[np.uint8]], fps: int = 24, container: str = "mp4", codec: str = "mpeg4"
) -> bytes:
    """A video file's bytes."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def gif_file(frames: Sequence[npt.NDArray[np.uint8]], duration_ms: int = 100) -> bytes:
    """An animated GIF's bytes."""
    images = [Image.fromarray(frame) for frame in frames]
    return encoded(images[0], "GIF", save_all=True, append_images=images[1:], duration=duration_ms, loop=0)


def rotated_mp4(data: bytes) -> bytes:
    """The same MP4 with a track header that says: turn by 90 degrees clockwise, as a phone held upright writes."""
    start = data.index(b"tkhd") + 4 + 40
    one, w = 1 << 16, 1 << 30
    return data[:start] + struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, w) + data[start + 36 :]


def write_checkpoint(
    folder: Path, *, config: Any = None, image: Any = None, video: Any = None, nested: Any = None
) -> Path:
    """A checkpoint folder with just the files that a processor is read from."""
    for name, value in (
        ("config.json", config),
        ("preprocessor_config.json", image),
        ("video_preprocessor_config.json", video),
        ("processor_config.json", nested),
    ):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder
