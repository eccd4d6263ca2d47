"""One function turns bytes into RGB, and means by each mode what transformers 5.24 means (16-bit greys apart)."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from common.errors import MediaTooLarge, TandemError, UnsupportedMedia
from common.image_header import IMAGE_FORMATS, read_image_header
from encoder_svc.image_decode import load_rgb
from tests.media_samples import encoded, gif_file, picture, png
from tests.paths import SHARED, needs_shared

NOISE = picture(16, 12)
ALPHA = picture(16, 12, seed=1)[:, :, 0]


def reference(data: bytes) -> np.ndarray:
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    return convert_to_rgb(upright, return_numpy=True)


def modes() -> dict[str, bytes]:
    rgb, alpha = Image.fromarray(NOISE), Image.fromarray(ALPHA)
    rgba, grey = rgb.copy(), rgb.convert("L")
    rgba.putalpha(alpha)
    la = grey.copy()
    la.putalpha(alpha)
    palette = rgb.quantize(16)
    return {
        "RGB": encoded(rgb),
        "RGBA": encoded(rgba),
        "RGBA webp": encoded(rgba, "WEBP", lossless=True),
        "RGBA tiff": encoded(rgba, "TIFF"),
        "LA": encoded(la),
        "L": encoded(grey),
        "1": encoded(rgb.convert("1")),
        "P": encoded(palette),
        "P with one transparent index": encoded(palette, transparency=3),
        "P with an alpha table": encoded(palette, transparency=bytes(range(0, 160, 10))),
        "P gif with transparency": encoded(palette, "GIF", transparency=3),
        "RGB with a transparent colour": encoded(rgb, transparency=tuple(int(v) for v in NOISE[3, 4])),
        "L with a transparent grey": encoded(grey, transparency=grey.getpixel((4, 3))),
        "CMYK jpeg": encoded(rgb.convert("CMYK"), "JPEG", quality=95),
        "CMYK tiff": encoded(rgb.convert("CMYK"), "TIFF"),
        "YCbCr jpeg": encoded(rgb, "JPEG"),
        "L jpeg": encoded(grey, "JPEG"),
        "LAB tiff": encoded(rgb.convert("LAB"), "TIFF"),
        "bmp": encoded(rgb, "BMP"),
    }


@pytest.mark.parametrize("name", modes())
def test_a_mode_is_the_reference_to_the_bit(name: str) -> None:
    data = modes()[name]
    np.testing.assert_array_equal(load_rgb(data), reference(data))


@pytest.mark.parametrize("format", [f for f in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF") if f in IMAGE_FORMATS])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_made_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(NOISE), format, exif=exif)
    np.testing.assert_array_equal(load_rgb(data), reference(data))
    assert load_rgb(data).shape[:2] == read_image_header(data)[1::-1]


def test_sixteen_bit_greys_are_scaled_rather_than_clipped() -> None:
    values = np.array([[0, 128, 129, 257, 30_000, 65_535]], np.uint16)
    expected = np.array([0, 0, 1, 1, 117, 255])
    for format in ("PNG", "TIFF"):
        rgb = load_rgb(encoded(Image.fromarray(values), format))
        np.testing.assert_array_equal(rgb, np.repeat(expected[None, :, None], 3, axis=2))


def test_32_bit_integers_count_as_16_bit_greys() -> None:
    values = np.array([[-5, 0, 30_000, 70_000]], np.int32)
    assert load_rgb(encoded(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 0, 117, 255]


def test_a_transparent_sixteen_bit_grey_becomes_white() -> None:
    data = encoded(Image.fromarray(np.array([[1_000, 30_000]], np.uint16)), transparency=1_000)
    assert load_rgb(data)[0, :, 0].tolist() == [255, 117]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 100.4, 300.0], [0, 100, 255]), ([-3.0, float("nan"), 7.0], [0, 0, 7])],
)
def test_float_greys_span_the_unit_or_the_byte_range(values: list[float], expected: list[int]) -> None:
    data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert load_rgb(data)[0, :, 1].tolist() == expected


def test_the_first_frame_stands_for_an_animation() -> None:
    frames = [np.full((8, 8, 3), level, np.uint8) for level in (10, 200)]
    for data in (
        gif_file(frames),
        encoded(Image.fromarray(frames[0]), "PNG", save_all=True, append_images=[Image.fromarray(frames[1])]),
        encoded(
            Image.fromarray(frames[0]), "WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(frames[1])]
        ),
    ):
        assert load_rgb(data).tolist() == frames[0].tolist()


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_half_a_file_is_refused(format: str) -> None:
    data = encoded(Image.fromarray(picture(200, 150)), format)
    with pytest.raises(UnsupportedMedia, match=f"{format} is damaged or cut short"):
        load_rgb(data[: len(data) // 2])


def test_the_canvas_limit_holds() -> None:
    with pytest.raises(MediaTooLarge, match="16 x 12"):
        load_rgb(png(16, 12), max_canvas_pixels=191)


def case_bytes(path: str) -> bytes:
    return (SHARED / "cases" / path).read_bytes()


@needs_shared
@pytest.mark.parametrize(
    ("path", "twin"),
    [
        ("IMG-01/exif6.jpg", "IMG-01/upright.png"),
        ("IMG-03/in.bin", "IMG-03/twin.png"),
        ("IMG-05/in.bin", "IMG-05/twin.png"),
        ("IMG-07/cmyk.jpg", "IMG-07/twin.png"),
        ("IMG-09/anim.gif", "IMG-09/twin.png"),
    ],
)
def test_an_image_of_the_cases_equals_its_twin(path: str, twin: str) -> None:
    np.testing.assert_array_equal(load_rgb(case_bytes(path)), load_rgb(case_bytes(twin)))


@needs_shared
@pytest.mark.parametrize("path", ["IMG-11/half.jpg", "IMG-20/bad.bin", "IMG-21/bad.bin"])
def test_a_broken_file_of_the_cases_is_refused(path: str) -> None:
    with pytest.raises(UnsupportedMedia):
        load_rgb(case_bytes(path))


SAMPLES = [encoded(Image.fromarray(NOISE), format) for format in IMAGE_FORMATS]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(deadline=None)
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_mutated_file_gives_pixels_of_its_header_or_one_of_our_errors(sample: bytes, data: Any) -> None:
    mutated = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 6))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    limit = 1_000_000
    try:
        rgb = load_rgb(bytes(mutated), max_canvas_pixels=limit)
    except TandemError:
        return
    assert rgb.shape[:2] == read_image_header(bytes(mutated), max_canvas_pixels=limit)[1::-1]
