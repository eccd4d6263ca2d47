"""The decoders as a gateway sees them: who is there, and the messages of running requests.

Owns a connection to each decoder and knows which request runs where; each running request is told what its decoder
says. A decoder that goes away is told to its requests as `DecoderLost`. Runs on the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq.asyncio

from common.link import Link
from common.messages import AnyMessage, Cancel, GenerateRequest, Hello, MediaNeeded, Refused, SequenceTokens, TokenBatch
from common.transport import CurveKeys, Dealer
from gateway_svc.routing import least_loaded

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class DecoderLost:
    """The decoder of a request's attempt went away."""

    attempt: int


DecoderEvent = SequenceTokens | MediaNeeded | DecoderLost


@dataclass(eq=False)
class Run:
    """One attempt of a request on one decoder."""

    request_id: str
    attempt: int
    link: Link
    tell: Callable[[DecoderEvent], None]


class DecoderPool:
    """All decoders that were configured. The owner awaits `run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: Sequence[str],
        hello: Callable[[], Hello],
        *,
        keys: CurveKeys | None,
    ) -> None:
        self._runs: dict[str, Run] = {}
        self.links = [
            Link(
                Dealer(context, endpoint, name="decoder", keys=keys),
                hello,
                role="decoder",
                on_message=self._on_message,
                on_up=lambda link: self._changed(),
                on_down=self._on_down,
            )
            for endpoint in endpoints
        ]
        self.changed = asyncio.Event()
        self.last_hello: Hello | None = None

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for link in self.links:
                    tasks.create_task(link.run())
        finally:
            for link in self.links:
                link.close()

    @property
    def ready(self) -> list[Link]:
        """Decoders that accept requests."""
        return [link for link in self.links if link.is_ready]

    def pick(self, avoid: Sequence[Link]) -> Link | None:
        """The ready decoder with the least to do; one of `avoid` only when there is no other."""
        ready = self.ready
        return least_loaded([link for link in ready if link not in avoid] or ready, self._load)

    def begin(self, link: Link, request: GenerateRequest, tell: Callable[[DecoderEvent], None]) -> Run:
        """Send a request and have its events told from now on. Raises PeerUnreachable."""
        run = Run(request.request_id, request.attempt, link, tell)
        link.send(request)
        self._runs[run.request_id] = run
        return run

    def end(self, run: Run, *, is_finished: bool) -> None:
        """Stop listening; a run that has not finished is cancelled at its decoder, also at one that is away now."""
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
        if not is_finished:
            run.link.send_or_keep(Cancel(request_id=run.request_id))

    def _load(self, link: Link) -> float:
        """Own requests count at once, others' with the decoder's next report."""
        own = sum(1 for run in self._runs.values() if run.link is link)
        reported = link.load.waiting + link.load.running if link.load is not None else 0
        return max(own, reported)

    def _on_message(self, link: Link, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        if isinstance(message, TokenBatch):
            for tokens in message.sequences:
                self._route(link, tokens)
        elif isinstance(message, MediaNeeded):
            self._route(link, message)
        elif isinstance(message, Refused):
            self._refused(link, message)
        else:
            logger.warning("a decoder sent an unexpected message", message=type(message).__name__)

    def _route(self, link: Link, event: SequenceTokens | MediaNeeded) -> None:
        """Late messages of an older attempt, or of a request that is over, are dropped."""
        run = self._runs.get(event.request_id)
        if run is not None and run.link is link and run.attempt == event.attempt:
            run.tell(event)

    def _refused(self, link: Link, refused: Refused) -> None:
        """The decoder did not take a message of a request: it fails there, as if the decoder had said so itself."""
        run = self._runs.get(refused.request_id or "")
        if run is not None and run.link is link:
            end = SequenceTokens(
                request_id=run.request_id,
                attempt=run.attempt,
                choice=0,
                offset=0,
                tokens=[],
                finish_reason="error",
                error=refused.error,
            )
            run.tell(end)

    def _on_down(self, link: Link, instance_id: str) -> None:
        for run in self._runs.values():
            if run.link is link:
                run.tell(DecoderLost(run.attempt))

    def _changed(self) -> None:
        self.last_hello = next((link.peer for link in self.links if link.peer is not None), self.last_hello)
        self.changed.set()
        self.changed = asyncio.Event()  # those who wait for the next change wait for a new event
