"""The encoders as a gateway sees them: who is there, and requests to them that are answered or fail.

Owns a control and a data connection to each encoder, and the calls that wait for an answer. A call fails when its
encoder goes away. Which encoder to ask, and what to do when it fails, is the caller's. Runs on the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq.asyncio

from common.addresses import EncoderAddress
from common.errors import EncoderUnavailable, PeerUnreachable, TandemError
from common.link import Link
from common.messages import (
    AnyMessage,
    Cancel,
    EncodeReply,
    EncodeRequest,
    Hello,
    ProbeReply,
    ProbeRequest,
    Refused,
    Release,
)
from common.transport import CurveKeys, Dealer
from common.wire import error_from_detail

logger = structlog.get_logger(__name__)

Call = EncodeRequest | ProbeRequest
Reply = EncodeReply | ProbeReply


@dataclass(frozen=True)
class EncoderPeer:
    """The two connections to one encoder."""

    control: Link
    data: Link

    @property
    def hello(self) -> Hello | None:
        """What the encoder says of itself, when it can be asked: both connections are up and it accepts work."""
        control, data = self.control.peer, self.data.peer
        if control is None or data is None or control.instance_id != data.instance_id:
            return None
        return control if self.control.is_ready else None

    @property
    def queue_s(self) -> float:
        """Seconds of work that wait there."""
        return self.control.load.queue_s if self.control.load is not None else 0.0


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A call that waits for its answer. A request that moved to another decoder may ask for one item twice."""

    link: Link
    request_id: str
    key: str
    reply: "asyncio.Future[Reply]"


class EncoderPool:
    """All encoders that were configured. The owner awaits `run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        addresses: Sequence[EncoderAddress],
        hello: Callable[[], Hello],
        *,
        keys: CurveKeys | None,
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self._calls: set[_Waiting] = set()
        self.changed = asyncio.Event()

        def link(endpoint: str, name: str) -> Link:
            return Link(
                Dealer(context, endpoint, name=name, keys=keys),
                hello,
                role="encoder",
                on_message=self._on_message,
                on_up=lambda link: self._changed(),
                on_down=self._on_down,
            )

        self.peers = [
            EncoderPeer(link(address.control, "encoder-control"), link(address.data, "encoder-data"))
            for address in addresses
        ]

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        links = [link for peer in self.peers for link in (peer.control, peer.data)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for link in links:
                    tasks.create_task(link.run())
        finally:
            for link in links:
                link.close()

    def ready(self, fingerprint: str | None = None) -> dict[str, EncoderPeer]:
        """Encoders that accept work, by instance id; only those of one fingerprint when it is given."""
        found = {hello.instance_id: peer for peer in self.peers if (hello := peer.hello) is not None}
        if fingerprint is None:
            return found
        return {name: peer for name, peer in found.items() if peer.hello and peer.hello.fingerprint == fingerprint}

    async def call(self, peer: EncoderPeer, request: Call, source: bytes, timeout_s: float) -> Reply:
        """Ask one encoder and wait. Raises its error, EncoderUnavailable when it is lost, or TimeoutError."""
        call = _Waiting(peer.data, request.request_id, request.key, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        try:
            peer.data.send(request, source)
            async with asyncio.timeout(timeout_s):
                reply = await call.reply
        except PeerUnreachable as exc:
            raise EncoderUnavailable("the encoder is not connected") from exc
        except asyncio.CancelledError:
            # Only when the whole request ends: an encoder answers nothing more of a request that was cancelled.
            peer.control.send_or_keep(Cancel(request_id=request.request_id))
            raise
        finally:
            self._calls.discard(call)
        if reply.error is not None:
            raise error_from_detail(reply.error)
        return reply

    def release(self, request_id: str, peers: Sequence[EncoderPeer]) -> None:
        """End a request's leases, also at encoders that are away just now."""
        for peer in peers:
            peer.control.send_or_keep(Release(request_id=request_id))

    def _on_message(self, link: Link, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        if isinstance(message, Refused):
            self._fail(link, error_from_detail(message.error), request_id=message.request_id)
            return
        if not isinstance(message, EncodeReply | ProbeReply):
            logger.warning("an encoder sent an unexpected message", message=type(message).__name__)
            return
        for call in self._calls:
            is_asked = (call.link, call.request_id, call.key) == (link, message.request_id, message.key)
            if is_asked and not call.reply.done():
                call.reply.set_result(message)

    def _on_down(self, link: Link, instance_id: str) -> None:
        self._fail(link, EncoderUnavailable("the encoder went away while it worked on an item"))
        self._changed()

    def _fail(self, link: Link, error: TandemError, request_id: str | None = None) -> None:
        """End the calls on a connection: those of one request, or all."""
        for call in self._calls:
            if call.link is link and request_id in (None, call.request_id) and not call.reply.done():
                call.reply.set_exception(error)

    def _changed(self) -> None:
        self._on_change()
        self.changed.set()
        self.changed = asyncio.Event()  # those who wait for the next change wait for a new event
