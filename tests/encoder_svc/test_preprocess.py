"""Patches equal transformers 5.24's PIL image processor to the bit."""

import base64
import json
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prometheus_client import REGISTRY
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.errors import InvalidRequest, UnsupportedMedia
from common.image_header import read_image_header
from common.processor_config import ImageSettings, ProcessorConfig
from common.vision_grid import image_grid, num_vision_tokens
from encoder_svc.preprocess import pack_frames, preprocess_image, read_image, read_video
from tests.media_samples import DEMO_PROCESSOR, encoded, flat_frames, picture, png, video_file
from tests.paths import SHARED, needs_shared

SIZES = [
    (1, 1), (3, 5), (31, 33), (32, 32), (200, 1), (1, 200), (224, 224), (272, 272), (304, 304), (336, 336), (27, 257),
    (640, 480), (480, 640), (1000, 7), (1280, 720), (1920, 1080), (8192, 64), (64, 8192),
]  # fmt: skip
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def reference(settings: ImageSettings) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        temporal_patch_size=settings.temporal_patch_size,
        merge_size=settings.merge_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.image_mean),
        image_std=list(settings.image_std),
        rescale_factor=settings.rescale_factor,
    )


def with_image(**changes: Any) -> ProcessorConfig:
    return msgspec.structs.replace(DEMO_PROCESSOR, image=msgspec.structs.replace(DEMO_PROCESSOR.image, **changes))


PROCESSORS = {
    "demo": DEMO_PROCESSOR,
    "published": with_image(min_pixels=65_536, max_pixels=1_048_576),
    "clip statistics": with_image(image_mean=CLIP[0], image_std=CLIP[1]),
    "patch 14": with_image(patch_size=14),
    "three frames and a merge of three": with_image(temporal_patch_size=3, merge_size=3),
}


def assert_equals_reference(data: bytes, processor: ProcessorConfig) -> None:
    prepared = preprocess_image(data, processor)
    expected = reference(processor.image)(images=[Image.open(BytesIO(data))], return_tensors="np")
    assert prepared.pixel_values.dtype == np.float32
    assert prepared.grid_thw == tuple(expected["image_grid_thw"][0])
    np.testing.assert_array_equal(prepared.pixel_values, expected["pixel_values"])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_equal_the_reference_at_every_size(size: tuple[int, int]) -> None:
    assert_equals_reference(png(*size), DEMO_PROCESSOR)


@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_equal_the_reference_with_other_settings(name: str) -> None:
    assert_equals_reference(png(150, 90), PROCESSORS[name])


def test_all_256_values_are_normalised_like_the_reference() -> None:
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    whole = np.kron(ramp, np.ones((16, 16, 1), np.uint8))
    for processor in PROCESSORS.values():
        assert_equals_reference(encoded(Image.fromarray(whole)), processor)


@settings(deadline=None, max_examples=40)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 9))
def test_random_sizes_equal_the_reference_and_their_header(width: int, height: int, seed: int) -> None:
    data = png(width, height, seed)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequest, match="aspect ratio"):
            preprocess_image(data, DEMO_PROCESSOR)
        return
    header = read_image_header(data)
    assert preprocess_image(data, DEMO_PROCESSOR).grid_thw == image_grid(
        header.width, header.height, DEMO_PROCESSOR.image
    )
    assert_equals_reference(data, DEMO_PROCESSOR)


def test_a_rotated_jpeg_has_the_grid_of_its_header() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    data = encoded(Image.fromarray(picture(300, 100)), "JPEG", exif=exif)
    header = read_image_header(data)
    assert preprocess_image(data, DEMO_PROCESSOR).grid_thw == image_grid(
        header.width, header.height, DEMO_PROCESSOR.image
    )


def test_the_last_frame_fills_its_temporal_patch() -> None:
    first, second, third = (picture(32, 32, seed) for seed in range(3))
    packed = pack_frames([first, second, third], (2, 2, 2), DEMO_PROCESSOR.video).pixel_values.reshape(2, 4, 2, 768)
    doubled = pack_frames([third], (1, 2, 2), DEMO_PROCESSOR.video).pixel_values.reshape(4, 2, 768)
    np.testing.assert_array_equal(packed[1], doubled)
    np.testing.assert_array_equal(doubled[:, 0], doubled[:, 1])
    assert (packed[0][:, 0] != packed[0][:, 1]).any()


def test_the_time_that_decoding_takes_is_counted() -> None:
    def count(modality: str, what: str = "count") -> float:
        return REGISTRY.get_sample_value(f"tandem_encoder_decode_seconds_{what}", {"modality": modality}) or 0.0

    before = count("image"), count("video"), count("video", "sum")
    read_image(png(64, 64), DEMO_PROCESSOR)
    read_video(video_file(flat_frames(12), 6), DEMO_PROCESSOR)
    assert (count("image"), count("video")) == (before[0] + 1, before[1] + 1)
    assert count("video", "sum") > before[2]


def test_the_tower_gets_bytes_and_one_frame_of_a_still_image() -> None:
    frame = picture(64, 32)
    prepared = read_image(encoded(Image.fromarray(frame)), with_image(min_pixels=1024))
    assert prepared.grid_thw == (1, 2, 4)
    assert (prepared.pixel_values.dtype, prepared.pixel_values.shape) == (np.uint8, (8, 768))
    # The second token's first patch lies right of the first token's two columns of patches.
    np.testing.assert_array_equal(prepared.pixel_values[4].reshape(16, 16, 3), frame[:16, 32:48])
    np.testing.assert_array_equal(prepared.pixel_values[2].reshape(16, 16, 3), frame[16:, :16])


@pytest.mark.parametrize("num_frames", [0, 2, 5])
def test_a_wrong_number_of_frames_is_refused(num_frames: int) -> None:
    frames = [picture(32, 32, seed) for seed in range(num_frames)]
    with pytest.raises(UnsupportedMedia, match=f"{-(-num_frames // 2)} of 2 temporal patches"):
        pack_frames(frames, (2, 2, 2), DEMO_PROCESSOR.video)


def request_images(path: str) -> list[bytes]:
    body = json.loads((SHARED / "cases" / path).read_text())
    parts = [part for message in body["messages"] for part in message["content"] if part["type"] == "image_url"]
    return [base64.b64decode(part["image_url"]["url"].split(",", 1)[1]) for part in parts]


@needs_shared
@pytest.mark.parametrize(("case", "tokens"), [("IMG-01", 20), ("IMG-14", 16), ("IMG-15", 57)])
def test_the_cases_have_their_token_counts(case: str, tokens: int) -> None:
    (data,) = request_images(f"{case}/request.json")
    assert num_vision_tokens(preprocess_image(data, DEMO_PROCESSOR).grid_thw, 2) == tokens


@needs_shared
def test_case_img_16_is_refused_for_its_aspect_ratio() -> None:
    (data,) = request_images("IMG-16/request.json")
    with pytest.raises(InvalidRequest, match="aspect ratio"):
        preprocess_image(data, DEMO_PROCESSOR)


@needs_shared
def test_case_img_22_is_refused_as_empty() -> None:
    with pytest.raises(UnsupportedMedia, match="empty"):
        preprocess_image(request_images("IMG-22/request.json")[0], DEMO_PROCESSOR)


@needs_shared
def test_grey_and_colour_jpegs_of_case_img_08_have_the_same_width() -> None:
    grey, colour = (preprocess_image(data, DEMO_PROCESSOR) for data in request_images("IMG-08/request.json"))
    assert grey.pixel_values.shape[1] == colour.pixel_values.shape[1] == 1536
    channels = grey.pixel_values.reshape(len(grey.pixel_values), 3, -1)
    np.testing.assert_array_equal(channels[:, 0], channels[:, 1])


@needs_shared
def test_the_declared_type_does_not_matter_as_in_case_img_29() -> None:
    (wrong,), (right,) = request_images("IMG-29/request.json"), request_images("IMG-29/same_0.json")
    np.testing.assert_array_equal(
        preprocess_image(wrong, DEMO_PROCESSOR).pixel_values, preprocess_image(right, DEMO_PROCESSOR).pixel_values
    )
