"""From media bytes to a held embedding: prepare in a thread pool, batch, run the tower, hold, write to Redis.

Owns admission (patches, bytes, and a place for the result, before anything is begun), single flight (an item in work is
never started twice, and stops when nobody waits for it any more) and the overlap of the stages: while the tower runs
one batch, the pools prepare the next, no further ahead than there is room. Runs on the event loop, which none of its
stages blocks; knows nothing of sockets.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from common.embedding import ExpectedEmbedding
from common.errors import Overloaded
from common.messages import EncodeRequest, EncodeTimes
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.vision_grid import Grid, num_patches
from encoder_svc.batch_loop import BatchLimits, BatchLoop
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.fleet_share import FleetShare
from encoder_svc.patch_gate import PatchGate
from encoder_svc.preprocess import PreparedMedia
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.shared_regions import NEVER_SHARED, SharedRegions

# Runs in a pool. The last argument says that nobody wants the item any more: reading it may stop.
Prepare = Callable[[EncodeRequest, memoryview, Callable[[], bool]], PreparedMedia]
MAX_PROBES = 64
VIDEO_NICENESS = 10  # a tenth of a core that a forward wants too
BATCHES_AHEAD = 1  # prepared or being prepared, besides those that run

T = TypeVar("T")

ITEMS = Counter("tandem_encoder_items_total", "Items asked for", ["modality", "outcome"])
PREPROCESS_SECONDS = Histogram("tandem_encoder_preprocess_seconds", "Decode to patches", buckets=SECONDS_BUCKETS)
QUEUED_PATCHES = Gauge("tandem_encoder_queued_patches", "Patches admitted and not yet encoded")
QUEUED_BYTES = Gauge("tandem_encoder_queued_bytes", "Bytes of media files admitted and not yet encoded")
PREPARED_PATCHES = Gauge("tandem_encoder_prepared_patches", "Patches in memory as pixels, or being prepared")


@dataclass(frozen=True)
class QueueLimits:
    """What may be admitted and not yet encoded."""

    max_patches: int
    max_bytes: int


@dataclass(frozen=True)
class Encoded:
    """What came of an item. It is held and leased, unless `elsewhere` names the place where it is or will be."""

    was_held: bool = False
    times: EncodeTimes = field(default_factory=EncodeTimes)
    elsewhere: str | None = None


@dataclass(eq=False)
class _Flight:
    """An item in work: who waits for it (a request as often as it asked), and the task that does it."""

    patches: int
    num_bytes: int
    waiters: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    task: "asyncio.Task[Encoded]" = field(init=False)


def _give_way() -> None:
    """Let the forwards and the images go first where there are too few cores: reading a video may take seconds."""
    if sys.platform == "linux":  # elsewhere it is the whole process that gives way
        os.nice(VIDEO_NICENESS)


class EncodePipeline:
    """The stages between an `EncodeRequest` and an entry of the `EmbeddingStore`. The owner awaits `run`."""

    def __init__(
        self,
        *,
        prepare: Prepare,
        runner: TowerRunner,
        store: EmbeddingStore,
        share: FleetShare | None,
        expected_of: Callable[[str, Grid], ExpectedEmbedding],
        bytes_of: Callable[[Grid], int],
        batch_limits: BatchLimits,
        queue_limits: QueueLimits,
        preprocess_threads: int,
        video_threads: int = 1,
        regions: SharedRegions = NEVER_SHARED,
    ) -> None:
        self._prepare = prepare
        self._runner = runner
        self._store = store
        self._share = share
        self._expected_of = expected_of
        self._bytes_of = bytes_of
        self._queue_limits = queue_limits
        # Videos, which may take long, have a pool and room of their own: they hold up no image.
        self._pools = {
            "image": ThreadPoolExecutor(preprocess_threads, thread_name_prefix="image"),
            "video": ThreadPoolExecutor(video_threads, thread_name_prefix="video", initializer=_give_way),
        }
        max_ahead = (BATCHES_AHEAD + runner.max_in_flight) * batch_limits.max_patches
        self._gates = {name: PatchGate(max_ahead) for name in self._pools}
        self._num_probes = 0
        self._flights: dict[str, _Flight] = {}
        self.batches = BatchLoop(runner, batch_limits, regions)
        self.queued_patches = 0
        self.queued_bytes = 0

    @property
    def num_in_flight(self) -> int:
        """Items in work."""
        return len(self._flights)

    async def run(self) -> None:
        """Form batches and talk to the fleet until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.batches.run())
            if self._share is not None:
                tasks.create_task(self._share.run())

    async def encode(self, request: EncodeRequest, source: memoryview) -> Encoded:
        """Make sure that the item is held and leased to the request, or tell where else it is.

        Raises InvalidRequest for media that cannot be encoded, Overloaded, or ModelFailure. What nobody waits for any
        more stops.
        """
        key, request_id = request.key, request.request_id
        if self._store.lease(key, request_id, time.monotonic()):
            ITEMS.labels(request.modality, "held").inc()
            return Encoded(was_held=True)
        flight, outcome = self._flights.get(key), "joined"
        if flight is None or flight.task.done():
            flight, outcome = self._start(request, source), "encoded"
        flight.waiters.append(request_id)
        try:
            result = await asyncio.shield(flight.task)
        except BaseException as exc:
            if flight.waiters.count(request_id) == 1:  # it does not ask for the item a second time
                self._store.end_lease(key, request_id)
            ITEMS.labels(request.modality, "cancelled" if isinstance(exc, asyncio.CancelledError) else "failed").inc()
            raise
        finally:
            self._leave(key, flight, request_id)
        ITEMS.labels(request.modality, outcome if result.elsewhere is None else "elsewhere").inc()
        return result

    async def drained(self) -> None:
        """Return when no item is in work and Redis has been offered all of them."""
        while self._flights:
            await asyncio.wait([flight.task for flight in self._flights.values()])
        if self._share is not None:
            await self._share.drained()

    def close(self) -> None:
        """Stop the threads."""
        for flight in self._flights.values():
            flight.is_over.set()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._runner.close()

    async def probe(self, call: Callable[[Callable[[], bool]], T]) -> T:
        """Run a probe of a video beside the preprocessing of videos. Raises Overloaded when too many wait.

        `call` is given a function that says whether its caller has left.
        """
        if self._num_probes >= MAX_PROBES:
            raise Overloaded(f"{self._num_probes} videos wait to be read in this encoder: retry", retry_after_s=2.0)
        self._num_probes += 1
        is_over = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools["video"], call, is_over.is_set)
        finally:
            is_over.set()
            self._num_probes -= 1

    def _start(self, request: EncodeRequest, source: memoryview) -> _Flight:
        flight = _Flight(num_patches(request.expected_grid), len(source))
        # What is queued takes so long at the measured rate, and what it leads to is fetched and released afterwards.
        retry_after_s = max(1.0, self.queued_patches / max(self._runner.patches_per_s, 1.0))
        self._admit(flight, retry_after_s)
        self._store.reserve(request.key, self._bytes_of(request.expected_grid), retry_after_s)
        self._count(flight, 1)
        flight.task = asyncio.create_task(self._encode(flight, request, source), name="encode")
        self._flights[request.key] = flight
        flight.task.add_done_callback(lambda task: self._finish(request.key, flight))
        return flight

    def _admit(self, flight: _Flight, retry_after_s: float) -> None:
        """Refuse what exceeds the queue; an item that is larger than all of it is taken when it is alone."""
        limits = self._queue_limits
        if self.queued_patches and self.queued_patches + flight.patches > limits.max_patches:
            raise Overloaded(
                f"{self.queued_patches} patches wait in this encoder, the limit is {limits.max_patches}: retry",
                retry_after_s=retry_after_s,
            )
        if self.queued_bytes and self.queued_bytes + flight.num_bytes > limits.max_bytes:
            raise Overloaded(
                f"{self.queued_bytes} bytes of media wait in this encoder, the limit is {limits.max_bytes}: retry",
                retry_after_s=retry_after_s,
            )

    def _count(self, flight: _Flight, sign: int) -> None:
        self.queued_patches += sign * flight.patches
        self.queued_bytes += sign * flight.num_bytes
        QUEUED_PATCHES.set(self.queued_patches)
        QUEUED_BYTES.set(self.queued_bytes)

    def _leave(self, key: str, flight: _Flight, request_id: str) -> None:
        """A request no longer waits. A flight that stops is forgotten at once, so that nobody joins it any more."""
        flight.waiters.remove(request_id)
        if not flight.waiters and not flight.task.done():
            flight.is_over.set()
            flight.task.cancel()
            self._forget(key, flight)

    def _finish(self, key: str, flight: _Flight) -> None:
        flight.is_over.set()
        self._count(flight, -1)
        is_last = self._flights.get(key) in (flight, None)
        self._forget(key, flight)
        has_failed = flight.task.cancelled() or flight.task.exception() is not None
        if is_last:  # else another flight for the key has begun, whose room and claim these are now
            self._store.unreserve(key)
            if has_failed and self._share is not None:
                self._share.give_up(key)

    def _forget(self, key: str, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _encode(self, flight: _Flight, request: EncodeRequest, source: memoryview) -> Encoded:
        began = time.monotonic()
        async with self._gates[request.modality].room_for(flight.patches):
            self._note_prepared()
            prepared, elsewhere = await self._prepare_and_claim(flight, request, source)
            if prepared is None:
                return Encoded(elsewhere=elsewhere)
            preprocess_s = time.monotonic() - began
            item = TowerItem(request.key, prepared.grid_thw, prepared.pixel_values)
            del prepared
            embedding, times = await self.batches.embed(item)
            del item
        self._note_prepared()
        self._hold(flight, embedding)
        return Encoded(times=EncodeTimes(queue_s=times.queue_s, preprocess_s=preprocess_s, forward_s=times.forward_s))

    def _hold(self, flight: _Flight, embedding: HeldEmbedding) -> None:
        """Put an embedding and lease it, before anything else may be put here and evict it."""
        self._store.put(embedding)
        key = embedding.header.key
        for request_id in flight.waiters:
            self._store.lease(key, request_id, time.monotonic())
        if self._share is not None:
            self._share.offer(key)

    def _note_prepared(self) -> None:
        PREPARED_PATCHES.set(sum(gate.inside for gate in self._gates.values()))

    async def _prepare_and_claim(
        self, flight: _Flight, request: EncodeRequest, source: memoryview
    ) -> tuple[PreparedMedia | None, str | None]:
        """An item's patches; or None and the place where it is already, which Redis tells meanwhile."""
        preparing = asyncio.create_task(self._prepare_in_pool(flight, request, source))
        try:
            if self._share is not None:
                expected = self._expected_of(request.key, request.expected_grid)
                place = await self._share.claim(expected, take_over=request.take_over)
                if place is not None:
                    return None, place
            return await preparing, None
        finally:
            if not preparing.done():
                flight.is_over.set()
                preparing.cancel()
            await asyncio.wait({preparing})
            if not preparing.cancelled():
                preparing.exception()  # seen by whoever waits, or by nobody when the item is elsewhere

    async def _prepare_in_pool(self, flight: _Flight, request: EncodeRequest, source: memoryview) -> PreparedMedia:
        began = time.monotonic()
        pool, modality = self._pools[request.modality], request.modality
        call = asyncio.get_running_loop().run_in_executor(pool, self._prepare, request, source, flight.is_over.is_set)
        if modality == "image":
            with self.batches.expecting():
                prepared = await call
        else:
            prepared = await call
        PREPROCESS_SECONDS.observe(time.monotonic() - began)
        return prepared
