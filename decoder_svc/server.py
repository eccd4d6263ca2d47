"""The decoder's sockets and the way between them, the inbox of embeddings and the engine.

Owns which gateway asked for which request. Gateways' messages become engine commands; the engine's events become one
message per gateway and step. A gateway that leaves takes its requests with it, and is told so in case it is still
there. Runs on the event loop; knows nothing of tensors' content, blocks or scheduling.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import structlog
from torch import Tensor

from common.errors import ModelFailure, Overloaded, PeerUnreachable, ProtocolError, TandemError
from common.link import AttentiveClock
from common.messages import (
    AnyMessage,
    Cancel,
    GenerateRequest,
    Hello,
    LoadReport,
    MediaAt,
    MediaFailed,
    MediaNeeded,
    SequenceTokens,
    TokenBatch,
)
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.transport import Received, Router
from decoder_svc.embedding_fetch import EncoderFetcher
from decoder_svc.embedding_inbox import EmbeddingInbox
from decoder_svc.engine import Engine, Event
from decoder_svc.engine_thread import EngineThread
from decoder_svc.grammar import Grammar, GrammarCompiler
from decoder_svc.media_needs import MediaBudget, MediaWanted
from decoder_svc.reports import without_tokens

logger = structlog.get_logger(__name__)

REQUESTS = Counter("tandem_decoder_requests_total", "Requests by how they ended", ["outcome"])
ACTIVE_REQUESTS = Gauge("tandem_decoder_active_requests", "Requests that have not ended")
PHASE_SECONDS = Histogram(
    "tandem_decoder_phase_seconds",
    "Time that finished sequences spent: queued, waiting for media meanwhile, in prefill and decoding",
    ["phase"],
    buckets=SECONDS_BUCKETS,
)
COMPILE_SECONDS = Histogram("tandem_decoder_grammar_seconds", "Time to compile a grammar", buckets=SECONDS_BUCKETS)
LEAKED_FETCHES = Gauge("tandem_decoder_leaked_fetches", "Embeddings that are fetched although no request is there")
REPORT_EVERY_S = 0.5
GATEWAY_LIVENESS_S = 10.0
STALLED_AFTER_S = 300.0
MAX_UNTOLD_PEERS = 256
MAX_COMPILING = 256
FLUSH_S = 0.2  # for what was sent last to leave this process


@dataclass
class _Active:
    """A request that has not ended: whose it is, and which of its choices are still wanted."""

    peer: bytes
    attempt: int
    open_choices: set[int]


class DecoderServer:
    """Serves gateways. The owner awaits `run`. It is the inbox's `Listener`."""

    def __init__(
        self,
        control: Router,
        fetcher: EncoderFetcher,
        engine: Engine,
        hello: Hello,
        *,
        grammars: GrammarCompiler | None = None,
        finish_within_s: float | None = None,
    ) -> None:
        """`finish_within_s` is how long a drain lets requests finish before it hands them over; None is for ever."""
        self._control = control
        self._fetcher = fetcher
        self._engine = engine
        self._thread = EngineThread(engine, self._from_engine)
        self._hello = msgspec.structs.replace(hello, is_ready=True)
        self._loop = asyncio.get_running_loop()
        self._clock = AttentiveClock(REPORT_EVERY_S)
        self._gateways: dict[bytes, float] = {}  # peers, and when they were last heard
        self._untold: OrderedDict[bytes, list[SequenceTokens]] = OrderedDict()  # what lost peers could not be told
        self._requests: dict[str, _Active] = {}
        self._grammars = grammars
        self._grammar_threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._compiling: set[asyncio.Task[None]] = set()
        self._finish_within_s = finish_within_s
        self._idle = asyncio.Event()
        self._idle.set()
        self.inbox: EmbeddingInbox

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._hello.is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether one step takes longer than any should."""
        began = self._thread.step_began
        return began is not None and time.monotonic() - began > STALLED_AFTER_S

    def hello(self) -> Hello:
        """What this decoder says of itself."""
        return self._hello

    async def run(self) -> None:
        """Serve until cancelled. Raises when the engine has died: a process that cannot work must not say it can."""
        self._thread.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve())
                tasks.create_task(self._keep_house())
                tasks.create_task(self._fetcher.run())
        finally:
            await self.inbox.close()
            self._grammar_threads.shutdown(wait=False, cancel_futures=True)
            self._thread.stop()

    async def drain(self) -> None:
        """Refuse new work and finish what runs; what does not finish in time goes on at another decoder."""
        self._hello = msgspec.structs.replace(self._hello, is_draining=True)
        self._report()
        try:
            async with asyncio.timeout(self._finish_within_s):
                await self._idle.wait()
        except TimeoutError:
            self._hand_over()
            await asyncio.sleep(FLUSH_S)

    def _hand_over(self) -> None:
        """Tell gateways to go on elsewhere, each with the tokens that it has."""
        logger.info("handing over what runs", requests=len(self._requests))
        for request_id, active in list(self._requests.items()):
            self._control.try_send(
                active.peer, TokenBatch(sequences=[without_tokens(request_id, active.attempt, "hand_over")])
            )
            self._end(request_id, "handed_over")

    # What gateways say.

    async def _serve(self) -> None:
        while True:
            received = await self._control.receive()
            if received.peer in self._gateways:
                self._gateways[received.peer] = self._clock.now
            match received.message:
                case Hello():
                    self._greet(received)
                case GenerateRequest() as request:
                    self._generate(received.peer, request)
                case MediaAt(request_id=request_id, key=key, source=source):
                    self.inbox.locate(request_id, key, source)
                case MediaFailed(request_id=request_id):
                    self._end(request_id, "media_failed")
                case Cancel(request_id=request_id, choice=None):
                    self._end(request_id, "cancelled")
                case Cancel(request_id=request_id, choice=choice):
                    self._end_choice(request_id, choice)
                case _:
                    error = ProtocolError(f"a decoder does not accept {type(received.message).__name__}")
                    self._control.refuse(received, error)

    def _greet(self, received: Received) -> None:
        assert isinstance(received.message, Hello)
        if received.message.model == self._hello.model:
            self._gateways[received.peer] = self._clock.now
            if self._control.try_send(received.peer, self._hello):
                self._tell_dropped(received.peer, self._untold.pop(received.peer, []))
        else:
            error = ProtocolError(f"this decoder serves {self._hello.model!r}, not {received.message.model!r}")
            self._control.refuse(received, error)

    def _generate(self, peer: bytes, request: GenerateRequest) -> None:
        try:
            if self.is_draining:
                raise Overloaded("this decoder is shutting down: ask another one", retry_after_s=1.0)
            if request.model != self._hello.model:
                raise ProtocolError(f"this decoder serves {self._hello.model!r}, not {request.model!r}")
            if request.media and request.fingerprint is None:
                raise ProtocolError("a request with media names the fingerprint of the encoders that made them")
            if len(self._compiling) >= MAX_COMPILING:
                raise Overloaded(
                    f"{MAX_COMPILING} requests wait for their grammars: try again later", retry_after_s=1.0
                )
        except TandemError as error:
            self._refuse(peer, request, error)
            return
        self._gateways[peer] = self._clock.now  # whoever asks is watched, also one that said no Hello since we lost it
        open_choices = set(range(request.sampling.n)) - set(request.finished)
        active = self._requests[request.request_id] = _Active(peer, request.attempt, open_choices)
        self._idle.clear()
        ACTIVE_REQUESTS.set(len(self._requests))
        self.inbox.expect(request)
        if request.sampling.grammar_kind is None or self._grammars is None:
            self._thread.submit(lambda engine: engine.add(request, time.monotonic()))
        else:
            task = asyncio.create_task(self._compile(request, active, self._grammars), name="compile-grammar")
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)

    async def _compile(self, request: GenerateRequest, active: _Active, grammars: GrammarCompiler) -> None:
        """Queue a request once its grammar is compiled: neither the event loop nor the engine waits for that."""
        began = time.monotonic()
        sampling = request.sampling
        assert sampling.grammar_kind is not None
        grammar: Grammar | TandemError
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(
                self._grammar_threads, grammars.compile, sampling.grammar_kind, sampling.grammar
            )
        except TandemError as error:
            grammar = error
        except Exception as exc:  # the process lives: this request alone is answered so
            logger.error("a grammar could not be compiled", exc_info=exc, request_id=request.request_id)
            grammar = ModelFailure("an internal error kept the grammar from being compiled")
        COMPILE_SECONDS.observe(time.monotonic() - began)
        if self._requests.get(request.request_id) is not active:
            return  # cancelled meanwhile, or asked anew
        if isinstance(grammar, TandemError):
            self._publish([without_tokens(request.request_id, request.attempt, "error", grammar)])
            return
        compiled, closed = grammar, sorted(set(range(sampling.n)) - active.open_choices)
        still_wanted = msgspec.structs.replace(request, finished=closed)
        self._thread.submit(lambda engine: engine.add(still_wanted, began, compiled))

    def _refuse(self, peer: bytes, request: GenerateRequest, error: TandemError) -> None:
        REQUESTS.labels("refused").inc()
        refusal = without_tokens(request.request_id, request.attempt, "error", error)
        self._control.try_send(peer, TokenBatch(sequences=[refusal]))

    def _end(self, request_id: str, outcome: str) -> None:
        """A request is over for its gateway: nothing of it stays."""
        if self._requests.pop(request_id, None) is None:
            return
        REQUESTS.labels(outcome).inc()
        self._close_request(request_id)
        self._thread.submit(lambda engine: engine.cancel(request_id))

    def _end_choice(self, request_id: str, choice: int | None) -> None:
        """One choice is over for its gateway; with the last one, so is the request."""
        active = self._requests.get(request_id)
        if active is None or choice not in active.open_choices:
            return
        active.open_choices.discard(choice)
        if not active.open_choices:
            self._end(request_id, "cancelled")
        else:
            self._thread.submit(lambda engine: engine.cancel(request_id, choice))

    def _close_request(self, request_id: str) -> None:
        self.inbox.forget(request_id)
        ACTIVE_REQUESTS.set(len(self._requests))
        if not self._requests:
            self._idle.set()

    # What the inbox says.

    def delivered(self, key: str, embedding: Tensor) -> None:
        """An embedding arrived, checked."""
        self._thread.submit(lambda engine: engine.add_embedding(key, embedding, time.monotonic()))

    def source_failed(self, request_id: str, key: str, source: str) -> None:
        """Ask the gateway for another source."""
        if active := self._requests.get(request_id):
            needed = MediaNeeded(request_id=request_id, attempt=active.attempt, keys=[key], failed_source=source)
            self._send(active.peer, needed)

    def unusable(self, request_id: str, error: TandemError) -> None:
        """End a request whose item can never be used."""
        self._thread.submit(lambda engine: engine.fail(request_id, error))

    # What the engine says.

    def _from_engine(self, events: Sequence[Event]) -> None:
        """Called in the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._publish, events)
        except RuntimeError:
            logger.info("the event loop is gone; the engine's last events are dropped", count=len(events))

    def _publish(self, events: Sequence[Event]) -> None:
        batches: dict[bytes, list[SequenceTokens]] = {}
        for event in events:
            if isinstance(event, MediaBudget):
                self.inbox.released(event.released_bytes, event.first_in_need)
                continue
            active = self._requests.get(event.request_id)
            if active is None or active.attempt != event.attempt:
                continue  # cancelled meanwhile
            peer = active.peer
            if isinstance(event, MediaWanted):
                self._send(peer, MediaNeeded(request_id=event.request_id, attempt=event.attempt, keys=event.keys))
            elif event.error is not None or event.choice in active.open_choices:
                if event.prompt_logprobs is not None:
                    self._send(peer, TokenBatch(sequences=[event]))  # a large one, in a message of its own
                else:
                    batches.setdefault(peer, []).append(event)
                self._note_finish(active, event)
        for peer, sequences in batches.items():
            self._send(peer, TokenBatch(sequences=sequences))

    def _note_finish(self, active: _Active, event: SequenceTokens) -> None:
        if event.finish_reason is None:
            return
        if event.times is not None:
            PHASE_SECONDS.labels("queue").observe(event.times.queue_s)
            PHASE_SECONDS.labels("media_wait").observe(event.times.media_wait_s)
            PHASE_SECONDS.labels("prefill").observe(event.times.prefill_s)
            PHASE_SECONDS.labels("decode").observe(event.times.decode_s)
        active.open_choices.discard(event.choice)
        if event.error is None and active.open_choices:
            return
        del self._requests[event.request_id]
        REQUESTS.labels(event.finish_reason).inc()
        self._close_request(event.request_id)

    def _send(self, peer: bytes, message: AnyMessage) -> None:
        try:
            self._control.send(peer, message)
        except PeerUnreachable:
            self._lose_gateway(peer, "it does not read what it is sent")

    def _lose_gateway(self, peer: bytes, reason: str) -> None:
        lost = {request_id: active.attempt for request_id, active in self._requests.items() if active.peer == peer}
        self._gateways.pop(peer, None)
        logger.warning("a gateway is gone", reason=reason, dropped_requests=len(lost))
        for request_id in lost:
            self._end(request_id, "gateway_gone")
        self._tell_dropped(peer, [without_tokens(*entry, "cancelled") for entry in lost.items()])

    def _tell_dropped(self, peer: bytes, dropped: list[SequenceTokens]) -> None:
        """A gateway that was only silent, or did not read, must learn that it has to ask anew: at its next Hello."""
        if dropped and not self._control.try_send(peer, TokenBatch(sequences=dropped)):
            self._untold[peer] = self._untold.get(peer, []) + dropped
            if len(self._untold) > MAX_UNTOLD_PEERS:  # connections that are gone for good say no Hello
                self._untold.popitem(last=False)

    async def _keep_house(self) -> None:
        while True:
            self._thread.check()
            now = self._clock.look()
            for peer in [peer for peer, heard in self._gateways.items() if now - heard > GATEWAY_LIVENESS_S]:
                self._lose_gateway(peer, f"not heard for {GATEWAY_LIVENESS_S} s")
            self._report()
            self._thread.submit(lambda engine: engine.check_idle())
            self._thread.submit(lambda engine: engine.measure_backlog())
            LEAKED_FETCHES.set(0 if self._requests else self.inbox.num_waiting)
            await asyncio.sleep(REPORT_EVERY_S)

    def _report(self) -> None:
        scheduler, blocks = self._engine.scheduler, self._engine.blocks  # counts only: read across threads is fine
        report = LoadReport(
            instance_id=self._hello.instance_id,
            queue_s=self._engine.backlog_s,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            kv_used_tokens=blocks.num_used * blocks.block_size,
            kv_total_tokens=blocks.num_blocks * blocks.block_size,
            bytes_in_flight=self.inbox.bytes_in_use,
            is_draining=self.is_draining,
        )
        for peer in list(self._gateways):
            if not self._control.try_send(peer, report):
                self._lose_gateway(peer, "its connection broke")
