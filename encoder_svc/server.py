"""The encoder's sockets: who asks for what, and who gets the answer.

Owns the control and the data router and turns messages into calls of the pipeline, the store and the shipping. Each
`EncodeRequest` and `ProbeRequest` is a task of its own with a deadline, and each is answered exactly once. Runs on the
event loop; knows nothing of pixels or tensors.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass

import msgspec
import structlog

from common.errors import Cancelled, DeadlineExceeded, ModelFailure, Overloaded, ProtocolError, TandemError
from common.messages import (
    Cancel,
    EncodeReply,
    EncodeRequest,
    ErrorDetail,
    Fetch,
    FetchCredit,
    Hello,
    LoadReport,
    ProbeReply,
    ProbeRequest,
    Release,
    VideoFacts,
)
from common.metrics import Counter, Gauge
from common.rate import seconds_for
from common.transport import Received, Router
from common.wire import error_detail
from encoder_svc.embedding_store import EmbeddingStore
from encoder_svc.pipeline import EncodePipeline
from encoder_svc.runner import TowerRunner
from encoder_svc.shipping import Shipping

logger = structlog.get_logger(__name__)

HELD_BYTES = Gauge("tandem_encoder_held_bytes", "Bytes of embeddings in memory")
LEASES = Gauge("tandem_encoder_leases", "Leases that have not ended")
UTILISATION = Gauge("tandem_encoder_compute_utilisation", "Share of the last seconds that the compute thread worked")
ERRORS = Counter("tandem_encoder_errors_total", "Items and probes answered with an error", ["code"])
REPORT_EVERY_S = 0.5
HAND_OVER_POLL_S = 0.02
HAND_OVER_S = 5.0  # a drain waits so long for decoders to fetch what was promised to them, and Redis has too
MAX_REMEMBERED_CANCELS = 10_000


@dataclass(frozen=True)
class EncoderParts:
    """What the server puts together."""

    control: Router
    data: Router
    pipeline: EncodePipeline
    store: EmbeddingStore
    runner: TowerRunner
    shipping: Shipping
    probe_video: Callable[[ProbeRequest, memoryview], Awaitable[VideoFacts]]


class EncoderServer:
    """Serves gateways and decoders. The owner awaits `run`."""

    def __init__(self, parts: EncoderParts, hello: Hello) -> None:
        self._parts = parts
        self._hello = replace_hello(hello, is_ready=True)
        self._gateways: dict[bytes, float] = {}  # control peers and when they were last heard
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._busy_at = (time.monotonic(), 0.0)  # a moment, and how long the compute thread had worked by then
        HELD_BYTES.set_function(lambda: parts.store.held_bytes)
        LEASES.set_function(lambda: parts.store.num_leases)

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._hello.is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether the compute thread makes no progress for longer than the largest legal batch takes."""
        return self._parts.pipeline.batches.is_stalled(time.monotonic())

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._parts.pipeline.run())
                tasks.create_task(self._serve_control())
                tasks.create_task(self._serve_data())
                tasks.create_task(self._keep_house())
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._parts.pipeline.close()

    async def drain(self) -> None:
        """Refuse new work, finish what runs, hand what is held to Redis, and keep what only this encoder has.

        Returns when no request needs what is held here. `common.service` bounds how long that may take.
        """
        self._hello = replace_hello(self._hello, is_draining=True)
        self._report()
        await self._parts.pipeline.drained()
        while self._running:
            await asyncio.wait(set(self._running))
        hand_over_until = time.monotonic() + HAND_OVER_S
        while self._is_needed(is_time_left=time.monotonic() < hand_over_until):  # noqa: ASYNC110
            await asyncio.sleep(HAND_OVER_POLL_S)

    def _is_needed(self, *, is_time_left: bool) -> bool:
        """Whether a decoder is fetching what is held here, or will: what Redis has too is kept for a short time only,
        and what nobody else has as long as there is a gateway whose request it may be."""
        store = self._parts.store
        if self._parts.shipping.bytes_in_flight > 0 or (is_time_left and store.num_leases > 0):
            return True
        return bool(self._gateways) and store.num_leases_only_here > 0

    async def _serve_control(self) -> None:
        while True:
            received = await self._parts.control.receive()
            match received.message:
                case Hello():
                    if self._greet(self._parts.control, received):
                        self._gateways[received.peer] = time.monotonic()
                case Cancel(request_id=request_id):
                    self._cancel(request_id)
                case Release(request_id=request_id):
                    self._parts.store.release(request_id)
                case _:
                    self._refuse(self._parts.control, received)

    async def _serve_data(self) -> None:
        while True:
            received = await self._parts.data.receive()
            match received.message:
                case Hello():
                    self._greet(self._parts.data, received)
                case EncodeRequest() as request if len(received.payload) == 1:
                    self._spawn(request.request_id, self._encode(received.peer, request, received.payload[0]))
                case ProbeRequest() as request if len(received.payload) == 1:
                    self._spawn(request.request_id, self._probe(received.peer, request, received.payload[0]))
                case Fetch() as fetch:
                    self._parts.shipping.begin(received.peer, fetch)
                case FetchCredit() as credit:
                    self._parts.shipping.renew(received.peer, credit)
                case _:
                    self._refuse(self._parts.data, received)

    def _greet(self, router: Router, received: Received) -> bool:
        assert isinstance(received.message, Hello)
        if received.message.model != self._hello.model:
            error = ProtocolError(f"this encoder serves {self._hello.model!r}, not {received.message.model!r}")
            router.refuse(received, error)
            return False
        return router.try_send(received.peer, self._hello)

    def _refuse(self, router: Router, received: Received) -> None:
        name = type(received.message).__name__
        error = ProtocolError(f"an encoder does not accept {name} with {len(received.payload)} payload frames here")
        router.refuse(received, error)

    def _spawn(self, request_id: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        self._tasks.setdefault(request_id, set()).add(task)
        task.add_done_callback(lambda task: self._forget(request_id, task))

    def _forget(self, request_id: str, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        tasks = self._tasks[request_id]
        tasks.discard(task)
        if not tasks:
            del self._tasks[request_id]

    def _cancel(self, request_id: str) -> None:
        """Stop a request's work, also work that arrives later: it travels on another socket than the Cancel."""
        self._cancelled[request_id] = None
        if len(self._cancelled) > MAX_REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        for task in self._tasks.get(request_id, ()):
            task.cancel()
        self._parts.store.release(request_id)

    async def _encode(self, peer: bytes, request: EncodeRequest, source: memoryview) -> None:
        reply = EncodeReply(request_id=request.request_id, key=request.key)
        try:
            self._admit(request.request_id)
            if request.fingerprint != self._hello.fingerprint:
                raise ProtocolError("the request is for another vision tower than this encoder's (fingerprint differs)")
            async with _deadline(request.time_left_s):
                encoded = await self._parts.pipeline.encode(request, source)
            held = self._parts.store.get(request.key)
            reply = msgspec.structs.replace(
                reply,
                was_held=encoded.was_held,
                times=encoded.times,
                num_bytes=held.header.num_bytes if held is not None else 0,
                elsewhere=encoded.elsewhere,
            )
        except Exception as exc:  # whatever one item does, the gateway gets an answer
            reply = msgspec.structs.replace(reply, error=_answer(exc, request.request_id))
        self._parts.data.try_send(peer, reply)

    async def _probe(self, peer: bytes, request: ProbeRequest, source: memoryview) -> None:
        reply = ProbeReply(request_id=request.request_id, key=request.key)
        try:
            self._admit(request.request_id)
            async with _deadline(request.time_left_s):
                reply = msgspec.structs.replace(reply, facts=await self._parts.probe_video(request, source))
        except Exception as exc:  # whatever one video does, the gateway gets an answer
            reply = msgspec.structs.replace(reply, error=_answer(exc, request.request_id))
        self._parts.data.try_send(peer, reply)

    def _admit(self, request_id: str) -> None:
        if request_id in self._cancelled:
            raise Cancelled("the request was cancelled")
        if self.is_draining:
            raise Overloaded("this encoder is shutting down: ask another one", retry_after_s=1.0)

    async def _keep_house(self) -> None:
        while True:
            now = time.monotonic()
            self._parts.store.expire(now)
            self._parts.shipping.expire(now)
            self._measure_utilisation(now)
            self._report()
            await asyncio.sleep(REPORT_EVERY_S)

    def _measure_utilisation(self, now: float) -> None:
        before, busy_before = self._busy_at
        busy_s = self._parts.pipeline.batches.busy_s_at(now)
        if now > before:
            UTILISATION.set(min(1.0, (busy_s - busy_before) / (now - before)))
        self._busy_at = (now, busy_s)

    def _report(self) -> None:
        pipeline, rate = self._parts.pipeline, self._parts.runner.patches_per_s
        report = LoadReport(
            instance_id=self._hello.instance_id,
            queue_s=seconds_for(pipeline.queued_patches, rate),
            patches_per_s=rate,
            running=pipeline.num_in_flight,
            bytes_in_flight=self._parts.shipping.bytes_in_flight,
            is_draining=self.is_draining,
        )
        for peer in list(self._gateways):
            if not self._parts.control.try_send(peer, report):
                del self._gateways[peer]


def replace_hello(hello: Hello, *, is_ready: bool | None = None, is_draining: bool | None = None) -> Hello:
    """A Hello with another state."""
    return msgspec.structs.replace(
        hello,
        is_ready=hello.is_ready if is_ready is None else is_ready,
        is_draining=hello.is_draining if is_draining is None else is_draining,
    )


def _answer(exc: Exception, request_id: str) -> ErrorDetail:
    """An exception as the gateway is told of it."""
    if not isinstance(exc, TandemError):
        logger.error("an item failed", request_id=request_id, exc_info=exc)
        exc = ModelFailure("the encoder failed on this item: report it with the request id")
    detail = error_detail(exc)
    ERRORS.labels(detail.code).inc()
    return detail


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout` that raises our error."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        raise DeadlineExceeded(f"the encoder did not finish within the {seconds:.1f} s left") from exc
