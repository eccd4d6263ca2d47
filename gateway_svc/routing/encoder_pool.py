"""The encoders as a gateway sees them: who is there, and requests to them that are answered or fail.

Owns a control and a data connection to each encoder, and the calls that wait for an answer. A call fails when its
encoder goes away. An encoder that keeps failing is left alone for a while, one of another model is not used. Which
encoder to ask, and what to do when it fails, is the caller's. Runs on the event loop.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import zmq.asyncio

from common.errors import EncoderUnavailable, ModelFailure, PeerUnreachable, ProtocolError, TandemError
from common.link import Link
from common.link_set import LinkSet
from common.members import Member
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
from gateway_svc.routing.changes import Changes
from gateway_svc.routing.ejection import Ejection
from gateway_svc.routing.encoder_demand import EncoderDemand
from gateway_svc.routing.own_model import OwnModel

logger = structlog.get_logger(__name__)

DEFAULT_PATCHES_PER_S = 1000.0  # of an encoder, while none has told what it measured

Call = EncodeRequest | ProbeRequest
Reply = EncodeReply | ProbeReply


@dataclass(eq=False)
class EncoderPeer:
    """The two connections to one encoder. `num_own_patches` are those that this gateway waits for there; the requests
    in `users` were sent there and may have leases."""

    control: Link
    data: Link
    num_own_patches: int = 0
    users: set[str] = field(default_factory=set)

    @property
    def hello(self) -> Hello | None:
        """What the encoder says of itself, when it can be asked: both connections are up and it accepts work."""
        control, data = self.control.peer, self.data.peer
        if control is None or data is None or control.instance_id != data.instance_id:
            return None
        return control if self.control.is_ready else None

    @property
    def patches_per_s(self) -> float:
        """What the encoder has measured of itself; 0 while it has not."""
        return self.control.load.patches_per_s if self.control.load is not None else 0.0


class Outgoing:
    """Bytes that are let go of when they are sent: their answer may take long."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self) -> bytes:
        """The bytes, once."""
        data, self._data = self._data, b""
        return data


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A call that waits for its answer. A request that moved to another decoder may ask for one item twice."""

    link: Link
    request_id: str
    key: str
    reply: "asyncio.Future[Reply]"


class EncoderPool:
    """All encoders that are members. The owner awaits `run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        hello: Callable[[], Hello],
        *,
        keys: CurveKeys | None,
        on_change: Callable[[], None],
        patches_per_s: float = DEFAULT_PATCHES_PER_S,
    ) -> None:
        """`patches_per_s` is what one encoder does, until one has told its own rate."""
        self._on_change = on_change
        self._patches_per_s = patches_per_s
        self._own = OwnModel(hello().model, "encoder")
        self._ejection = Ejection("encoder")
        self._calls: set[_Waiting] = set()
        self.demand = EncoderDemand()
        self.changes = Changes()

        def link(endpoint: str, name: str, on_up: Callable[[Link], None]) -> Link:
            return Link(
                Dealer(context, endpoint, name=name, keys=keys),
                hello,
                role="encoder",
                on_message=self._on_message,
                on_up=on_up,
                on_down=self._on_down,
            )

        def connect(member: Member) -> EncoderPeer:
            control, data = member.endpoints
            return EncoderPeer(
                link(control, "encoder-control", self._on_control_up),
                link(data, "encoder-data", lambda link: self._changed()),
            )

        self._members = LinkSet(
            connect,
            links_of=lambda peer: (peer.control, peer.data),
            is_busy=lambda peer: bool(peer.users) or self._has_calls(peer),
            on_change=self._changed,
        )

    @property
    def peers(self) -> list[EncoderPeer]:
        """Connections to all members."""
        return self._members.connections

    @property
    def patches_per_s(self) -> float:
        """The rate of one encoder: the median of those that have told theirs, or the last that was known."""
        if rates := [peer.patches_per_s for peer in self.ours if peer.patches_per_s]:
            self._patches_per_s = statistics.median(rates)
        return self._patches_per_s

    def queue_s(self, peer: EncoderPeer) -> float:
        """Seconds of work that wait at an encoder: what it says, and what it was sent and may not have said yet."""
        told_s = peer.control.load.queue_s if peer.control.load is not None else 0.0
        return max(told_s, peer.num_own_patches / (peer.patches_per_s or self.patches_per_s))

    def set_members(self, members: Sequence[Member]) -> None:
        """Who belongs to the tier now."""
        self._members.set_members(members)

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        await self._members.run()

    @property
    def ours(self) -> list[EncoderPeer]:
        """Encoders of our model that are up."""
        return [peer for peer in self.peers if self._own.is_served_by(peer.control)]

    @property
    def num_of_other_models(self) -> int:
        """Encoders that are up and serve something else."""
        return self._own.num_others(peer.control for peer in self.peers)

    def ready(self, fingerprint: str | None = None) -> dict[str, EncoderPeer]:
        """Encoders of our model that accept work, by instance id; only those of one fingerprint when it is given.

        Those that keep failing are there only when all others are not.
        """
        found = {
            hello.instance_id: peer
            for peer in self.ours
            if (hello := peer.hello) is not None and fingerprint in (None, hello.fingerprint)
        }
        now = time.monotonic()
        return {name: peer for name, peer in found.items() if self._ejection.allows(name, now)} or found

    async def call(self, peer: EncoderPeer, request: Call, source: Outgoing, timeout_s: float) -> Reply:
        """Ask one encoder and wait. Raises its error, EncoderUnavailable when it is lost, or TimeoutError."""
        name = peer.control.peer.instance_id if peer.control.peer is not None else ""
        num_patches = math.prod(request.expected_grid) if isinstance(request, EncodeRequest) else 0
        self._ejection.begin(name, time.monotonic())
        peer.num_own_patches += num_patches
        try:
            reply = await self._call(peer, request, source, timeout_s)
        except (TimeoutError, EncoderUnavailable, ProtocolError, ModelFailure):
            if self._ejection.record_failure(name, time.monotonic()):
                logger.error("an encoder keeps failing and is left alone for a while", encoder=name)
            raise
        except (TandemError, asyncio.CancelledError):
            self._ejection.end_trial(name)
            raise
        finally:
            peer.num_own_patches -= num_patches
        self._ejection.record_success(name)
        return reply

    async def _call(self, peer: EncoderPeer, request: Call, source: Outgoing, timeout_s: float) -> Reply:
        call = _Waiting(peer.data, request.request_id, request.key, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        try:
            peer.data.send(request, source.take())
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
        if isinstance(reply, EncodeReply) is not isinstance(request, EncodeRequest):
            raise ProtocolError("an encoder answered with another kind of message than it was asked for")
        return reply

    def release(self, request_id: str, peers: Sequence[EncoderPeer]) -> None:
        """End a request's leases, also at encoders that are away just now."""
        for peer in peers:
            peer.users.discard(request_id)
            peer.control.send_or_keep(Release(request_id=request_id))

    def _has_calls(self, peer: EncoderPeer) -> bool:
        return any(call.link is peer.data for call in self._calls)

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

    def _on_control_up(self, link: Link) -> None:
        self._own.greet(link)
        self._changed()

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
        self.changes.tell()
