"""The size of an image from its header, and the one way that image bytes are opened.

Owns the list of accepted image formats, the canvas limit, and the EXIF orientation. The gateway reads headers here;
the encoder opens with the same function before it decodes. No pixel is decoded: a file that claims a huge canvas is
refused by its header. Knows nothing of grids or torch. Any thread may call it.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from common.errors import InvalidRequest, MediaTooLarge, TandemError, UnsupportedMedia

# Pillow's own point of refusal (twice its MAX_IMAGE_PIXELS): half a gigabyte of RGB.
DEFAULT_MAX_CANVAS_PIXELS = 178_956_970
_MAX_METADATA_BYTES = 1 << 20
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})

# Pillow's plugins are called directly, not through `Image.open`: that applies a process-wide pixel limit whose error
# does not tell the size, and it would try formats that are not in this table.
_OPENERS: dict[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.jpeg_factory,
    "GIF": GifImagePlugin.GifImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
if features.check("avif"):
    _OPENERS["AVIF"] = AvifImagePlugin.AvifImageFile

IMAGE_FORMATS = tuple(_OPENERS)


class ImageHeader(NamedTuple):
    """Size after the EXIF orientation, the orientation itself (1 to 8) and the format's name."""

    width: int
    height: int
    format: str
    orientation: int


def read_image_header(data: bytes, *, max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS) -> ImageHeader:
    """The header of an image. Raises `UnsupportedMedia` or `MediaTooLarge`, whose texts are ours alone."""
    image, header = open_image(data, max_canvas_pixels=max_canvas_pixels)
    image.close()
    return header


def open_image(
    data: bytes, *, max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS
) -> tuple[ImageFile.ImageFile, ImageHeader]:
    """Open an image whose pixels are not decoded yet, within the canvas limit."""
    name = sniff_image_format(data)
    with decoding_errors_mapped(name):
        image = _OPENERS[name](BytesIO(data))
        width, height = image.size
        if width * height > max_canvas_pixels:
            raise MediaTooLarge(
                f"the image is {width} x {height} pixels, above the limit of {max_canvas_pixels}: send a smaller one"
            )
        orientation = _orientation(image, name, data)
    if orientation >= 5:
        width, height = height, width
    return image, ImageHeader(width, height, name, orientation)


def sniff_image_format(data: bytes) -> str:
    """The format by its first bytes; a declared type or a file's name is never trusted."""
    if not data:
        raise UnsupportedMedia("the image is empty (0 bytes): send the bytes of a picture")
    for name, is_format in _SNIFFERS.items():
        if name in _OPENERS and is_format(data[:16]):
            return name
    raise UnsupportedMedia(f"the image's format is not supported: send one of {', '.join(IMAGE_FORMATS)}")


_SNIFFERS: dict[str, Callable[[bytes], bool]] = {
    "PNG": lambda head: head.startswith(_PNG_SIGNATURE),
    "JPEG": lambda head: head.startswith(b"\xff\xd8\xff"),
    "GIF": lambda head: head.startswith((b"GIF87a", b"GIF89a")),
    "WEBP": lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP",
    "BMP": lambda head: head.startswith(b"BM"),
    "TIFF": lambda head: head.startswith((b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")),
    "AVIF": lambda head: head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis", b"mif1", b"msf1"),
}


@contextmanager
def decoding_errors_mapped(name: str) -> Iterator[None]:
    """Turn whatever a decoder raises into one of our errors: damaged files make plugins raise nearly anything.

    The library's text is kept as the cause only, since it may hold addresses.
    """
    try:
        yield
    except TandemError:
        raise
    except (Image.DecompressionBombError, MemoryError) as exc:
        raise MediaTooLarge(f"the {name} unpacks to more than can be held: send a smaller one") from exc
    except Exception as exc:
        raise UnsupportedMedia(f"the {name} is damaged or cut short: send the whole file") from exc


def _orientation(image: ImageFile.ImageFile, name: str, data: bytes) -> int:
    """The EXIF (or XMP) orientation, 1 when absent or nonsense."""
    if name == "TIFF":
        # Pillow reports a TIFF's upright size and turns its pixels itself while it loads them.
        return 1
    if name == "PNG":
        # PngImageFile.getexif decodes the pixels to reach metadata behind them; ours is moved to the front instead.
        image = PngImagePlugin.PngImageFile(BytesIO(_png_metadata_only(data)))
    value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_metadata_only(data: bytes) -> bytes:
    """A PNG of the header, the metadata chunks (also those after the pixels) and an empty pixel chunk."""
    kept = [_PNG_SIGNATURE]
    num_bytes, offset = 0, len(_PNG_SIGNATURE)
    while offset + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, offset)
        end = offset + 12 + length
        if kind == b"IHDR" or (kind in _PNG_METADATA and end <= len(data)):
            num_bytes += length
            if num_bytes > _MAX_METADATA_BYTES:
                raise InvalidRequest(
                    f"the PNG has more than {_MAX_METADATA_BYTES} bytes of metadata: save it without metadata"
                )
            kept.append(data[offset:end])
        if kind == b"IEND":
            break
        offset = end
    kept.append(b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e\x00\x00\x00\x00IEND\xae\x42\x60\x82")
    return b"".join(kept)
