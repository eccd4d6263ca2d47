"""One connection to one service, kept alive: Hello once it stands and until answered, then Hello as the heartbeat.

A link knows who is at the other end (`peer`), how busy it is (`load`), and whether it is up. It goes down when the
connection breaks, when nothing was heard for `liveness_s`, when what is heard cannot be read, or when another process
answers at the same address;
then `on_down` tells the owner which instance was lost, so that its work there can go elsewhere. What such an instance
must hear in the end is kept until it is back. Runs on the event loop; knows nothing of requests.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from common.errors import PeerUnreachable
from common.messages import AnyMessage, Hello, LoadReport, Refused, Role
from common.transport import Dealer, Payload

logger = structlog.get_logger(__name__)

HEARTBEAT_S = 0.5
LIVENESS_S = 5.0
SILENCE_WARNING_S = 20.0
MAX_KEPT = 10_000
MAX_MALFORMED = 3  # messages between two heartbeats: what they said is lost, and whoever waits for it waits in vain


class AttentiveClock:
    """Seconds in which our own event loop was there to hear: no peer is to blame for a time when it stood still.

    Whoever judges silence looks at it every `every_s`; what passes between two looks counts for twice that at most.
    """

    def __init__(self, every_s: float, time_s: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * every_s
        self._time_s = time_s
        self._looked_at = time_s()
        self.now = 0.0
        """The time of the last look."""

    def look(self) -> float:
        """The time now."""
        looked_at = self._time_s()
        self.now += min(looked_at - self._looked_at, self._most_s)
        self._looked_at = looked_at
        return self.now


class Link:
    """A `Dealer` with a life. The owner awaits `run` in a task and calls `close` afterwards."""

    def __init__(
        self,
        dealer: Dealer,
        hello: Callable[[], Hello],
        *,
        role: Role | None = None,
        on_message: Callable[["Link", AnyMessage, Sequence[memoryview]], None],
        on_up: Callable[["Link"], None] = lambda link: None,
        on_down: Callable[["Link", str], None] = lambda link, instance_id: None,
        heartbeat_s: float = HEARTBEAT_S,
        liveness_s: float = LIVENESS_S,
    ) -> None:
        self.endpoint = dealer.endpoint
        self.peer: Hello | None = None
        self.load: LoadReport | None = None
        self.refusal: str | None = None
        self.is_retiring = False
        """Whether its owner has other plans than to send new work there, such as when Kubernetes ends the pod."""
        self.was_leaving = False
        """Whether the instance that was lost last had said, or its owner had known, that it would leave."""
        self._dealer = dealer
        self._hello = hello
        self._role = role
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._heartbeat_s = heartbeat_s
        self._liveness_s = liveness_s
        self._clock = AttentiveClock(heartbeat_s)
        self._last_heard = 0.0
        self._num_malformed = 0  # up to the last heartbeat
        self._last_instance: str | None = None
        self._kept: deque[AnyMessage] = deque(maxlen=MAX_KEPT)  # for that instance, oldest first

    @property
    def is_up(self) -> bool:
        """Whether the peer has answered and is still heard."""
        return self.peer is not None

    @property
    def is_ready(self) -> bool:
        """Whether new work may be sent: up, ready and not draining, which a load report may say before a Hello."""
        if self.peer is None or self.is_retiring or (self.load is not None and self.load.is_draining):
            return False
        return self.peer.is_ready and not self.peer.is_draining

    def send(self, message: AnyMessage, *payload: Payload) -> None:
        """Send now or raise PeerUnreachable."""
        if self.peer is None:
            raise PeerUnreachable(f"the service at {self.endpoint} has not answered")
        self._send_kept()  # nothing overtakes what was to be sent before
        self._dealer.send(message, *payload)

    def try_send(self, message: AnyMessage) -> bool:
        """Send now; a peer that is gone is only reported. For messages that a dead peer does not need."""
        try:
            self.send(message)
        except PeerUnreachable:
            return False
        return True

    def send_or_keep(self, message: AnyMessage) -> None:
        """Send now, or once the instance that was here last is up again. For what would else stay there for nobody.

        Another instance has nothing of what the message is about. Of more than `MAX_KEPT` messages the oldest are lost.
        """
        if not self.try_send(message) and self._last_instance is not None:
            self._kept.append(message)

    async def run(self) -> None:
        """Serve the connection until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._heartbeat())
            tasks.create_task(self._watch_connection())

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    async def _receive(self) -> None:
        while True:
            received = await self._dealer.receive()
            self._last_heard = self._clock.now
            message = received.message
            if isinstance(message, Hello):
                self._accept_hello(message)
            elif isinstance(message, LoadReport):
                self.load = message
            elif isinstance(message, Refused):
                self._note_refusal(message)
                if message.request_id is not None:
                    self._on_message(self, message, received.payload)
            else:
                self._on_message(self, message, received.payload)

    def _note_refusal(self, refused: Refused) -> None:
        if self.refusal != refused.error.message:
            logger.warning("a peer refused our message", endpoint=self.endpoint, reason=refused.error.message)
        self.refusal = refused.error.message

    def _accept_hello(self, hello: Hello) -> None:
        if self._role is not None and hello.role != self._role:
            refusal = f"{self.endpoint} is the address of a {hello.role}, not of a {self._role}: correct the setting"
            if refusal != self.refusal:
                logger.error("another kind of service answers", endpoint=self.endpoint, reason=refusal)
            self.refusal = refusal
            return
        previous = self.peer
        if previous is not None and previous.instance_id != hello.instance_id:
            self._go_down("another process answers at its address")
            previous = None
        self.peer = hello
        self.refusal = None
        if hello.instance_id != self._last_instance:
            self._last_instance = hello.instance_id
            self._kept.clear()
        if previous is None:
            logger.info("peer is up", role=hello.role, peer=hello.instance_id, endpoint=self.endpoint)
        if previous is None or previous != hello:
            self._on_up(self)

    def _send_kept(self) -> None:
        while self._kept:
            self._dealer.send(self._kept[0])
            self._kept.popleft()

    async def _heartbeat(self) -> None:
        silent_until = time.monotonic() + SILENCE_WARNING_S
        while True:
            if self.peer is not None or self.refusal is not None:
                silent_until = time.monotonic() + SILENCE_WARNING_S
            elif time.monotonic() > silent_until:
                silent_until = float("inf")
                logger.warning(
                    "no answer from a configured peer: is it started, is the address right, does a firewall stand "
                    "between, and have both sides the same CURVE key, or none?",
                    endpoint=self.endpoint,
                    waited_s=SILENCE_WARNING_S,
                )
            if self._clock.look() - self._last_heard > self._liveness_s:
                self._go_down(f"not heard for {self._liveness_s} s")
            if self._dealer.num_malformed - self._num_malformed >= MAX_MALFORMED:
                self._go_down("its messages cannot be read")
            self._num_malformed = self._dealer.num_malformed
            self._greet()
            # Jitter, so that a fleet that started together does not ask together.
            await asyncio.sleep(self._heartbeat_s * random.uniform(0.8, 1.2))  # noqa: S311 (no secret)

    async def _watch_connection(self) -> None:
        while True:
            if await self._dealer.wait_for_change():
                self._greet()  # not only with the next heartbeat
            else:
                self._go_down("the connection broke")

    def _greet(self) -> None:
        with contextlib.suppress(PeerUnreachable):  # not connected yet; the heartbeat notices a lost peer
            self._dealer.send(self._hello())
            if self.peer is not None:
                self._send_kept()

    def _go_down(self, reason: str) -> None:
        if self.peer is None:
            return
        instance_id = self.peer.instance_id
        said_so = self.peer.is_draining or (self.load is not None and self.load.is_draining)
        self.was_leaving = said_so or self.is_retiring
        logger.warning("peer is down", peer=instance_id, endpoint=self.endpoint, reason=reason)
        self.peer = None
        self.load = None
        self._on_down(self, instance_id)
