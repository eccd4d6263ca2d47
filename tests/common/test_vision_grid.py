"""Grids, frames and prompt pieces are those of transformers 5.24."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_image_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as reference_video_resize

from common.errors import InvalidRequest, UnsupportedMedia
from common.vision_grid import (
    FrameGroup,
    group_timestamps,
    image_grid,
    image_placeholder_tokens,
    is_consistent_video,
    num_vision_tokens,
    sample_frames,
    smart_resize_image,
    smart_resize_video,
    video_frame_groups,
    video_grid,
    video_prompt,
)
from tests.media_samples import DEMO_PROCESSOR
from tests.paths import SHARED, needs_shared

IMAGE, VIDEO, TOKENS = DEMO_PROCESSOR.image, DEMO_PROCESSOR.video, DEMO_PROCESSOR.tokens
PUBLISHED = msgspec.structs.replace(IMAGE, min_pixels=65_536, max_pixels=16_777_216)
SIDES = st.integers(1, 9_000)


def case(name: str) -> Any:
    return json.loads((SHARED / "cases" / name / "expected.json").read_text())


@needs_shared
def test_token_counts_round_half_to_even_as_in_case_mth_01() -> None:
    expected = case("MTH-01")
    for size, row in expected["demo_config"].items():
        width, height = map(int, size.split("x"))
        assert list(smart_resize_image(height, width, IMAGE)) == row["resized_hw"], size
        assert num_vision_tokens(image_grid(width, height, IMAGE), 2) == row["tokens"], size
    for size, tokens in expected["published_config_tokens"].items():
        width, height = map(int, size.split("x"))
        assert num_vision_tokens(image_grid(width, height, PUBLISHED), 2) == tokens, size


@given(width=SIDES, height=SIDES)
def test_image_targets_equal_the_reference(width: int, height: int) -> None:
    try:
        expected = reference_image_resize(height, width, 32, IMAGE.min_pixels, IMAGE.max_pixels)
    except ValueError:
        with pytest.raises(InvalidRequest, match="aspect ratio"):
            smart_resize_image(height, width, IMAGE)
    else:
        assert smart_resize_image(height, width, IMAGE) == expected


@given(num_frames=st.integers(2, 800), width=SIDES, height=SIDES)
def test_video_targets_equal_the_reference(num_frames: int, width: int, height: int) -> None:
    try:
        expected = reference_video_resize(num_frames, height, width, 2, 32, VIDEO.min_pixels, VIDEO.max_pixels)
    except ValueError:
        with pytest.raises(InvalidRequest, match="aspect ratio"):
            smart_resize_video(num_frames, height, width, VIDEO)
    else:
        assert smart_resize_video(num_frames, height, width, VIDEO) == expected
        grid = video_grid(num_frames, width, height, VIDEO)
        assert grid == (-(-num_frames // 2), expected[0] // 16, expected[1] // 16)


@given(num_frames=st.integers(2, 800), width=st.integers(32, 4_000), height=st.integers(32, 4_000))
def test_capped_video_patches_equal_the_reference(num_frames: int, width: int, height: int) -> None:
    capped = msgspec.structs.replace(VIDEO, cap_pixels_per_frame=True)
    settings = SimpleNamespace(
        size={"shortest_edge": VIDEO.min_pixels, "longest_edge": VIDEO.max_pixels},
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        cap_pixels_per_frame=True,
        max_video_tokens=768,
    )
    expected = Qwen3VLVideoProcessor.get_num_of_video_patches(settings, num_frames, height, width)
    assert int(np.prod(video_grid(num_frames, width, height, capped))) == expected


def test_an_odd_frame_count_is_rounded_half_to_even_in_the_area_only() -> None:
    # 5 frames of 576 x 576 exceed the budget, the 4 that they round to do not.
    assert 4 * 576 * 576 <= VIDEO.max_pixels < 5 * 576 * 576
    expected = reference_video_resize(5, 576, 576, 2, 32, VIDEO.min_pixels, VIDEO.max_pixels)
    assert smart_resize_video(5, 576, 576, VIDEO) == expected == (576, 576)


def test_one_frame_makes_one_temporal_patch() -> None:
    assert video_grid(1, 64, 64, VIDEO) == (1, 4, 4)


def test_an_aspect_ratio_of_200_passes_and_more_is_refused_with_value_limit_and_remedy() -> None:
    assert image_grid(200, 1, IMAGE) == (1, 2, 114)
    with pytest.raises(InvalidRequest, match=r"201 x 1 .*201\.0.*200.*crop"):
        image_grid(201, 1, IMAGE)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_empty_picture_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedMedia):
        image_grid(*size, IMAGE)


def reference_sample(total: int, fps: float | None, num_frames: int | None = None) -> list[int]:
    settings = SimpleNamespace(fps=None if num_frames else VIDEO.fps, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    return list(map(int, Qwen3VLVideoProcessor.sample_frames(settings, metadata, num_frames=num_frames)))


@given(total=st.integers(1, 20_000), fps=st.none() | st.floats(0.01, 240))
def test_sampled_frames_equal_the_reference(total: int, fps: float | None) -> None:
    frames = sample_frames(total, fps, VIDEO)
    assert frames == reference_sample(total, fps)
    assert len(frames) <= 768
    assert frames == sorted(set(frames))
    assert frames[0] == 0


@given(total=st.integers(1, 2_000), num_frames=st.integers(1, 768))
def test_a_requested_number_of_frames_equals_the_reference(total: int, num_frames: int) -> None:
    settings = msgspec.structs.replace(VIDEO, num_frames=num_frames)
    assert sample_frames(total, 24.0, settings) == reference_sample(total, 24.0, num_frames)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_an_impossible_rate_counts_as_unknown(fps: float) -> None:
    assert sample_frames(48, fps, VIDEO) == sample_frames(48, None, VIDEO) == [0, 16, 31, 47]


def test_no_frame_is_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="no readable frame"):
        sample_frames(0, 24.0, VIDEO)


@given(indices=st.lists(st.integers(0, 10_000), min_size=1, max_size=50).map(sorted), fps=st.floats(0.5, 120))
def test_timestamps_equal_the_reference(indices: list[int], fps: float) -> None:
    expected = Qwen3VLProcessor._calculate_timestamps(SimpleNamespace(), list(indices), fps, 2)
    assert group_timestamps(indices, fps, 2) == expected


@needs_shared
def test_the_video_prompt_is_that_of_case_mth_06() -> None:
    texts = {
        TOKENS.vision_start_token_id: "<|vision_start|>",
        TOKENS.vision_end_token_id: "<|vision_end|>",
        TOKENS.video_token_id: "<|video_pad|>",
    }
    groups = video_frame_groups(group_timestamps([0, 16, 31, 47], 24.0, 2), (2, 4, 6), 2)
    pieces = video_prompt(groups, TOKENS, keep_outer_pair=False)
    assert "".join(piece if isinstance(piece, str) else texts[piece] for piece in pieces) == case("MTH-06")["prompt"]


def test_the_outer_pair_is_kept_unless_it_is_not_wanted() -> None:
    groups = [FrameGroup("<0.0 seconds>", 1)]
    start, end, pad = TOKENS.vision_start_token_id, TOKENS.vision_end_token_id, TOKENS.video_token_id
    inner = ["<0.0 seconds>", start, pad, end]
    assert video_prompt(groups, TOKENS) == [start, *inner, end]
    assert video_prompt(groups, TOKENS, keep_outer_pair=False) == inner


def test_an_image_placeholder_becomes_one_token_for_each_merge_block() -> None:
    assert image_placeholder_tokens((1, 4, 6), 2, TOKENS) == [TOKENS.image_token_id] * 6


def test_timestamps_of_another_video_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 time stamps for a grid of 2"):
        video_frame_groups([0.0, 1.0, 2.0], (2, 4, 4), 2)


@pytest.mark.parametrize(
    ("grid", "num_frames", "num_timestamps", "is_consistent"),
    [
        ((2, 4, 6), 4, 2, True),
        ((2, 4, 6), 3, 2, True),
        ((2, 4, 6), 4, 3, False),
        ((3, 4, 6), 4, 3, False),
        ((2, 4, 6), 5, 2, False),
        ((2, 5, 6), 4, 2, False),
        ((2, 4, 7), 4, 2, False),
    ],
)
def test_facts_of_a_video_must_fit_each_other(
    grid: tuple[int, int, int], num_frames: int, num_timestamps: int, is_consistent: bool
) -> None:
    frames, timestamps = list(range(num_frames)), [float(i) for i in range(num_timestamps)]
    assert is_consistent_video(grid, frames, timestamps, DEMO_PROCESSOR.video) is is_consistent
