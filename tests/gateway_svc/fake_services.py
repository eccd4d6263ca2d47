"""Encoders, decoders and a cache for the gateway's tests: real sockets, and answers as the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from common.embedding import ExpectedEmbedding, FleetFacts
from common.embedding_cache import Located
from common.errors import TandemError
from common.members import Member, StaticMembers
from common.messages import (
    AnyMessage,
    Cancel,
    EncodeReply,
    EncodeRequest,
    GenerateRequest,
    Hello,
    Limits,
    MediaAt,
    MediaNeeded,
    ProbeReply,
    ProbeRequest,
    Release,
    SequenceTokens,
    TokenBatch,
    VideoFacts,
)
from common.transport import Router
from common.wire import error_detail
from gateway_svc.routing.fleet import Fleet

FINGERPRINT = "f" * 64
FACTS = VideoFacts(grid=(1, 4, 4), frame_indices=[0, 1], timestamps=[0.5])


class Mailbox:
    """Messages that came, and a way to wait for some."""

    def __init__(self) -> None:
        self.messages: list[AnyMessage] = []
        self._changed = asyncio.Event()

    def put(self, message: AnyMessage) -> None:
        self.messages.append(message)
        self._changed.set()

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def wait(self, kind: type[Any], count: int = 1) -> Any:
        """The `count`-th message of a kind."""
        async with asyncio.timeout(10):
            while len(self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)[count - 1]


class FakeDecoder:
    """A decoder that says what the test tells it to."""

    def __init__(self, context: zmq.asyncio.Context, name: str) -> None:
        self.name = name
        self.router = Router(context, "tcp://127.0.0.1:0", name="control")
        self.mailbox = Mailbox()
        self.is_draining = False
        self.model = "tiny"
        self._peer = b""

    async def run(self) -> None:
        while True:
            received = await self.router.receive()
            self._peer = received.peer
            if isinstance(received.message, Hello):
                self.router.try_send(received.peer, self.hello())
            else:
                self.mailbox.put(received.message)

    def hello(self) -> Hello:
        return Hello(
            role="decoder",
            instance_id=self.name,
            model=self.model,
            version="0",
            vocab_size=300,
            limits=Limits(max_model_len=100),
            is_ready=True,
            is_draining=self.is_draining,
        )

    def say(self, message: AnyMessage) -> None:
        self.router.send(self._peer, message)

    def say_hello(self) -> None:
        self.say(self.hello())

    async def request(self, count: int = 1) -> GenerateRequest:
        found: GenerateRequest = await self.mailbox.wait(GenerateRequest, count)
        return found

    def need(self, request: GenerateRequest, keys: Iterable[str] = (), failed_source: str | None = None) -> None:
        self.say(
            MediaNeeded(
                request_id=request.request_id, attempt=request.attempt, keys=list(keys), failed_source=failed_source
            )
        )

    def give(self, request: GenerateRequest, offset: int, tokens: list[int], choice: int = 0, **fields: Any) -> None:
        tokens_of_choice = SequenceTokens(
            **{
                "request_id": request.request_id,
                "attempt": request.attempt,
                "choice": choice,
                "offset": offset,
                "tokens": tokens,
                **fields,
            }
        )
        self.say(TokenBatch(sequences=[tokens_of_choice]))

    def fail(self, request: GenerateRequest, error: TandemError) -> None:
        self.give(request, 0, [], finish_reason="error", error=error_detail(error))

    def media_at(self) -> list[tuple[str, str]]:
        return [(message.key, message.source) for message in self.mailbox.of(MediaAt)]

    def die(self) -> None:
        self.router.close()


class FakeEncoder:
    """An encoder that holds everything at once, or does what `answer` says: an error, or None for silence."""

    def __init__(self, context: zmq.asyncio.Context, name: str, fingerprint: str = FINGERPRINT) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.model = "tiny"
        self.control = Router(context, "tcp://127.0.0.1:0", name="control")
        self.data = Router(context, "tcp://127.0.0.1:0", name="data", max_payload_bytes=1 << 20)
        self.mailbox = Mailbox()
        self.answer: Callable[[str], TandemError | bool | None] = lambda key: True
        self._waiting: list[tuple[bytes, EncodeRequest]] = []

    @property
    def member(self) -> Member:
        return Member((self.control.endpoint, self.data.endpoint))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve(self.control))
            tasks.create_task(self._serve(self.data))

    async def _serve(self, router: Router) -> None:
        while True:
            received = await router.receive()
            if isinstance(received.message, Hello):
                router.try_send(received.peer, self.hello())
                continue
            self.mailbox.put(received.message)
            if isinstance(received.message, EncodeRequest | ProbeRequest):
                self._reply(router, received.peer, received.message)

    def _reply(self, router: Router, peer: bytes, request: EncodeRequest | ProbeRequest) -> None:
        answer = self.answer(request.key)
        if answer is None:
            if isinstance(request, EncodeRequest):
                self._waiting.append((peer, request))
            return
        error = error_detail(answer) if isinstance(answer, TandemError) else None
        names: dict[str, Any] = {"request_id": request.request_id, "key": request.key, "error": error}
        if isinstance(request, ProbeRequest):
            router.send(peer, ProbeReply(**names, facts=None if error else FACTS))
        else:
            router.send(peer, EncodeReply(**names))

    def finish_waiting(self) -> None:
        """Answer all that was met with silence."""
        for peer, request in self._waiting:
            self.data.send(peer, EncodeReply(request_id=request.request_id, key=request.key))
        self._waiting.clear()

    def hello(self) -> Hello:
        return Hello(
            role="encoder",
            instance_id=self.name,
            model=self.model,
            version="0",
            fingerprint=self.fingerprint,
            wire_dtype="float32",
            is_ready=True,
        )

    async def is_free(self) -> None:
        """Return when the leases of a request have ended here."""
        await self.mailbox.wait(Release)

    async def is_cancelled(self) -> None:
        await self.mailbox.wait(Cancel)

    def die(self) -> None:
        self.control.close()
        self.data.close()


@dataclass
class FakeCache:
    """Redis as the gateway sees it."""

    held: set[str] = field(default_factory=set)
    facts: dict[str, VideoFacts] = field(default_factory=dict)
    fleet: FleetFacts | None = None
    num_puts: int = 0
    is_available: bool = True

    async def locate(self, expected: list[ExpectedEmbedding]) -> Located:
        return Located(self.held & {item.key for item in expected})

    async def get_video_facts(self, key: str) -> VideoFacts | None:
        return self.facts.get(key)

    async def put_video_facts(self, key: str, facts: VideoFacts) -> None:
        self.facts[key] = facts

    async def get_fleet(self, model: str) -> FleetFacts | None:
        return self.fleet

    async def put_fleet(self, model: str, facts: FleetFacts) -> None:
        self.fleet = facts
        self.num_puts += 1


@dataclass
class FakeFleet:
    """A gateway's real `Fleet` among fakes."""

    fleet: Fleet
    decoders: list[FakeDecoder]
    encoders: list[FakeEncoder]
    cache: FakeCache

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (links have no event for all that a test may wait for)
                await asyncio.sleep(0.005)

    async def asked(self, count: int = 1) -> tuple[FakeDecoder, GenerateRequest]:
        """The decoder that got the `count`-th attempt of all, and the attempt."""
        await self.until(lambda: sum(len(d.mailbox.of(GenerateRequest)) for d in self.decoders) >= count)
        attempts = [(d, request) for d in self.decoders for request in d.mailbox.of(GenerateRequest)]
        return max(attempts, key=lambda entry: entry[1].attempt)


@asynccontextmanager
async def fake_fleet(
    *, num_decoders: int = 1, num_encoders: int = 0, encoder_wait_s: float = 5.0, cache: FakeCache | None = None
) -> AsyncIterator[FakeFleet]:
    """A fleet that is connected to all its fakes."""
    context = zmq.asyncio.Context()
    decoders = [FakeDecoder(context, f"decoder-{n}") for n in range(num_decoders)]
    encoders = [FakeEncoder(context, f"encoder-{n}") for n in range(num_encoders)]
    cache = cache or FakeCache()
    fleet = Fleet(
        context,
        model="tiny",
        instance_id="gateway-1",
        encoder_source=StaticMembers([encoder.member for encoder in encoders]),
        decoder_source=StaticMembers([Member((decoder.router.endpoint,)) for decoder in decoders]),
        cache=cache,  # type: ignore[arg-type]
        keys=None,
        encoder_wait_s=encoder_wait_s,
    )
    tasks = [asyncio.create_task(service.run()) for service in (*decoders, *encoders, fleet)]
    world = FakeFleet(fleet, decoders, encoders, cache)
    try:
        await world.until(
            lambda: len(fleet.decoders.ready) == num_decoders and len(fleet.encoders.ready()) == num_encoders
        )
        yield world
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
