"""Random arrivals through the whole pipeline: nothing is lost, nothing encoded twice, nothing held after the end.

And no budget is exceeded at any moment, whatever is cancelled, late, released or sent meanwhile.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.embedding import ExpectedEmbedding
from common.errors import Overloaded
from common.messages import EncodeRequest, Grid
from common.vision_grid import num_patches
from encoder_svc.batch_loop import BatchLimits
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.pipeline import Encoded, EncodePipeline, QueueLimits
from encoder_svc.preprocess import PreparedMedia
from encoder_svc.runner import TowerItem
from tests.common.sockets import background
from tests.encoder_svc.embeddings import FINGERPRINT, held, key

MAX_PATCHES, MAX_SLICE, MAX_ITEMS = 48, 16, 3
MAX_QUEUED_PATCHES, MAX_QUEUED_BYTES, HOLD_BYTES = 200, 50, 1600
BYTES_PER_PATCH = 8
# A still, a video that is cut, a still above the batch's limit, a short video.
GRIDS: list[Grid] = [(1, 4, 4), (5, 2, 4), (1, 8, 8), (2, 2, 2)]


def grid_of(number: int) -> Grid:
    return GRIDS[number % len(GRIDS)]


def bytes_of(grid: Grid) -> int:
    return num_patches(grid) * BYTES_PER_PATCH


@dataclass
class Runner:
    """A tower that takes some turns of the loop, and checks what it is given."""

    store: EmbeddingStore
    check: Callable[[], None] = lambda: None
    patches_per_s: float = 1e4
    max_in_flight: int = 1
    num_in_flight: int = 0
    forwards: list[list[tuple[str, int]]] = field(default_factory=list)

    async def run(self, items: Sequence[TowerItem], on_computed: Callable[[], None]) -> list[HeldEmbedding]:
        self.check()
        self.num_in_flight += 1
        assert self.num_in_flight <= self.max_in_flight
        patches = sum(num_patches(item.grid) for item in items)
        assert patches <= MAX_PATCHES or len(items) == 1
        assert len(items) <= MAX_ITEMS
        assert len({item.key for item in items}) == len(items)
        assert all(self.store.get(item.key) is None for item in items), "encoded although it is held"
        assert all(item.pixel_values.shape[0] == num_patches(item.grid) for item in items)
        self.forwards.append([(item.key, item.grid[0]) for item in items])
        for turn in range(6):
            await asyncio.sleep(0)
            if turn == 2:
                on_computed()
        self.num_in_flight -= 1
        return [
            held(
                int(item.key, 16),
                bytes_of(item.grid),
                grid=item.grid,
                rows=item.grid[0],
                width=bytes_of(item.grid) // item.grid[0] // 4,
            )
            for item in items
        ]

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Arrival:
    """A request for an item, some turns after the one before. It may be cancelled, or run out of time, or release."""

    number: int
    request: int
    pause: int
    leaves_after: int | None
    is_deadline: bool
    releases: int | None
    fetches: bool


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        number=st.integers(0, 7),
        request=st.integers(0, 5),
        pause=st.integers(0, 6),
        leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 25)),
        is_deadline=st.booleans(),
        releases=st.one_of(st.none(), st.integers(0, 5)),
        fetches=st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def prepare(request: EncodeRequest, source: memoryview, is_over: Callable[[], bool]) -> PreparedMedia:
    return PreparedMedia(np.zeros((num_patches(request.expected_grid), 1), np.float32), request.expected_grid)


@dataclass
class World:
    """A pipeline and what came of each request."""

    store: EmbeddingStore
    runner: Runner
    pipeline: EncodePipeline
    outcomes: list[object] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # requests that ended something of theirs, and so may have no lease

    def check(self) -> None:
        """The budgets, at any moment."""
        store, pipeline = self.store, self.pipeline
        needed = store.held_bytes + store.reserved_bytes
        largest = max(bytes_of(grid) for grid in GRIDS)
        assert needed <= max(HOLD_BYTES, largest)
        assert store.held_bytes == sum(e.embedding.header.num_bytes for e in store._entries.values())
        assert pipeline.queued_patches <= MAX_QUEUED_PATCHES
        assert pipeline.queued_bytes <= MAX_QUEUED_BYTES
        for gate in pipeline._gates.values():
            assert gate.inside <= (1 + self.runner.max_in_flight) * MAX_PATCHES

    async def ask(self, arrival: Arrival) -> None:
        request = EncodeRequest(
            request_id=f"r{arrival.request}",
            key=key(arrival.number),
            modality="image" if grid_of(arrival.number)[0] == 1 else "video",
            expected_grid=grid_of(arrival.number),
            fingerprint=FINGERPRINT,
            time_left_s=30.0,
        )
        try:
            encoded = await self.pipeline.encode(request, memoryview(b"12345"))
        except Overloaded as error:
            self.outcomes.append(error)
            return
        assert encoded.elsewhere is None
        assert self.store.get(request.key) is not None
        is_leased = request.request_id in self.store._entries[request.key].leases
        assert is_leased or request.request_id in self.left
        self.outcomes.append(encoded)
        if arrival.fetches:  # a slow decoder
            self.store.pin(request.key)
            try:
                for _ in range(10):
                    await asyncio.sleep(0)
            finally:
                self.store.unpin(request.key)


async def leave(task: "asyncio.Task[None]", arrival: Arrival) -> None:
    """Let a request wait for its turns, then cancel it or let its time run out; both end the same wait."""
    for _ in range(arrival.leaves_after or 0):
        await asyncio.sleep(0)
    if not arrival.is_deadline:
        task.cancel()
        return
    try:
        async with asyncio.timeout(0):
            await task
    except TimeoutError:
        pass


async def play(arrivals: list[Arrival], max_in_flight: int) -> World:
    store = EmbeddingStore(HOLD_BYTES, 60.0)
    runner = Runner(store, max_in_flight=max_in_flight)
    pipeline = EncodePipeline(
        prepare=prepare,
        runner=runner,  # type: ignore[arg-type]
        store=store,
        share=None,
        expected_of=lambda name, grid: ExpectedEmbedding(name, grid, FINGERPRINT),
        bytes_of=bytes_of,
        batch_limits=BatchLimits(MAX_PATCHES, MAX_ITEMS, MAX_SLICE, max_wait_s=0.001),
        queue_limits=QueueLimits(MAX_QUEUED_PATCHES, MAX_QUEUED_BYTES),
        preprocess_threads=1,
    )
    world = World(store, runner, pipeline)
    runner.check = world.check
    asked: list[asyncio.Task[None]] = []
    leaving: list[asyncio.Task[None]] = []
    async with background(pipeline.run()), asyncio.timeout(30):
        for arrival in arrivals:
            for _ in range(arrival.pause):
                await asyncio.sleep(0)
            if arrival.leaves_after is not None:
                world.left.add(f"r{arrival.request}")
            task = asyncio.create_task(world.ask(arrival))
            asked.append(task)
            if arrival.leaves_after is not None:
                leaving.append(asyncio.create_task(leave(task, arrival)))
            if arrival.releases is not None:
                world.left.add(f"r{arrival.releases}")
                store.release(f"r{arrival.releases}")
            world.check()
        results = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*leaving, return_exceptions=True)
        await pipeline.drained()
        await asyncio.sleep(0)
    pipeline.close()
    for arrival, result in zip(arrivals, results, strict=True):
        has_left = arrival.leaves_after is not None and isinstance(result, asyncio.CancelledError)
        assert result is None or has_left, result
    return world


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([1, 2]))
def test_whatever_arrives_is_answered_once_and_leaves_nothing(arrivals: list[Arrival], max_in_flight: int) -> None:
    world = asyncio.run(play(arrivals, max_in_flight))
    store, pipeline = world.store, world.pipeline
    for number in range(6):
        store.release(f"r{number}")
    assert (store.num_leases, store.leased_bytes, store.reserved_bytes) == (0, 0, 0)
    assert store.held_bytes <= HOLD_BYTES
    assert (pipeline.num_in_flight, pipeline.queued_patches, pipeline.queued_bytes) == (0, 0, 0)
    assert [gate.inside for gate in pipeline._gates.values()] == [0, 0]
    assert len(pipeline.batches._batcher) == 0
    if not any(isinstance(outcome, Overloaded) for outcome in world.outcomes) and all(
        arrival.leaves_after is None for arrival in arrivals
    ):
        kept = bytes_of_all({arrival.number for arrival in arrivals}) <= HOLD_BYTES
        frames = [number for forward in world.runner.forwards for number in forward]
        if kept:  # nothing was evicted, so each frame of each item ran exactly once
            for number in {arrival.number for arrival in arrivals}:
                assert sum(count for name, count in frames if name == key(number)) == grid_of(number)[0]


def bytes_of_all(numbers: set[int]) -> int:
    return sum(bytes_of(grid_of(number)) for number in numbers)


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_sixty_four_requests_for_three_items_encode_each_once(max_in_flight: int) -> None:
    arrivals = [Arrival(number % 3, number % 6, number % 4, None, False, None, False) for number in range(64)]
    world = await play(arrivals, max_in_flight)
    assert [outcome for outcome in world.outcomes if not isinstance(outcome, Encoded)] == []
    frames = [number for forward in world.runner.forwards for number in forward]
    assert sorted(frames) == sorted([(key(0), 1), (key(2), 1), (key(1), 2), (key(1), 2), (key(1), 1)])
