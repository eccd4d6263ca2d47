"""The vision tower against transformers on tiny random weights, part by part and whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, InvalidRequest
from encoder_svc.model.vision import VisionTower
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.preprocess import normalised, pack_frames, read_image
from tests.media_samples import DEMO_PROCESSOR, picture, png
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

TOLERANCE = 2e-5
# Images of different aspect, videos of two and three frame groups, one size twice and not side by side.
GRIDS = [(1, 4, 6), (2, 2, 4), (1, 4, 6), (3, 8, 2), (1, 2, 2), (1, 10, 8)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def pixels(grids: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))


def inputs_of(modules: Any, run: Any) -> list[torch.Tensor]:
    """The first argument of each module while `run` runs, copied."""
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach().clone())) for m in modules]
    run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def reference(request: pytest.FixtureRequest) -> Any:
    return tiny_model(tiny_config(is_moe=request.param))


@pytest.fixture(scope="module")
def tower(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    directory = save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    return load_vision_tower(directory, dtype=torch.float32, device="cpu")


def test_each_block_gets_the_same_hidden_states(reference: Any, tower: VisionTower) -> None:
    values, grids = pixels(GRIDS), torch.tensor(GRIDS)
    expected = inputs_of(reference.model.visual.blocks, lambda: reference.model.visual(values, grid_thw=grids))
    got = inputs_of(tower.blocks, lambda: tower(values, GRIDS))
    assert len(got) == len(expected) == len(tower.blocks)
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs)


def test_main_merger_and_each_deepstack_level_equal_the_reference(reference: Any, tower: VisionTower) -> None:
    expected = reference.model.visual(pixels(GRIDS), grid_thw=torch.tensor(GRIDS))
    payload = tower(pixels(GRIDS), GRIDS)
    parts = payload.split(tower.config.out_hidden_size, dim=1)
    assert len(parts) == 1 + tower.num_levels == 4
    for part, theirs in zip(parts, [expected.pooler_output, *expected.deepstack_features], strict=True):
        assert_close(part, theirs)
    assert_close(payload, torch.cat([expected.pooler_output, *expected.deepstack_features], dim=1))
    assert payload.shape == (sum(t * h * w for t, h, w in GRIDS) // 4, tower.out_width)


def test_deepstack_levels_of_an_unsorted_list_come_in_the_reference_order(tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(vision={"deepstack_visual_indexes": [3, 1]}))
    tower = load_vision_tower(save_checkpoint(reference, tmp_path), dtype=torch.float32, device="cpu")
    expected = reference.model.visual(pixels(GRIDS), grid_thw=torch.tensor(GRIDS))
    assert_close(tower(pixels(GRIDS), GRIDS), torch.cat([expected.pooler_output, *expected.deepstack_features], dim=1))


def of_all_forms(seed: int = 0) -> list[torch.Tensor]:
    """Patches of each of GRIDS: bytes of stills and videos, and normalised floats among them."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number, (t, h, w) in enumerate(GRIDS):
        columns = 768 if t == 1 else 1536
        values = torch.randint(0, 256, (t * h * w, columns), generator=generator, dtype=torch.uint8)
        parts.append(values if number != 2 else torch.randn(t * h * w, 1536, generator=generator))
    return parts


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_packed_items_in_any_order_equal_each_item_alone(
    reference: Any, tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    directory = save_checkpoint(reference, tmp_path)
    tower = load_vision_tower(directory, dtype=dtype, device="cpu", processor=DEMO_PROCESSOR)
    parts = of_all_forms()
    alone = [tower([part], [grid]).float() for part, grid in zip(parts, GRIDS, strict=True)]
    scale = torch.cat(alone).abs().max()
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 4, 1, 5, 2]):
        grids = [GRIDS[idx] for idx in order]
        together = tower([parts[idx] for idx in order], grids).float().split([t * h * w // 4 for t, h, w in grids])
        for idx, got in zip(order, together, strict=True):
            assert (got - alone[idx]).abs().max() <= tolerance * scale


def test_bytes_give_what_normalised_patches_give(reference: Any, tmp_path: Path) -> None:
    tower = load_vision_tower(
        save_checkpoint(reference, tmp_path), dtype=torch.float32, device="cpu", processor=DEMO_PROCESSOR
    )
    prepared = [
        read_image(png(150, 90), DEMO_PROCESSOR),
        pack_frames([picture(64, 32, seed) for seed in range(5)], (3, 2, 4), DEMO_PROCESSOR.video),
    ]
    grids = [item.grid_thw for item in prepared]
    floats = [normalised(item, DEMO_PROCESSOR.image).pixel_values for item in prepared]
    expected = reference.model.visual(torch.cat([torch.from_numpy(f) for f in floats]), grid_thw=torch.tensor(grids))
    got = tower([torch.from_numpy(item.pixel_values) for item in prepared], grids)
    assert_close(got, torch.cat([expected.pooler_output, *expected.deepstack_features], dim=1))


def test_rows_beyond_one_tile_equal_the_reference(reference: Any, tower: VisionTower) -> None:
    grids = [(1, 40, 26), (2, 6, 4)]
    expected = reference.model.visual(pixels(grids), grid_thw=torch.tensor(grids))
    assert_close(tower(pixels(grids), grids), torch.cat([expected.pooler_output, *expected.deepstack_features], dim=1))


def test_bfloat16_tower_stays_near_the_float32_one(reference: Any, tower: VisionTower, tmp_path: Path) -> None:
    directory = save_checkpoint(reference, tmp_path)
    half = load_vision_tower(directory, dtype=torch.bfloat16, device="cpu")
    payload = half(pixels(GRIDS), GRIDS)
    expected = tower(pixels(GRIDS), GRIDS)
    assert payload.dtype == half.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(payload.float(), expected).min() > 0.99


@pytest.mark.parametrize(
    ("shape", "grids", "words"),
    [
        ((4, 3, 512), [(1, 2, 2)], "shape"),
        ((4, 1535), [(1, 2, 2)], "1536"),
        ((5, 1536), [(1, 2, 2)], r"\[5\] rows.*\[4\]"),
        ((6, 1536), [(1, 2, 3)], "1x2x3"),
        ((4, 1536), [], "grid_thw"),
        ((4, 1536), [(1, 4)], "grid_thw"),
        ((4, 1536), [(0, 2, 2), (1, 2, 2)], "at least 1"),
    ],
)
def test_input_that_does_not_belong_together_is_refused(
    tower: VisionTower, shape: tuple[int, ...], grids: list[Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tower(torch.zeros(shape), grids)


def test_rows_of_one_item_do_not_make_up_for_those_of_another(tower: VisionTower) -> None:
    with pytest.raises(InvalidRequest, match=r"\[8, 4\] rows.*\[4, 8\]"):
        tower([torch.zeros(8, 1536), torch.zeros(4, 1536)], [(1, 2, 2), (2, 2, 2)])


def test_bytes_without_a_processor_s_settings_are_refused(tower: VisionTower) -> None:
    with pytest.raises(InvalidRequest, match=r"uint8.*processor"):
        tower([torch.zeros(4, 768, dtype=torch.uint8)], [(1, 2, 2)])


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"deepstack_visual_indexes": [1, 5]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
        ({"num_position_embeddings": 143}, "143"),
        ({"hidden_act": "mish"}, "mish"),
        ({"patch_size": [16, 16]}, "patch_size"),
    ],
)
def test_configuration_that_cannot_be_computed_is_refused(vision: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        VisionTower(tiny_config(vision=vision).vision_config)
