"""A checkpoint's media settings are read like transformers reads them, or the start stops with a reason."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from common.errors import ConfigError, InvalidRequest
from common.messages import MediaOptions
from common.processor_config import ProcessorConfig
from tests.media_samples import DEMO_PROCESSOR, write_checkpoint

HALF = [0.5, 0.5, 0.5]
VISION = {"vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}}
DEMO_IMAGE: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"shortest_edge": 16_384, "longest_edge": 262_144},
}
DEMO_VIDEO = {**DEMO_IMAGE, "size": {"shortest_edge": 4_096, "longest_edge": 1_572_864}, "fps": 2}


def load(folder: Path, *, config: Any = VISION, image: Any = DEMO_IMAGE, video: Any = DEMO_VIDEO) -> ProcessorConfig:
    return ProcessorConfig.load(write_checkpoint(folder, config=config, image=image, video=video))


def test_a_published_layout_is_read(tmp_path: Path) -> None:
    assert load(tmp_path) == DEMO_PROCESSOR


def test_min_and_max_pixels_are_the_other_spelling_of_size(tmp_path: Path) -> None:
    def respelled(section: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in section.items() if key != "size"}
        return rest | {"min_pixels": section["size"]["shortest_edge"], "max_pixels": section["size"]["longest_edge"]}

    assert load(tmp_path, image=respelled(DEMO_IMAGE), video=respelled(DEMO_VIDEO)) == DEMO_PROCESSOR


def test_min_pixels_overrides_size_for_images_as_in_the_reference(tmp_path: Path) -> None:
    both = DEMO_IMAGE | {"min_pixels": 30_000}
    assert load(tmp_path, image=both).image.min_pixels == 30_000
    # A copy, because the reference writes into the `size` that it is given.
    assert Qwen2VLImageProcessorPil(**copy.deepcopy(both)).size["shortest_edge"] == 30_000


def test_absent_keys_have_the_defaults_of_the_reference(tmp_path: Path) -> None:
    loaded = load(tmp_path, config={}, image={}, video={})
    image, video = Qwen2VLImageProcessorPil, Qwen3VLVideoProcessor
    assert (loaded.image.min_pixels, loaded.image.max_pixels) == tuple(image.size.values())
    assert loaded.image.image_mean == tuple(image.image_mean)
    assert loaded.image.image_std == tuple(image.image_std)
    assert (loaded.video.min_pixels, loaded.video.max_pixels) == tuple(video.size.values())
    assert loaded.video.image_mean == tuple(video.image_mean)
    assert loaded.video.image_std == tuple(video.image_std)
    facts = ("patch_size", "temporal_patch_size", "merge_size", "fps", "min_frames", "max_frames", "max_video_tokens")
    assert {name: getattr(loaded.video, name) for name in facts} == {name: getattr(video, name) for name in facts}
    assert loaded.video.cap_pixels_per_frame is bool(video.cap_pixels_per_frame)
    assert loaded.tokens == DEMO_PROCESSOR.tokens


def test_a_nested_processor_config_comes_first(tmp_path: Path) -> None:
    nested = {"image_processor": DEMO_IMAGE, "video_processor": DEMO_VIDEO}
    write_checkpoint(tmp_path, config=VISION, image={"min_pixels": 5_000}, nested=nested)
    assert ProcessorConfig.load(tmp_path) == DEMO_PROCESSOR


def test_a_missing_video_file_falls_back_to_the_image_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, video=None)
    assert (loaded.video.min_pixels, loaded.video.max_pixels) == (16_384, 262_144)


def test_token_ids_come_from_the_model_config(tmp_path: Path) -> None:
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    assert msgspec.to_builtins(load(tmp_path, config=VISION | ids).tokens) == ids


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("image", {"patch_size": 14}, "patch_size"),
        ("image", {"size": {"shortest_edge": 5_000_000, "longest_edge": 262_144}}, "5000000"),
        ("image", {"size": {"shortest_edge": 1, "longest_edge": 100}}, "100"),
        ("image", {"size": {"height": 224, "width": 224}}, "shortest_edge"),
        ("image", {"size": 224}, "size"),
        ("image", {"min_pixels": 0}, "min_pixels"),
        ("image", {"max_pixels": True}, "max_pixels"),
        ("image", {"image_mean": [0.5, 0.5]}, "image_mean"),
        ("image", {"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ("image", {"do_normalize": False}, "do_normalize"),
        ("image", {"resample": 2}, "resample"),
        ("image", {"rescale_factor": "1/255"}, "rescale_factor"),
        ("video", {"fps": 0}, "fps"),
        ("video", {"min_frames": 10, "max_frames": 9}, "min_frames"),
        ("video", {"do_sample_frames": False}, "do_sample_frames"),
        ("video", {"cap_pixels_per_frame": 1}, "cap_pixels_per_frame"),
    ],
)
def test_an_absurd_or_unsupported_setting_is_named(
    tmp_path: Path, section: str, change: dict[str, Any], named: str
) -> None:
    sections = {"image": DEMO_IMAGE, "video": DEMO_VIDEO}
    sections[section] = sections[section] | change
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, **sections)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, config=VISION, image=DEMO_IMAGE)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=name):
        ProcessorConfig.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"vision_config": 3}'])
def test_a_broken_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path, config=text)


def test_equal_token_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different"):
        load(tmp_path, config=VISION | {"image_token_id": 7, "video_token_id": 7})


def test_canonical_bytes_change_with_every_setting_that_changes_pixels() -> None:
    seen = {DEMO_PROCESSOR.canonical_bytes()}
    for name, value in (("min_pixels", 4_097), ("fps", 3.0), ("image_mean", (0.4, 0.5, 0.5)), ("max_frames", 8)):
        video = msgspec.structs.replace(DEMO_PROCESSOR.video, **{name: value})
        seen.add(msgspec.structs.replace(DEMO_PROCESSOR, video=video).canonical_bytes())
    image = msgspec.structs.replace(DEMO_PROCESSOR.image, max_pixels=262_143)
    seen.add(msgspec.structs.replace(DEMO_PROCESSOR, image=image).canonical_bytes())
    assert len(seen) == 6


def test_canonical_bytes_are_the_same_for_both_spellings(tmp_path: Path) -> None:
    assert load(tmp_path).canonical_bytes() == DEMO_PROCESSOR.canonical_bytes()
    assert json.loads(DEMO_PROCESSOR.canonical_bytes())[0] == "tandem-processor-1"


def test_no_options_change_nothing() -> None:
    assert DEMO_PROCESSOR.with_options(MediaOptions()) == DEMO_PROCESSOR


def test_options_narrow_the_limits_and_never_widen_them() -> None:
    narrowed = DEMO_PROCESSOR.with_options(MediaOptions(min_pixels=20_000, max_pixels=50_000, max_frames=3, fps=1.0))
    assert (narrowed.image.min_pixels, narrowed.image.max_pixels) == (20_000, 50_000)
    assert (narrowed.video.min_frames, narrowed.video.max_frames, narrowed.video.fps) == (3, 3, 1.0)
    widened = DEMO_PROCESSOR.with_options(MediaOptions(min_pixels=1, max_pixels=1 << 40, max_frames=5_000))
    assert widened == DEMO_PROCESSOR
    assert DEMO_PROCESSOR.with_options(MediaOptions(num_frames=5_000)).video.num_frames == 768


@pytest.mark.parametrize(
    "options", [MediaOptions(fps=1.0, num_frames=4), MediaOptions(min_pixels=50_000, max_pixels=40_000)]
)
def test_options_that_contradict_each_other_are_refused(options: MediaOptions) -> None:
    with pytest.raises(InvalidRequest):
        DEMO_PROCESSOR.with_options(options)
