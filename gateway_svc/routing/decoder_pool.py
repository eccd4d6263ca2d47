"""The decoders as a gateway sees them: who is there, and the messages of running requests.

Owns a connection to each decoder and knows which request runs where and which prompts were sent where; each running
request is told what its decoder says. A decoder that goes away is told to its requests as `DecoderLost`; one that keeps
failing is left alone for a while, and one of another model is not used. Runs on the event loop.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import zmq.asyncio

from common.link import Link
from common.link_set import LinkSet
from common.members import Member
from common.messages import (
    AnyMessage,
    Cancel,
    GenerateRequest,
    Hello,
    LoadReport,
    MediaNeeded,
    Refused,
    SequenceTokens,
    TokenBatch,
)
from common.metrics import Counter as CounterMetric
from common.transport import CurveKeys, Dealer
from gateway_svc.routing.changes import Changes
from gateway_svc.routing.ejection import Ejection
from gateway_svc.routing.own_model import OwnModel
from gateway_svc.routing.placement import DecoderLoad, choose_decoder
from gateway_svc.routing.prefix_affinity import SeenPrefixes, prefix_hashes

logger = structlog.get_logger(__name__)

PREFIX_HITS = CounterMetric("tandem_gateway_prefix_hits_total", "Requests sent where their prompt's beginning was sent")


@dataclass(frozen=True)
class DecoderLost:
    """The decoder of a request's attempt went away; one that was draining has not failed."""

    attempt: int
    was_draining: bool = False


DecoderEvent = SequenceTokens | MediaNeeded | DecoderLost


@dataclass(eq=False)
class Run:
    """One attempt of a request on one decoder."""

    request_id: str
    attempt: int
    link: Link
    tell: Callable[[DecoderEvent], None]
    instance_id: str = ""


class DecoderPool:
    """All decoders that are members. The owner awaits `run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        hello: Callable[[], Hello],
        *,
        keys: CurveKeys | None,
    ) -> None:
        self._own = OwnModel(hello().model, "decoder")
        self._runs: dict[str, Run] = {}
        self._num_own: Counter[Link] = Counter()
        self._seen: dict[str, SeenPrefixes] = {}  # by instance
        self._hashes: tuple[str, list[bytes]] = ("", [])  # of the request that was asked about last
        self._ejection = Ejection("decoder")
        self._rng = random.Random()  # noqa: S311 (no secret)

        def connect(member: Member) -> Link:
            return Link(
                Dealer(context, member.endpoints[0], name="decoder", keys=keys),
                hello,
                role="decoder",
                on_message=self._on_message,
                on_up=self._on_up,
                on_down=self._on_down,
            )

        self.num_held = 0
        """Requests that wait because no decoder is there."""
        self.changes = Changes()
        self.last_hello: Hello | None = None
        self._members = LinkSet(
            connect,
            links_of=lambda link: (link,),
            is_busy=lambda link: self.num_runs(link) > 0,
            on_change=self._changed,
        )

    @property
    def links(self) -> list[Link]:
        """Connections to all members."""
        return self._members.connections

    def set_members(self, members: Sequence[Member]) -> None:
        """Who belongs to the tier now."""
        self._members.set_members(members)
        if len(self._seen) > 2 * len(self.links) + 8:  # instances that are gone for good
            present = {_instance(link) for link in self.links}
            self._seen = {name: seen for name, seen in self._seen.items() if name in present}

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        await self._members.run()

    @property
    def ours(self) -> list[Link]:
        """Decoders of our model that are up."""
        return [link for link in self.links if self._own.is_served_by(link)]

    @property
    def num_of_other_models(self) -> int:
        """Decoders that are up and serve something else."""
        return self._own.num_others(self.links)

    @property
    def ready(self) -> list[Link]:
        """Decoders of our model that accept requests; those that keep failing only when there are no others."""
        now = time.monotonic()
        ready = [link for link in self.ours if link.is_ready]
        return [link for link in ready if self._ejection.allows(_instance(link), now)] or ready

    def pick(self, avoid: Sequence[Link], request: GenerateRequest | None = None) -> Link | None:
        """The ready decoder that suits best by load and known prefix; one of `avoid` only when there is no other."""
        ready = self.ready
        candidates = [link for link in ready if link not in avoid] or ready
        known: dict[Link, int] = dict.fromkeys(candidates, 0)
        if request is not None and len(candidates) > 1:
            hashes = self._hashes_of(request)
            known = {link: self._seen_by(link).count_tokens(hashes) for link in candidates}
        chosen = choose_decoder(candidates, self._load, known.__getitem__, self._rng)
        if chosen is not None and known[chosen]:
            PREFIX_HITS.inc()
        return chosen

    def begin(self, link: Link, request: GenerateRequest, tell: Callable[[DecoderEvent], None]) -> Run:
        """Send a request and have its events told from now on. Raises PeerUnreachable."""
        run = Run(request.request_id, request.attempt, link, tell, _instance(link))
        link.send(request)
        self._runs[run.request_id] = run
        self._num_own[link] += 1
        self._ejection.begin(run.instance_id, time.monotonic())
        if len(self.links) > 1:
            self._seen_by(link).add(self._hashes_of(request))
        return run

    def end(self, run: Run, *, is_finished: bool) -> None:
        """Stop listening; a run that has not finished is cancelled at its decoder, also at one that is away now."""
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
            self._num_own[run.link] -= 1
            if not self._num_own[run.link]:
                del self._num_own[run.link]  # it may have left for good
            self._ejection.end_trial(run.instance_id)
        if not is_finished:
            run.link.send_or_keep(Cancel(request_id=run.request_id))

    def blame(self, run: Run) -> None:
        """A run failed by its decoder's fault: it answered nonsense, or its model does not work."""
        if self._ejection.record_failure(run.instance_id, time.monotonic()):
            logger.error("a decoder keeps failing and is left alone for a while", decoder=run.instance_id)

    def num_runs(self, link: Link) -> int:
        """Requests of this gateway that run there."""
        return self._num_own[link]

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """While a request waits for a decoder."""
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    def _load(self, link: Link) -> DecoderLoad:
        """Own requests count at once, others' with the decoder's next report."""
        report = link.load or LoadReport(instance_id=_instance(link) or "none")
        return DecoderLoad(
            num_own=self._num_own[link],
            waiting=report.waiting,
            running=report.running,
            kv_used=report.kv_share,
            queue_s=report.queue_s,
        )

    def _hashes_of(self, request: GenerateRequest) -> list[bytes]:
        if self._hashes[0] != request.request_id:
            self._hashes = (request.request_id, prefix_hashes(request))
        return self._hashes[1]

    def _seen_by(self, link: Link) -> SeenPrefixes:
        """What was sent to the instance that is there now; another one has an empty cache."""
        name = _instance(link)
        if name not in self._seen:
            self._seen[name] = SeenPrefixes(link.peer.limits.kv_cache_tokens if link.peer is not None else 0)
        return self._seen[name]

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
            if isinstance(event, SequenceTokens) and event.tokens:
                self._ejection.record_success(run.instance_id)
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

    def _on_up(self, link: Link) -> None:
        self._own.greet(link)
        self._changed()

    def _on_down(self, link: Link, instance_id: str) -> None:
        self._seen.pop(instance_id, None)
        lost = [run for run in self._runs.values() if run.link is link]
        if lost and not link.was_leaving:  # it may be back, and go away again with the next request
            self._ejection.record_failure(instance_id, time.monotonic())
        for run in lost:
            run.tell(DecoderLost(run.attempt, link.was_leaving))

    def _changed(self) -> None:
        self.last_hello = next((link.peer for link in self.ours), self.last_hello)
        self.changes.tell()


def _instance(link: Link) -> str:
    return link.peer.instance_id if link.peer is not None else ""
