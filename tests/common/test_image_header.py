"""An image's size comes from its header alone, within limits, and errors are in our own words."""

import re
import struct
import subprocess
import sys
import zlib
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from common.errors import MediaTooLarge, TandemError, UnsupportedMedia
from common.image_header import IMAGE_FORMATS, read_image_header
from tests.media_samples import encoded, picture, png
from tests.paths import REPOSITORY, SHARED, needs_shared

WITH_EXIF = [name for name in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF") if name in IMAGE_FORMATS]
FOREIGN_TEXT = re.compile(r"0x|BytesIO|PIL|object at|/")


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def claiming_png(width: int, height: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def with_orientation(format: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(picture(7, 5)), format, exif=exif)


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_every_accepted_format_tells_its_size(format: str) -> None:
    header = read_image_header(encoded(Image.fromarray(picture(7, 5)), format))
    assert (header.width, header.height, header.format, header.orientation) == (7, 5, format, 1)


@pytest.mark.parametrize("format", WITH_EXIF)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_the_upright_one(format: str, orientation: int) -> None:
    data = with_orientation(format, orientation)
    header = read_image_header(data)
    assert (header.width, header.height) == ImageOps.exif_transpose(Image.open(BytesIO(data))).size


def test_a_png_orientation_behind_the_pixels_is_seen_without_decoding_them() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = png(7, 5)
    end = data.index(b"IEND") - 4
    late = data[:end] + chunk(b"eXIf", exif.tobytes()[6:]) + data[end:]
    assert read_image_header(late)[:2] == (5, 7)
    broken_pixels = bytearray(late)
    broken_pixels[late.index(b"IDAT") + 6] ^= 0xFF
    assert read_image_header(bytes(broken_pixels))[:2] == (5, 7)


def test_an_xmp_orientation_counts_as_in_the_reference() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"></x:xmpmeta>'
    assert read_image_header(encoded(Image.fromarray(picture(7, 5)), "JPEG", xmp=xmp)).orientation == 6


@pytest.mark.parametrize("value", [0, 9, 65_535])
def test_a_nonsense_orientation_is_none(value: int) -> None:
    assert read_image_header(with_orientation("JPEG", value)).orientation == 1


def test_a_huge_canvas_is_refused_with_its_size_and_the_limit() -> None:
    with pytest.raises(MediaTooLarge, match=r"20000 x 20000.*178956970.*smaller"):
        read_image_header(claiming_png(20_000, 20_000))
    with pytest.raises(MediaTooLarge, match=r"7 x 5.*34"):
        read_image_header(png(7, 5), max_canvas_pixels=34)
    assert read_image_header(png(7, 5), max_canvas_pixels=35)[:2] == (7, 5)


@pytest.mark.parametrize(
    "bomb",
    [
        claiming_png(20_000, 20_000),
        b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 9, 9, 0),
        b"BM" + struct.pack("<IHHIIiiHHIIIIII", 99, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
        b"RIFF\x1e\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00\xfe\x3f\x00\xfe\x3f\x00" + b"VP8 \0\0\0\0",
    ],
    ids=["png", "gif", "bmp", "webp"],
)
def test_a_bomb_costs_neither_memory_nor_time(bomb: bytes) -> None:
    script = (
        "import resource, sys, time\n"
        "from common.errors import InvalidRequest\n"
        "from common.image_header import read_image_header\n"
        "data = sys.stdin.buffer.read()\n"
        "before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()\n"
        "try:\n    read_image_header(data)\n"
        "except InvalidRequest as exc:\n    print(type(exc).__name__)\n"
        "assert time.process_time() - began < 1\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=bomb, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip() in (b"MediaTooLarge", b"UnsupportedMedia")


def test_too_much_png_metadata_is_refused() -> None:
    data = png(7, 5)
    text = b"".join(chunk(b"tEXt", b"k\0" + b"x" * 600_000) for _ in range(2))
    with pytest.raises(TandemError, match="metadata"):
        read_image_header(data[:33] + text + data[33:])


@pytest.mark.parametrize("data", [b"", b"<svg xmlns='x'/>", b"%PDF-1.7", b"\x00" * 64, b"hello"])
def test_what_is_no_picture_is_refused_in_our_own_words(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        read_image_header(data)
    assert not FOREIGN_TEXT.search(caught.value.message)


@needs_shared
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("IMG-18/bomb.png", MediaTooLarge),
        ("IMG-20/bad.bin", UnsupportedMedia),
        ("IMG-21/bad.bin", UnsupportedMedia),
    ],
)
def test_the_bad_files_of_the_cases_are_refused_in_our_own_words(path: str, error: type[TandemError]) -> None:
    with pytest.raises(error) as caught:
        read_image_header((SHARED / "cases" / path).read_bytes())
    assert not FOREIGN_TEXT.search(caught.value.message)


@needs_shared
def test_a_rotated_photo_has_the_upright_size_of_case_img_01() -> None:
    header = read_image_header((SHARED / "cases" / "IMG-01" / "exif6.jpg").read_bytes())
    assert (header.width, header.height) == (64, 96)


SAMPLES = [encoded(Image.fromarray(picture(20, 13)), format) for format in IMAGE_FORMATS]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_mutated_file_gives_a_header_or_one_of_our_errors(sample: bytes, data: st.DataObject) -> None:
    mutated = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 8))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    assert_header_or_our_error(bytes(mutated[: data.draw(st.integers(0, len(mutated)))]))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(st.binary(max_size=200))
def test_random_bytes_give_a_header_or_one_of_our_errors(noise: bytes) -> None:
    for prefix in (b"", *(sample[:12] for sample in SAMPLES)):
        assert_header_or_our_error(prefix + noise)


def assert_header_or_our_error(data: bytes) -> None:
    message = ""
    try:
        header = read_image_header(data)
    except TandemError as error:
        message = error.message
    else:
        assert header.width >= 1
        assert header.height >= 1
    assert not FOREIGN_TEXT.search(message)
