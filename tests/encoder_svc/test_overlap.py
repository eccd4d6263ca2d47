"""A device that runs beside the host: copies come back while it computes the next batch, and errors hit their own.

The real batch loop and runner over a real tower and a fake device, which is as asynchronous as a GPU and takes each
step when the test lets it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from common.errors import EncoderUnavailable, ModelFailure
from common.messages import Grid
from common.tensors import tensor_of
from encoder_svc.batch_loop import BatchLimits, BatchLoop
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.model.vision import VisionTower
from encoder_svc.runner import TowerItem, TowerRunner
from tests.common.sockets import background, eventually
from tests.encoder_svc.embeddings import FINGERPRINT, key
from tests.encoder_svc.fake_device import FakeDevice
from tests.encoder_svc.towers import tiny_tower

GRID: Grid = (1, 4, 4)
PATCHES = 16


@dataclass
class Bench:
    """A batch loop whose batches have at most two pictures."""

    loop: BatchLoop
    runner: TowerRunner
    device: FakeDevice
    tower: VisionTower

    def item(self, number: int, grid: Grid = GRID) -> TowerItem:
        values = np.random.default_rng(number).standard_normal((int(np.prod(grid)), self.tower.patch_width))
        return TowerItem(key(number), grid, values.astype(np.float32))

    def embed(self, *items: TowerItem) -> "list[asyncio.Task[Any]]":
        return [asyncio.create_task(self.loop.embed(item)) for item in items]

    async def launches(self, count: int) -> None:
        await eventually(lambda: len(self.device.launched) == count)

    def check(self, item: TowerItem, embedding: HeldEmbedding) -> None:
        """The embedding is the item's own, whatever has become of the memory that it came through."""
        with torch.inference_mode():
            expected = self.tower(torch.from_numpy(item.pixel_values), [item.grid])
        assert embedding.header.key == item.key
        torch.testing.assert_close(
            tensor_of(embedding.header, bytearray(embedding.payload)), expected, rtol=1e-4, atol=1e-4
        )


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return tiny_tower()


@contextlib.asynccontextmanager
async def running(tower: VisionTower, **device_fields: Any) -> AsyncIterator[Bench]:
    device = FakeDevice(tower, **device_fields)
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32", device=device)
    loop = BatchLoop(runner, BatchLimits(max_patches=2 * PATCHES, max_items=2, max_slice_patches=2 * PATCHES))
    async with background(loop.run()), asyncio.timeout(20):
        yield Bench(loop, runner, device, tower)
        assert device.num_in_flight == 0, "memory that is never given back"
    runner.close()


async def test_the_next_batch_is_launched_before_the_rows_of_the_one_before_are_waited_for(tower: VisionTower) -> None:
    async with running(tower) as bench:
        items = [bench.item(number) for number in range(4)]
        tasks = bench.embed(*items)
        await bench.launches(2)  # two full batches: the second needs not wait for the first to be computed
        assert bench.device.log == ["launched 0", "launched 1"]
        first, second = bench.device.launched
        first.let_go()
        answered = await asyncio.gather(*tasks[:2])
        assert bench.device.log == ["launched 0", "launched 1", "computed 0", "copied 0", "released 0"]
        assert not any(task.done() for task in tasks[2:]), "the first batch is answered while the second computes"
        second.let_go()
        answered += await asyncio.gather(*tasks[2:])
        for item, (embedding, _) in zip(items, answered, strict=True):
            bench.check(item, embedding)


async def test_a_batch_that_is_not_full_is_launched_when_the_device_is_free_and_not_when_rows_have_come(
    tower: VisionTower,
) -> None:
    async with running(tower) as bench:
        tasks = bench.embed(bench.item(1))
        await bench.launches(1)
        tasks += bench.embed(bench.item(2))
        await eventually(lambda: bench.loop.num_waiting == 1)
        await asyncio.sleep(0.02)
        assert len(bench.device.launched) == 1, "it might become larger meanwhile"
        bench.device.launched[0].may_compute.set()
        await bench.launches(2)
        assert bench.device.log == ["launched 0", "computed 0", "launched 1"], "the copy of the first is not over"
        for launched in bench.device.launched:
            launched.let_go()
        await asyncio.gather(*tasks)


async def test_no_more_than_the_device_has_memory_for_is_in_flight(tower: VisionTower) -> None:
    async with running(tower) as bench:
        tasks = bench.embed(*(bench.item(number) for number in range(8)))
        await bench.launches(2)
        bench.device.launched[0].may_compute.set()
        await asyncio.sleep(0.02)
        assert (len(bench.device.launched), bench.loop.num_waiting) == (2, 4)
        for number in range(4):
            await bench.launches(min(number + 2, 4))
            bench.device.launched[number].let_go()
        await asyncio.gather(*tasks)
        assert REGISTRY.get_sample_value("tandem_encoder_batches_in_flight") == 0


async def results_of(bench: Bench, items: Sequence[TowerItem]) -> list[Any]:
    """What became of items, without the times; good ones checked."""
    results = await asyncio.gather(*bench.embed(*items), return_exceptions=True)
    for item, result in zip(items, results, strict=True):
        if not isinstance(result, BaseException):
            bench.check(item, result[0])
    return [result if isinstance(result, BaseException) else None for result in results]


def holds(number: int, tower: VisionTower) -> Callable[[Sequence[np.ndarray]], bool]:
    """Whether a batch holds an item of `Bench.item`."""
    values = np.random.default_rng(number).standard_normal((PATCHES, tower.patch_width)).astype(np.float32)
    return lambda batch: any(np.array_equal(part, values) for part in batch)


@pytest.mark.parametrize("where", ["refuses", "breaks"])
async def test_an_error_of_the_device_hits_its_own_item_among_batches_in_flight(tower: VisionTower, where: str) -> None:
    is_bad = holds(3, tower)
    error = torch.OutOfMemoryError("CUDA out of memory") if where == "refuses" else RuntimeError("a kernel failed")
    async with running(tower, is_open=True, **{where: lambda batch: error if is_bad(batch) else None}) as bench:
        outcomes = await results_of(bench, [bench.item(number) for number in range(8)])
        assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [3]
        assert isinstance(outcomes[3], ModelFailure)
        assert "the vision tower failed on this item" in outcomes[3].message
        assert not bench.loop.is_stalled(time.monotonic())


async def test_an_encoder_whose_device_is_lost_for_good_sends_items_elsewhere_and_asks_for_a_restart(
    tower: VisionTower,
) -> None:
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    async with running(tower, is_open=True) as bench:
        assert await results_of(bench, [bench.item(1)]) == [None]
        assert not bench.loop.is_stalled(time.monotonic())
        bench.device.breaks = lambda batch: fault
        outcomes = await results_of(bench, [bench.item(number) for number in range(4)])
        assert all(isinstance(outcome, EncoderUnavailable) for outcome in outcomes)
        assert len(bench.device.launched) == 3, "no item is looked for"
        assert bench.loop.is_stalled(time.monotonic())


async def test_a_batch_too_large_for_the_memory_runs_in_halves_while_another_is_in_flight(tower: VisionTower) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    async with running(tower, is_open=True, refuses=lambda batch: full if len(batch) > 1 else None) as bench:
        assert await results_of(bench, [bench.item(number) for number in range(6)]) == [None] * 6
        assert len(bench.device.launched) == 6


async def test_values_that_are_not_finite_hit_their_own_item_among_batches_in_flight(tower: VisionTower) -> None:
    async with running(tower, is_open=True) as bench:
        items = [bench.item(number) for number in range(8)]
        items[2].pixel_values[3, 3] = np.nan
        outcomes = await results_of(bench, items)
        assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [2]
        assert "not finite" in outcomes[2].message


async def test_the_slices_of_a_video_are_put_together_in_their_order(tower: VisionTower) -> None:
    async with running(tower) as bench:
        video = bench.item(9, (7, 4, 4))
        (task,) = bench.embed(video)
        for number in range(4):
            await bench.launches(number + 1)
            assert bench.device.num_in_flight <= 2
            bench.device.launched[number].may_compute.set()  # the next is launched before this one's rows have come
            if number:
                bench.device.launched[number - 1].may_copy.set()
        bench.device.launched[3].let_go()
        embedding, _ = await task
        bench.check(video, embedding)


async def test_no_slice_is_launched_behind_another_so_that_a_picture_waits_for_one_alone(tower: VisionTower) -> None:
    async with running(tower) as bench:
        (video,) = bench.embed(bench.item(9, (6, 4, 4)))
        await bench.launches(1)
        (picture,) = bench.embed(bench.item(1))
        await eventually(lambda: bench.loop.num_waiting == 2)
        bench.device.launched[0].let_go()
        await bench.launches(2)
        bench.device.launched[1].let_go()
        await picture
        for number in (2, 3):
            await bench.launches(number + 1)
            bench.device.launched[number].let_go()
        await video


async def test_what_is_cancelled_in_flight_is_not_delivered_and_what_waits_is_not_launched(tower: VisionTower) -> None:
    async with running(tower) as bench:
        tasks = bench.embed(*(bench.item(number) for number in range(6)))
        await bench.launches(2)
        for task in (*tasks[2:4], tasks[4], tasks[5]):
            task.cancel()
        await asyncio.wait(tasks[2:])
        assert bench.loop.num_waiting == 0
        for launched in bench.device.launched:
            launched.let_go()
        await asyncio.gather(*tasks[:2])
        await eventually(lambda: bench.device.num_in_flight == 0)
        assert len(bench.device.launched) == 2


async def test_a_copy_that_never_comes_is_a_stall_and_progress_of_another_batch_is_none_of_it(
    tower: VisionTower,
) -> None:
    async with running(tower) as bench:
        tasks = bench.embed(*(bench.item(number) for number in range(4)))
        await bench.launches(2)
        bench.device.launched[0].may_compute.set()
        await eventually(lambda: "computed 0" in bench.device.log)
        now = time.monotonic()
        assert not bench.loop.is_stalled(now + 1.0)
        assert bench.loop.is_stalled(now + 601.0)
        for launched in bench.device.launched:
            launched.let_go()
        await asyncio.gather(*tasks)
        await eventually(lambda: not bench.loop.is_stalled(now + 1e9))


async def test_forward_seconds_and_the_rate_are_the_device_s_own(tower: VisionTower) -> None:
    def seconds() -> float:
        return REGISTRY.get_sample_value("tandem_encoder_forward_seconds_sum") or 0.0

    async with running(tower, is_open=True) as bench:
        before = seconds()
        await results_of(bench, [bench.item(number) for number in range(6)])
        assert seconds() - before == pytest.approx(3 * 0.5)
        assert bench.runner.patches_per_s == pytest.approx(2 * PATCHES / 0.5)
