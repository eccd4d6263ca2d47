"""Encoders that answer as a test tells them, on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import zmq.asyncio

from common.errors import TandemError
from common.members import Member
from common.messages import AnyMessage, Cancel, EncodeReply, EncodeRequest, Hello, LoadReport, ProbeReply, ProbeRequest
from common.transport import Router
from common.wire import error_detail
from gateway_svc.routing.encoder_pool import EncoderPool
from tests.common.sockets import background, eventually, hello

FINGERPRINT = "f" * 64
Answer = Callable[["FakeEncoder", EncodeRequest | ProbeRequest], TandemError | None]


def held(encoder: "FakeEncoder", request: EncodeRequest | ProbeRequest) -> None:
    """It is held now."""
    return


@dataclass
class FakeEncoder:
    """Two routers; `answer` says what comes of a request, and nothing is answered while `is_deaf`."""

    control: Router
    data: Router
    hello: Hello
    answer: Answer = held
    is_deaf: bool = False
    elsewhere: str | None = None  # where it says that items are, unless it is told to take over
    requests: list[EncodeRequest | ProbeRequest] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    controls: list[AnyMessage] = field(default_factory=list)
    asked_by: list[bytes] = field(default_factory=list)
    gateways: set[bytes] = field(default_factory=set)

    @property
    def member(self) -> Member:
        return Member((self.control.endpoint, self.data.endpoint))

    @property
    def cancelled(self) -> list[str]:
        return [message.request_id for message in self.controls if isinstance(message, Cancel)]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve(self.control))
            tasks.create_task(self._serve(self.data))

    def report(self, **fields: float) -> None:
        """Tell every gateway how busy it is."""
        for peer in self.gateways:
            self.control.try_send(
                peer, msgspec.structs.replace(LoadReport(instance_id=self.hello.instance_id), **fields)
            )

    def reply(self, index: int, error: TandemError | None = None, *, was_held: bool = False) -> None:
        """Answer a request."""
        request = self.requests[index]
        detail = error_detail(error) if error is not None else None
        message: AnyMessage
        if isinstance(request, EncodeRequest):
            message = EncodeReply(
                request_id=request.request_id,
                key=request.key,
                was_held=was_held,
                error=detail,
                elsewhere=None if request.take_over else self.elsewhere,
            )
        else:
            message = ProbeReply(request_id=request.request_id, key=request.key, error=detail)
        self.data.try_send(self.asked_by[index], message)

    async def _serve(self, router: Router) -> None:
        while True:
            received = await router.receive()
            message = received.message
            if isinstance(message, Hello):
                if router is self.control:
                    self.gateways.add(received.peer)
                router.try_send(received.peer, self.hello)
            elif isinstance(message, EncodeRequest | ProbeRequest):
                self.requests.append(message)
                self.sources.append(bytes(received.payload[0]))
                self.asked_by.append(received.peer)
                if not self.is_deaf:
                    self.reply(len(self.requests) - 1, self.answer(self, message))
            else:
                self.controls.append(message)

    def close(self) -> None:
        self.control.close()
        self.data.close()


def fake_encoders(context: zmq.asyncio.Context, folder: str, count: int) -> list[FakeEncoder]:
    """Encoders `e0`, `e1`, ... that are bound and do not run yet."""
    return [
        FakeEncoder(
            Router(context, f"ipc://{folder}/{index}c", name="test"),
            Router(context, f"ipc://{folder}/{index}d", name="test"),
            hello("encoder", f"e{index}", fingerprint=FINGERPRINT),
        )
        for index in range(count)
    ]


@contextlib.asynccontextmanager
async def pool_of(context: zmq.asyncio.Context, encoders: list[FakeEncoder]) -> AsyncIterator[EncoderPool]:
    """A pool that is connected to all of them."""
    pool = EncoderPool(
        context,
        lambda: hello("gateway", "g"),
        keys=None,
        on_change=lambda: None,
    )
    pool.set_members([encoder.member for encoder in encoders])
    async with background(pool.run(), *(encoder.run() for encoder in encoders)):
        await eventually(lambda: len(pool.ready()) == len(encoders))
        yield pool
