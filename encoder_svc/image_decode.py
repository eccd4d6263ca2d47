"""Image bytes to RGB: the one function that every image goes through, stills and frames of a GIF alike.

Owns what each colour mode means: transparent pixels lie on white (as in transformers 5.24), 16-bit greys are scaled
(where the reference clips them to white, on purpose), the EXIF orientation is applied, and the first frame stands for
an animated file. Knows nothing of grids or resizing. Runs in the encoder's media threads.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

from common.errors import UnsupportedMedia
from common.image_header import DEFAULT_MAX_CANVAS_PIXELS, decoding_errors_mapped, open_image

RgbArray = npt.NDArray[np.uint8]

# EXIF orientation to the transposition that makes the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_rgb(data: bytes, *, max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS) -> RgbArray:
    """Decode an image to upright RGB, `[H, W, 3]` uint8."""
    return np.asarray(load_rgb_image(data, max_canvas_pixels=max_canvas_pixels))


def load_rgb_image(data: bytes, *, max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS) -> Image.Image:
    """As `load_rgb`, but as a Pillow image of mode RGB, which the resize takes without a copy."""
    image, header = open_image(data, max_canvas_pixels=max_canvas_pixels)
    with decoding_errors_mapped(header.format), image:
        image.load()
        rgb = to_rgb(image)
        if header.orientation in _UPRIGHT:
            rgb = rgb.transpose(_UPRIGHT[header.orientation])
    if rgb.size != (header.width, header.height):
        raise UnsupportedMedia(
            f"the {header.format}'s header says {header.width} x {header.height} pixels but it holds "
            f"{rgb.width} x {rgb.height}: save it again"
        )
    return rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB. Transparency, by channel or by a transparent colour, is laid on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _grey_to_rgb(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_to_rgb(image: Image.Image) -> Image.Image:
    """Greys of more than 8 bits. Integers span 0 to 65535; floats span 0 to 1 if all lie within, else 0 to 255."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        is_unit = values.size > 0 and values.min() >= 0.0 and values.max() <= 1.0
        grey = np.rint(np.clip(values * 255.0 if is_unit else values, 0.0, 255.0)).astype(np.uint8)
    else:
        grey = ((np.clip(values.astype(np.int64), 0, 65535) + 128) // 257).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(values == transparent, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def resize_bicubic(image: Image.Image, height: int, width: int) -> RgbArray:
    """Pillow's antialiased bicubic on uint8, as the reference's PIL processor: `[height, width, 3]`."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)
