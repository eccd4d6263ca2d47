"""The compute thread with a tiny real tower: each item's bytes are its own, whatever it was batched with."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from common.embedding import check_payload
from common.errors import ModelFailure
from common.messages import Grid
from common.tensors import DTYPES, tensor_of
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.model.vision import VisionTower
from encoder_svc.runner import TowerItem, TowerRunner
from tests.encoder_svc.embeddings import FINGERPRINT, key
from tests.encoder_svc.towers import tiny_tower
from tests.media_samples import DEMO_PROCESSOR

GRIDS: list[Grid] = [(1, 4, 4), (1, 6, 4), (2, 2, 8)]


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return tiny_tower()


@pytest.fixture
async def runner(tower: VisionTower) -> AsyncIterator[TowerRunner]:
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32")
    yield runner
    runner.close()


def item(tower: VisionTower, number: int, grid: Grid) -> TowerItem:
    values = np.random.default_rng(number).standard_normal((grid[0] * grid[1] * grid[2], tower.patch_width))
    return TowerItem(key(number), grid, values.astype(np.float32))


def tensor(held: HeldEmbedding) -> torch.Tensor:
    check_payload(held.header, held.payload)
    return tensor_of(held.header, bytearray(held.payload))


async def test_each_item_gets_what_the_tower_gives_it_alone(tower: VisionTower, runner: TowerRunner) -> None:
    items = [item(tower, number, grid) for number, grid in enumerate(GRIDS)]
    together = await runner.run(items)
    for one, got in zip(items, together, strict=True):
        with torch.inference_mode():
            expected = tower(torch.from_numpy(one.pixel_values), [one.grid])
        torch.testing.assert_close(tensor(got), expected, rtol=1e-4, atol=1e-4)
        assert (got.header.key, got.header.grid, got.header.levels) == (one.key, one.grid, 3)
        assert (got.header.rows, got.header.width) == tuple(expected.shape)
        assert got.header.fingerprint == FINGERPRINT
        assert got.payload.readonly
        alone = (await runner.run([one]))[0]
        torch.testing.assert_close(tensor(alone), expected, rtol=0, atol=0)


async def test_items_of_a_batch_share_no_memory(tower: VisionTower, runner: TowerRunner) -> None:
    first, second, _ = await runner.run([item(tower, number, grid) for number, grid in enumerate(GRIDS)])
    starts = [np.frombuffer(held.payload, np.uint8).__array_interface__["data"][0] for held in (first, second)]
    assert abs(starts[0] - starts[1]) >= first.header.num_bytes
    for held in (first, second):
        base: Any = held.payload.obj
        assert np.asarray(base).nbytes == held.header.num_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_the_wire_dtype_is_the_payload_s(tower: VisionTower, dtype: Any) -> None:
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype=dtype)
    one = item(tower, 1, (1, 4, 4))
    (got,) = await runner.run([one])
    with torch.inference_mode():
        expected = tower(torch.from_numpy(one.pixel_values), [one.grid]).to(DTYPES[dtype])
    assert got.header.dtype == dtype
    assert torch.equal(tensor(got), expected)
    runner.close()


async def test_int8_rows_are_near_the_tower_s_and_the_same_in_any_batch(tower: VisionTower) -> None:
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="int8")
    items = [item(tower, number, grid) for number, grid in enumerate(GRIDS)]
    for one, got in zip(items, await runner.run(items), strict=True):
        with torch.inference_mode():
            expected = tower(torch.from_numpy(one.pixel_values), [one.grid])
        assert (got.header.dtype, got.header.rows, got.header.width) == ("int8", *expected.shape)
        assert len(got.payload) == expected.shape[0] * (expected.shape[1] + 4 * 4)
        parts = expected.view(len(expected), 4, -1)
        error = (tensor(got).view_as(parts) - parts).abs()
        assert (error <= parts.abs().amax(dim=2, keepdim=True) / 253).all()  # half a step, and rounding of the tower
    bad = item(tower, 1, (1, 4, 4))
    bad.pixel_values[3, 3] = np.nan
    with pytest.raises(ModelFailure, match="not finite"):
        await runner.run([bad])
    runner.close()


async def test_values_that_are_not_finite_are_a_failure_and_the_next_item_runs(
    tower: VisionTower, runner: TowerRunner
) -> None:
    bad = item(tower, 1, (1, 4, 4))
    bad.pixel_values[3, 3] = np.nan
    with pytest.raises(ModelFailure, match=r"\(1, 4, 4\) grid holds values that are not finite"):
        await runner.run([bad])
    await runner.run([item(tower, 2, (1, 4, 4))])
    assert runner.patches_per_s > 0


async def test_bytes_of_stills_and_videos_run_in_one_batch(tower: VisionTower, runner: TowerRunner) -> None:
    tower.patch_embed.fold(DEMO_PROCESSOR)
    rng = np.random.default_rng(7)
    items = [
        TowerItem(key(number), grid, rng.integers(0, 256, (grid[0] * grid[1] * grid[2], columns), np.uint8))
        for number, (grid, columns) in enumerate([((1, 4, 4), 768), ((2, 2, 8), 1536), ((1, 6, 4), 768)])
    ]
    for one, got in zip(items, await runner.run([*items, item(tower, 9, (1, 4, 4))]), strict=False):
        (alone,) = await runner.run([one])
        torch.testing.assert_close(tensor(got), tensor(alone), rtol=1e-4, atol=1e-4)


def test_a_metric_names_the_attention_kernel(tower: VisionTower, runner: TowerRunner) -> None:
    assert REGISTRY.get_sample_value("tandem_encoder_attention", {"backend": tower.attention.name}) == 1
