"""Every golden output of the reference's processors: grids, frames, time stamps, prompts and pixel values."""

import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.vision_grid import (
    group_timestamps,
    image_placeholder_tokens,
    sample_frames,
    video_frame_groups,
    video_grid,
    video_prompt,
)
from encoder_svc.image_decode import resize_bicubic
from encoder_svc.preprocess import PreparedMedia, normalised, pack_frames, preprocess_image
from tests.media_samples import DEMO_PROCESSOR, encoded
from tests.paths import SHARED, needs_shared

pytestmark = needs_shared
GOLDEN = SHARED / "golden"
ROWS: list[dict[str, Any]] = (
    json.loads((GOLDEN / "golden.json").read_text()) if (GOLDEN / "golden.json").is_file() else []
)
TOKENS, VIDEO = DEMO_PROCESSOR.tokens, DEMO_PROCESSOR.video
TEXTS = {
    TOKENS.image_token_id: "<|image_pad|>",
    TOKENS.video_token_id: "<|video_pad|>",
    TOKENS.vision_start_token_id: "<|vision_start|>",
    TOKENS.vision_end_token_id: "<|vision_end|>",
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden.npz") as file:
        return dict(file)


def parametrized_by(key: str) -> Any:
    rows = [row for row in ROWS if row[key]]
    return pytest.mark.parametrize("row", rows, ids=[row["name"] for row in rows])


def prepared_video(row: dict[str, Any], index: int, arrays: dict[str, np.ndarray]) -> PreparedMedia:
    frames = arrays[f"{row['name']}.video{index}"]
    if frames.shape[1] == 3 and frames.shape[-1] != 3:
        frames = frames.transpose(0, 2, 3, 1)
    indices = sample_frames(len(frames), row["fps"][index], VIDEO)
    grid = video_grid(len(indices), frames.shape[2], frames.shape[1], VIDEO)
    size = grid[1] * VIDEO.patch_size, grid[2] * VIDEO.patch_size
    resized = (resize_bicubic(Image.fromarray(frames[i]), *size) for i in indices)
    return normalised(pack_frames(resized, grid, VIDEO), VIDEO)


@parametrized_by("image_grid_thw")
def test_images_equal_the_golden_patches(row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    images = [arrays[f"{row['name']}.image{i}"] for i in range(len(row["image_grid_thw"]))]
    prepared = [preprocess_image(encoded(Image.fromarray(image)), DEMO_PROCESSOR) for image in images]
    assert [list(item.grid_thw) for item in prepared] == row["image_grid_thw"]
    patches = np.concatenate([item.pixel_values for item in prepared])
    np.testing.assert_array_equal(patches, arrays[f"{row['name']}.pixel_values"])


@parametrized_by("video_grid_thw")
def test_videos_equal_the_golden_patches_within_a_grey_level(
    row: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    prepared = [prepared_video(row, index, arrays) for index in range(len(row["video_grid_thw"]))]
    assert [list(item.grid_thw) for item in prepared] == row["video_grid_thw"]
    patches = np.concatenate([item.pixel_values for item in prepared])
    difference = np.abs(patches - arrays[f"{row['name']}.pixel_values_videos"].astype(np.float32))
    assert difference.max() <= 0.03
    assert difference.mean() <= 0.003


@parametrized_by("video_grid_thw")
def test_the_golden_frames_are_sampled(row: dict[str, Any]) -> None:
    sampled = [sample_frames(n, fps, VIDEO) for n, fps in zip(row["num_frames"], row["fps"], strict=True)]
    assert sampled == row["sampled_frames"]


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_the_golden_prompts_are_expanded(row: dict[str, Any]) -> None:
    images, videos = iter(row["image_grid_thw"]), iter(range(len(row["video_grid_thw"])))

    def expand(match: re.Match[str]) -> str:
        if "image" in match[0]:
            ids = image_placeholder_tokens(tuple(next(images)), 2, TOKENS)
            return "<|vision_start|>" + "".join(TEXTS[token] for token in ids) + "<|vision_end|>"
        index = next(videos)
        times = group_timestamps(row["sampled_frames"][index], row["fps"][index], 2)
        groups = video_frame_groups(times, tuple(row["video_grid_thw"][index]), 2)
        return "".join(piece if isinstance(piece, str) else TEXTS[piece] for piece in video_prompt(groups, TOKENS))

    placeholder = r"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>"
    assert re.sub(placeholder, expand, row["prompt"]) == row["expanded"]
