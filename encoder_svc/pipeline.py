"""From media bytes to a held embedding: prepare in a thread pool, batch, run the tower, hold, write to Redis.

Owns single flight (an item in work is never started twice, and stops when nobody waits for it any more) and the
overlap of the stages: while the tower runs one batch, the pool prepares the next. Runs on the event loop, which none
of its stages blocks; knows nothing of sockets.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from common.embedding_cache import EmbeddingCache
from common.errors import ModelFailure, Overloaded, TandemError
from common.messages import EncodeRequest, EncodeTimes
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.vision_grid import num_patches
from encoder_svc.batcher import Batcher
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.preprocess import PreparedMedia
from encoder_svc.runner import TowerItem, TowerRunner

Prepare = Callable[[EncodeRequest, memoryview], PreparedMedia]  # runs in the pool
MAX_PROBES = 64

T = TypeVar("T")
logger = structlog.get_logger(__name__)

ITEMS = Counter("tandem_encoder_items_total", "Items asked for", ["modality", "outcome"])
PREPROCESS_SECONDS = Histogram("tandem_encoder_preprocess_seconds", "Decode to patches", buckets=SECONDS_BUCKETS)
QUEUED_PATCHES = Gauge("tandem_encoder_queued_patches", "Patches admitted and not yet encoded")
CACHE_WRITES_DROPPED = Counter(
    "tandem_encoder_cache_writes_dropped_total", "Embeddings not offered to Redis: queue full"
)


@dataclass
class _Flight:
    """An item in work: who waits for it (a request as often as it asked), and the task that does it."""

    task: "asyncio.Task[EncodeTimes]"
    waiters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Ready:
    """A prepared item that waits for its forward."""

    item: TowerItem
    done: "asyncio.Future[HeldEmbedding]"


class EncodePipeline:
    """The stages between an `EncodeRequest` and an entry of the `EmbeddingStore`. The owner awaits `run`."""

    def __init__(
        self,
        *,
        prepare: Prepare,
        runner: TowerRunner,
        store: EmbeddingStore,
        cache: EmbeddingCache | None,
        max_patches_per_batch: int,
        max_items_per_batch: int,
        max_queued_patches: int,
        preprocess_threads: int,
        video_threads: int = 1,
        cache_queue_items: int = 64,
    ) -> None:
        self._prepare = prepare
        self._runner = runner
        self._store = store
        self._cache = cache
        self._max_queued_patches = max_queued_patches
        self._image_pool = ThreadPoolExecutor(preprocess_threads, thread_name_prefix="image")
        self._video_pool = ThreadPoolExecutor(video_threads, thread_name_prefix="video")  # long ones hold up no image
        self._num_probes = 0
        self._batcher: Batcher[_Ready] = Batcher(max_patches_per_batch, max_items_per_batch)
        self._arrived = asyncio.Event()
        self._flights: dict[str, _Flight] = {}
        self._to_cache: asyncio.Queue[HeldEmbedding] = asyncio.Queue(cache_queue_items)
        self.queued_patches = 0

    @property
    def num_in_flight(self) -> int:
        """Items in work."""
        return len(self._flights)

    async def run(self) -> None:
        """Form batches and write to the cache until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_batches())
            if self._cache is not None:
                tasks.create_task(self._write_cache(self._cache))

    async def encode(self, request: EncodeRequest, source: memoryview) -> tuple[bool, EncodeTimes]:
        """Make sure that the item is held and leased to the request; tells whether it was held already.

        Raises InvalidRequest for media that cannot be encoded, Overloaded, or ModelFailure. What nobody waits for any
        more stops.
        """
        key, request_id = request.key, request.request_id
        if self._store.lease(key, request_id, time.monotonic()):
            ITEMS.labels(request.modality, "held").inc()
            return True, EncodeTimes()
        flight = self._flights.get(key)
        outcome = "joined"
        if flight is None or flight.task.done():
            outcome = "encoded"
            flight = self._start(request, source)
        flight.waiters.append(request_id)
        try:
            times = await asyncio.shield(flight.task)
        except BaseException:
            self._store.end_lease(key, request_id)
            raise
        finally:
            self._leave(key, flight, request_id)
        ITEMS.labels(request.modality, outcome).inc()
        return False, times

    async def drained(self) -> None:
        """Return when no item is in work and Redis has been offered all of them."""
        while self._flights:
            await asyncio.wait([flight.task for flight in self._flights.values()])
        if self._cache is not None:
            await self._to_cache.join()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._image_pool, self._video_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()

    async def probe(self, call: Callable[[], T]) -> T:
        """Run a probe of a video beside the preprocessing of videos. Raises Overloaded when too many wait."""
        if self._num_probes >= MAX_PROBES:
            raise Overloaded(f"{self._num_probes} videos wait to be read in this encoder: retry", retry_after_s=2.0)
        self._num_probes += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._video_pool, call)
        finally:
            self._num_probes -= 1

    def _start(self, request: EncodeRequest, source: memoryview) -> _Flight:
        patches = num_patches(request.expected_grid)
        if self.queued_patches and self.queued_patches + patches > self._max_queued_patches:
            raise Overloaded(
                f"{self.queued_patches} patches wait in this encoder, the limit is {self._max_queued_patches}: retry",
                retry_after_s=max(1.0, self.queued_patches / max(self._runner.patches_per_s, 1.0)),
            )
        self.queued_patches += patches
        QUEUED_PATCHES.set(self.queued_patches)
        flight = _Flight(asyncio.create_task(self._encode(request, source), name="encode"))
        self._flights[request.key] = flight
        flight.task.add_done_callback(lambda task: self._finish(request.key, flight, patches))
        return flight

    def _leave(self, key: str, flight: _Flight, request_id: str) -> None:
        """A request no longer waits. A flight that stops is forgotten at once, so that nobody joins it any more."""
        flight.waiters.remove(request_id)
        if not flight.waiters and not flight.task.done():
            flight.task.cancel()
            self._forget(key, flight)

    def _finish(self, key: str, flight: _Flight, patches: int) -> None:
        self.queued_patches -= patches
        QUEUED_PATCHES.set(self.queued_patches)
        self._forget(key, flight)
        if not flight.task.cancelled():
            flight.task.exception()  # seen by whoever waits, or by nobody when all have just left

    def _forget(self, key: str, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _encode(self, request: EncodeRequest, source: memoryview) -> EncodeTimes:
        began = time.monotonic()
        pool = self._image_pool if request.modality == "image" else self._video_pool
        call = functools.partial(self._prepare, request, source)
        prepared = await asyncio.get_running_loop().run_in_executor(pool, call)
        prepared_at = time.monotonic()
        PREPROCESS_SECONDS.observe(prepared_at - began)
        done: asyncio.Future[HeldEmbedding] = asyncio.get_running_loop().create_future()
        item = TowerItem(request.key, prepared.grid_thw, prepared.pixel_values)
        self._batcher.add(_Ready(item, done), num_patches(prepared.grid_thw))
        self._arrived.set()
        embedding = await done
        self._store.put(embedding)
        # Before anything else may be put here and evict it.
        for request_id in self._flights[request.key].waiters:
            self._store.lease(request.key, request_id, time.monotonic())
        self._offer_to_cache(embedding)
        forward_s = self._runner.last_forward_s
        queue_s = max(0.0, time.monotonic() - prepared_at - forward_s)
        return EncodeTimes(queue_s=queue_s, preprocess_s=prepared_at - began, forward_s=forward_s)

    async def _run_batches(self) -> None:
        while True:
            await self._arrived.wait()
            batch = [ready for ready in self._batcher.next_batch() if not ready.done.cancelled()]
            if len(self._batcher) == 0:
                self._arrived.clear()
            if batch:
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[_Ready]) -> None:
        try:
            embeddings = await self._runner.run([ready.item for ready in batch])
        except Exception as exc:  # the engine lives: every item of the batch is answered
            await self._run_apart(batch, exc)
            return
        for ready, embedding in zip(batch, embeddings, strict=True):
            if not ready.done.cancelled():
                ready.done.set_result(embedding)

    async def _run_apart(self, batch: list[_Ready], exc: Exception) -> None:
        """Find the item that made a batch fail by running halves; the others get their embeddings."""
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._run_batch(batch[:middle])
            await self._run_batch(batch[middle:])
            return
        if not isinstance(exc, TandemError):
            logger.error("the tower failed", exc_info=exc)
            exc = ModelFailure("the vision tower failed on this item: report it with the request id")
        if not batch[0].done.cancelled():
            batch[0].done.set_exception(exc)

    def _offer_to_cache(self, embedding: HeldEmbedding) -> None:
        if self._cache is None:
            return
        try:
            self._to_cache.put_nowait(embedding)
        except asyncio.QueueFull:
            CACHE_WRITES_DROPPED.inc()

    async def _write_cache(self, cache: EmbeddingCache) -> None:
        while True:
            embedding = await self._to_cache.get()
            try:
                await cache.put(embedding.header, embedding.payload)
            finally:
                self._to_cache.task_done()
