"""Prepared items in, embeddings out: forms batches and hands them to the tower, one after another.

Owns the short wait for items that are still being prepared, the slices of long videos, how many batches are under way
on a device that runs beside us, and the search for the item that makes a batch fail. An item that nobody waits for any
more is not begun. Runs on the event loop, which it never blocks; knows nothing of requests, keys or memory.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from common.errors import EncoderUnavailable, ModelFailure, TandemError
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.vision_grid import num_patches
from encoder_svc.batcher import Batcher, Piece
from encoder_svc.device_clock import DeviceClock, ForwardUnderWay
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.shared_regions import NEVER_SHARED, SharedRegions
from encoder_svc.slices import Joining, cut

logger = structlog.get_logger(__name__)

BATCH_PATCHES = Histogram(
    "tandem_encoder_batch_patches", "Patches in one forward", buckets=tuple(2**power for power in range(6, 18))
)
QUEUE_SECONDS = Histogram(
    "tandem_encoder_queue_seconds", "Time that a prepared item waits for its forward", buckets=SECONDS_BUCKETS
)
COMPUTE_SECONDS = Counter("tandem_encoder_compute_seconds_total", "Time that the tower has worked")
IN_FLIGHT = Gauge("tandem_encoder_batches_in_flight", "Batches begun and not answered")
PATCHES_PER_SECOND = Gauge("tandem_encoder_patches_per_second", "Patches a second of the last forwards")

STALL_FACTOR = 20
STALL_AT_LEAST_S = 60.0
STALL_AT_MOST_S = 600.0


@dataclass(frozen=True)
class BatchLimits:
    """What one forward may hold, and how long a batch that is not full may wait for items being prepared.

    A slice of a video is bounded by its patches, and by its seconds at the rate that the tower has shown.
    """

    max_patches: int
    max_items: int
    max_slice_patches: int
    max_slice_s: float = math.inf
    max_wait_s: float = 0.0


@dataclass(frozen=True)
class EmbedTimes:
    """Seconds that a prepared item waited for its first forward, and that passed from there to its embedding."""

    queue_s: float
    forward_s: float


@dataclass(eq=False)
class _Ready:
    """A prepared item, and who waits for its embedding. `joining` gathers the slices of one that is cut."""

    item: TowerItem
    done: "asyncio.Future[HeldEmbedding]"
    joining: Joining
    queued_at: float
    began_at: float | None = None
    is_joining: asyncio.Lock = field(default_factory=asyncio.Lock)  # slices in their order, one at a time


class BatchLoop:
    """The tower's queue. The owner awaits `run`."""

    def __init__(self, runner: TowerRunner, limits: BatchLimits, regions: SharedRegions = NEVER_SHARED) -> None:
        self._runner = runner
        self._regions = regions
        self._limits = limits
        self._batcher: Batcher[_Ready] = Batcher(
            limits.max_patches,
            limits.max_items,
            max_slice_patches=self._max_slice_patches,
            is_wanted=lambda ready: not ready.done.done(),
        )
        self._changed = asyncio.Event()
        self._num_coming = 0
        self._batches: set[asyncio.Task[None]] = set()  # begun and not answered
        self._clock = DeviceClock()

    @property
    def num_waiting(self) -> int:
        """Items whose forward has not begun, or not for all their slices."""
        return len(self._batcher)

    def busy_s_at(self, now: float) -> float:
        """Seconds that forwards have taken since the start, the one that runs included."""
        return self._clock.busy_s_at(now)

    def is_stalled(self, now: float) -> bool:
        """Whether nothing went on for longer than the largest legal forward takes, many times over, or ever will."""
        if self._runner.is_broken:
            return True
        rate = self._runner.patches_per_s
        largest_s = max(self._limits.max_patches, self._clock.largest_patches) / rate if rate else STALL_AT_MOST_S
        limit_s = min(max(STALL_FACTOR * largest_s, STALL_AT_LEAST_S), STALL_AT_MOST_S)
        return self._clock.silent_s_at(now) > limit_s

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Within it an item is being prepared, for which a batch may wait."""
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1
            self._changed.set()

    async def embed(self, item: TowerItem) -> tuple[HeldEmbedding, EmbedTimes]:
        """An item's embedding, when its turn has come. Raises ModelFailure for the item alone."""
        done: asyncio.Future[HeldEmbedding] = asyncio.get_running_loop().create_future()
        ready = _Ready(item, done, Joining(item.grid, self._regions), time.monotonic())
        self._batcher.add(ready, num_patches(item.grid), item.grid[0])
        self._changed.set()
        try:
            embedding = await ready.done
        except asyncio.CancelledError:
            self._batcher.drop_unwanted()
            raise
        assert ready.began_at is not None
        times = EmbedTimes(ready.began_at - ready.queued_at, time.monotonic() - ready.began_at)
        return embedding, times

    async def run(self) -> None:
        """Run batches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if not self._batcher or not self._has_room:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                await self._wait_for_more()
                if batch := self._batcher.next_batch():
                    task = tasks.create_task(self._run_batch(batch, self._begin(batch)), name="batch")
                    self._batches.add(task)
                    IN_FLIGHT.set(len(self._batches))
                    task.add_done_callback(self._on_answered)

    @property
    def _has_room(self) -> bool:
        """Whether the tower should be given its next batch.

        While it computes only one that is full: another would become no earlier by it, and might have become larger.
        """
        if len(self._batches) >= self._runner.max_in_flight:
            return False
        return not self._clock.is_computing or self._batcher.has_full_batch

    def _on_answered(self, task: "asyncio.Task[None]") -> None:
        self._batches.discard(task)
        IN_FLIGHT.set(len(self._batches))
        self._changed.set()

    def _max_slice_patches(self) -> float:
        rate = self._runner.patches_per_s or math.inf
        return min(self._limits.max_slice_patches, rate * self._limits.max_slice_s)

    async def _wait_for_more(self) -> None:
        """Give items that are being prepared a moment to join, never more than the batch itself will take.

        A batch that will take as long as the longest wait gains nothing by more items: they are prepared as it runs.
        """
        rate, longest_s = self._runner.patches_per_s, self._limits.max_wait_s
        expected_s = self._batcher.waiting_patches / rate if rate else 0.0
        if expected_s >= longest_s:
            return
        deadline = time.monotonic() + (expected_s if rate else longest_s)
        while self._num_coming and not self._batcher.is_full and (left_s := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _begin(self, batch: list[Piece[_Ready]]) -> ForwardUnderWay:
        """Count a batch as begun, before anything else may look whether the tower has room."""
        now = time.monotonic()
        for piece in batch:
            if piece.item.began_at is None:
                piece.item.began_at = now
                QUEUE_SECONDS.observe(now - piece.item.queued_at)
        patches = sum(map(_patches_of, batch))
        BATCH_PATCHES.observe(patches)
        return self._clock.begin(patches, now)

    async def _run_batch(self, batch: list[Piece[_Ready]], forward: ForwardUnderWay) -> None:
        items = [cut(piece.item.item, piece.first, piece.num_frames) for piece in batch]
        try:
            embeddings = await self._runner.run(items, lambda: self._on_computed(forward))
        except Exception as exc:  # the engine lives: every item of the batch is answered
            self._end(forward)
            await self._run_apart(batch, exc)
            return
        self._end(forward)
        for piece, embedding in zip(batch, embeddings, strict=True):
            await self._deliver(piece, embedding)

    def _on_computed(self, forward: ForwardUnderWay) -> None:
        COMPUTE_SECONDS.inc(self._clock.computed(forward, time.monotonic()))
        PATCHES_PER_SECOND.set(self._runner.patches_per_s)
        self._changed.set()

    def _end(self, forward: ForwardUnderWay) -> None:
        self._on_computed(forward)
        self._clock.end(forward, time.monotonic())

    async def _deliver(self, piece: Piece[_Ready], embedding: HeldEmbedding) -> None:
        ready = piece.item
        whole: HeldEmbedding | None = embedding
        if piece.num_frames < ready.item.grid[0]:
            async with ready.is_joining:
                whole = await asyncio.to_thread(ready.joining.add, embedding)
        if whole is not None and not ready.done.done():
            ready.done.set_result(whole)

    async def _run_apart(self, batch: list[Piece[_Ready]], exc: Exception) -> None:
        """Find the item that made a batch fail by running halves; the others get their embeddings."""
        if self._runner.is_broken:
            logger.error("the tower's device is lost", exc_info=exc)
            for piece in batch:
                self._fail(
                    piece, EncoderUnavailable("this encoder's device has failed: ask another", retry_after_s=1.0)
                )
            return
        if len(batch) > 1:
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                await self._run_batch(half, self._begin(half))
            return
        if not isinstance(exc, TandemError):
            logger.error("the tower failed", exc_info=exc)
            exc = ModelFailure("the vision tower failed on this item: report it with the request id")
        self._fail(batch[0], exc)

    def _fail(self, piece: Piece[_Ready], error: Exception) -> None:
        if not piece.item.done.done():
            piece.item.done.set_exception(error)


def _patches_of(piece: Piece[_Ready]) -> int:
    _, rows, columns = piece.item.item.grid
    return piece.num_frames * rows * columns
