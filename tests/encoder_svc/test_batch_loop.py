"""The tower's queue: waits only for what is coming, lets images pass between slices, and knows when it hangs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from common.errors import ModelFailure
from common.messages import Grid
from common.vision_grid import num_patches
from encoder_svc.batch_loop import BatchLimits, BatchLoop
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem
from tests.common.sockets import background, eventually
from tests.encoder_svc.embeddings import held, key


@dataclass
class Tower:
    """Runs a forward each time that it is let, and remembers what ran: number and frames of each item."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1000))
    forwards: list[list[tuple[int, int]]] = field(default_factory=list)
    fails_on: Callable[[Sequence[TowerItem]], Exception | None] = lambda items: None
    patches_per_s: float = 0.0
    max_in_flight: int = 1
    is_broken: bool = False

    async def run(self, items: Sequence[TowerItem], on_computed: Callable[[], None]) -> list[HeldEmbedding]:
        self.forwards.append([(int(item.key, 16), item.grid[0]) for item in items])
        await self.turns.acquire()
        if (error := self.fails_on(items)) is not None:
            raise error
        return [
            held(int(item.key, 16), 64 * item.grid[0], grid=item.grid, rows=item.grid[0], width=16) for item in items
        ]


def item(number: int, grid: Grid = (1, 4, 4)) -> TowerItem:
    return TowerItem(key(number), grid, np.zeros((num_patches(grid), 1), np.float32))


@contextlib.asynccontextmanager
async def running(tower: Tower, **limits: Any) -> AsyncIterator[BatchLoop]:
    base: dict[str, Any] = {"max_patches": 64, "max_items": 8, "max_slice_patches": 32}
    loop = BatchLoop(tower, BatchLimits(**{**base, **limits}))  # type: ignore[arg-type]
    async with background(loop.run()):
        yield loop


async def embed_all(loop: BatchLoop, items: Sequence[TowerItem]) -> list[Any]:
    return await asyncio.gather(*(loop.embed(one) for one in items), return_exceptions=True)


async def test_an_idle_tower_begins_at_once_though_it_may_wait() -> None:
    tower = Tower()
    async with running(tower, max_wait_s=30.0) as loop, asyncio.timeout(5):
        await loop.embed(item(1))
        assert tower.forwards == [[(1, 1)]]


async def test_a_batch_waits_for_what_is_being_prepared_and_no_longer() -> None:
    tower = Tower()
    async with running(tower, max_wait_s=30.0) as loop, asyncio.timeout(5):
        with contextlib.ExitStack() as preparing:
            preparing.enter_context(loop.expecting())
            first = asyncio.create_task(loop.embed(item(1)))
            await eventually(lambda: loop.num_waiting == 1)
            second = asyncio.create_task(loop.embed(item(2)))
        await asyncio.gather(first, second)
        assert tower.forwards == [[(1, 1), (2, 1)]]


async def test_a_full_batch_waits_for_nothing() -> None:
    tower = Tower()
    async with running(tower, max_wait_s=30.0) as loop, asyncio.timeout(5):
        with loop.expecting():
            await embed_all(loop, [item(number) for number in range(4)])
        assert [len(forward) for forward in tower.forwards] == [4]


async def test_the_wait_is_no_longer_than_the_batch_itself_will_take() -> None:
    tower = Tower(patches_per_s=16 / 0.01)
    async with running(tower, max_wait_s=30.0) as loop, asyncio.timeout(5):
        with loop.expecting():
            await loop.embed(item(1))
        assert tower.forwards == [[(1, 1)]]


async def test_a_batch_that_takes_as_long_as_the_longest_wait_begins_at_once() -> None:
    tower = Tower(patches_per_s=16 / 30.0)
    async with running(tower, max_wait_s=30.0) as loop, asyncio.timeout(5):
        with loop.expecting():
            await loop.embed(item(1))
        assert tower.forwards == [[(1, 1)]]


async def test_images_run_between_the_slices_of_a_long_video() -> None:
    tower = Tower(turns=asyncio.Semaphore(0))
    async with running(tower) as loop, asyncio.timeout(5):
        video = asyncio.create_task(loop.embed(item(100, (8, 4, 4))))
        await eventually(lambda: tower.forwards == [[(100, 2)]])
        images = [asyncio.create_task(loop.embed(item(number))) for number in (1, 2)]
        await eventually(lambda: loop.num_waiting == 3)
        for _ in range(5):
            tower.turns.release()
        embedding, _ = await video
        await asyncio.gather(*images)
        slices, others = [(100, 2)], [(1, 1), (2, 1)]
        assert tower.forwards == [slices, others, slices, slices, slices]
        assert (embedding.header.grid, embedding.header.rows) == ((8, 4, 4), 8)


async def test_a_slow_tower_gets_slices_that_take_no_longer_than_the_limit() -> None:
    tower = Tower(patches_per_s=32 * 10)
    async with running(tower, max_slice_patches=64, max_slice_s=0.1) as loop, asyncio.timeout(5):
        await loop.embed(item(100, (8, 4, 4)))
        assert tower.forwards == [[(100, 2)]] * 4


async def test_of_a_video_that_is_cancelled_no_further_slice_is_run() -> None:
    tower = Tower(turns=asyncio.Semaphore(0))
    async with running(tower) as loop, asyncio.timeout(5):
        video = asyncio.create_task(loop.embed(item(100, (8, 4, 4))))
        await eventually(lambda: tower.forwards)
        video.cancel()
        await asyncio.wait({video})
        assert loop.num_waiting == 0
        tower.turns.release()
        tower.turns.release()
        await loop.embed(item(1))
        assert tower.forwards == [[(100, 2)], [(1, 1)]]


async def test_a_slice_that_fails_fails_its_video_alone() -> None:
    tower = Tower(fails_on=lambda items: RuntimeError("a kernel failed") if len(items[0].key.strip("0")) > 1 else None)
    async with running(tower) as loop, asyncio.timeout(5):
        results = await embed_all(loop, [item(0x64, (8, 4, 4)), item(1)])
        assert isinstance(results[0], ModelFailure)
        assert not isinstance(results[1], BaseException)


@pytest.mark.parametrize(
    ("patches_per_s", "stalls_after_s"),
    [(0.0, 600.0), (1000.0, 60.0), (64 / 10.0, 200.0), (64 / 100.0, 600.0)],
    ids=["not known yet", "fast", "slow", "very slow"],
)
async def test_a_forward_that_takes_much_longer_than_the_largest_legal_one_hangs(
    patches_per_s: float, stalls_after_s: float
) -> None:
    tower = Tower(turns=asyncio.Semaphore(0), patches_per_s=patches_per_s)
    async with running(tower) as loop, asyncio.timeout(5):
        assert not loop.is_stalled(1e9)  # an idle tower does not hang
        task = asyncio.create_task(loop.embed(item(1)))
        await eventually(lambda: tower.forwards)
        now = time.monotonic()
        assert not loop.is_stalled(now + stalls_after_s - 1.0)
        assert loop.is_stalled(now + stalls_after_s + 0.1)
        assert loop.busy_s_at(now + 7.0) == pytest.approx(7.0, abs=1.0)
        tower.turns.release()
        await task
        assert not loop.is_stalled(1e9)
