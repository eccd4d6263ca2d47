"""The gateway's view of the fleet, as the `Backend` that its HTTP half uses.

Owns both pools, the cache and the vision side's fingerprint, which is learnt from encoders, remembered in Redis, and
read from there when no encoder is alive. Runs on the event loop; knows nothing of HTTP or text.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence

import structlog
import zmq.asyncio

from common import __version__
from common.embedding_cache import EmbeddingCache, FleetFacts
from common.errors import EncoderUnavailable, TandemError, error_info
from common.messages import GenerateRequest, Hello, MediaOptions, ProbeReply, ProbeRequest, VideoFacts
from common.metrics import Counter, Gauge
from common.transport import CurveKeys
from gateway_svc.backend import GenerationEvent
from gateway_svc.decoder_pool import DecoderPool
from gateway_svc.encoder_pool import EncoderAddress, EncoderPool
from gateway_svc.generation import Generation
from gateway_svc.media import LoadedMedia
from gateway_svc.media_resolver import wait_for_change
from gateway_svc.routing import rendezvous_order

logger = structlog.get_logger(__name__)

PEERS_READY = Gauge("tandem_gateway_peers_ready", "Services that accept work", ["role"])
PROBES = Counter("tandem_gateway_probes_total", "Videos whose grid was asked for", ["outcome"])
MAX_PROBE_TRIES = 4
PROBE_TIMEOUT_S = 60.0
FINGERPRINT_WAIT_S = 10.0


class Fleet:
    """Encoders, decoders and the cache of one model."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        model: str,
        instance_id: str | None,
        encoders: Sequence[EncoderAddress],
        decoders: Sequence[str],
        cache: EmbeddingCache | None,
        keys: CurveKeys | None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._fingerprint: str | None = None
        self._hello = Hello(
            role="gateway",
            instance_id=instance_id or f"gateway-{uuid.uuid4().hex[:12]}",
            model=model,
            version=__version__,
            is_ready=True,
        )
        self._remembering: set[asyncio.Task[None]] = set()
        self.encoders = EncoderPool(context, encoders, self.hello, keys=keys, on_change=self._on_encoder_change)
        self.decoders = DecoderPool(context, decoders, self.hello, keys=keys)

    def hello(self) -> Hello:
        """What this gateway says of itself."""
        return self._hello

    async def run(self) -> None:
        """Keep all connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.encoders.run())
            tasks.create_task(self.decoders.run())
            tasks.create_task(self._measure())

    # Backend

    @property
    def max_model_len(self) -> int:
        """The context of the decoders; 0 before one was heard."""
        return self.decoders.last_hello.limits.max_model_len if self.decoders.last_hello is not None else 0

    @property
    def vocab_size(self) -> int:
        """The vocabulary of the decoders; 0 before one was heard."""
        return self.decoders.last_hello.vocab_size if self.decoders.last_hello is not None else 0

    async def fingerprint(self) -> str:
        """The fingerprint of a ready encoder; without one the last that was known, here or in Redis."""
        ready = self.encoders.ready()
        if ready and (hello := ready[min(ready)].hello) is not None and hello.fingerprint is not None:
            return hello.fingerprint
        if self._fingerprint is not None:
            return self._fingerprint
        remembered = await self._cache.get_fleet(self._model) if self._cache is not None else None
        if remembered is not None:
            self._fingerprint = remembered.fingerprint
            return remembered.fingerprint
        error = EncoderUnavailable("no encoder has been seen yet: try again later", retry_after_s=5.0)
        await wait_for_change(self.encoders.changed, time.monotonic() + FINGERPRINT_WAIT_S, error)
        return await self.fingerprint()

    async def probe_video(self, key: str, options: MediaOptions, source: bytes, deadline: float) -> VideoFacts:
        """A video's facts, from Redis or from the encoder that will probably encode it."""
        facts = await self._cache.get_video_facts(key) if self._cache is not None else None
        if facts is not None:
            PROBES.labels("cached").inc()
            return facts
        error: TandemError = EncoderUnavailable("no encoder is available to read this video", retry_after_s=5.0)
        for _ in range(MAX_PROBE_TRIES):
            changed, peers = self.encoders.changed, self.encoders.ready()
            if not peers:
                await wait_for_change(changed, deadline, error)
                continue
            peer = peers[rendezvous_order(key, list(peers))[0]]
            time_left_s = max(0.0, deadline - time.monotonic())
            request = ProbeRequest(request_id=uuid.uuid4().hex, key=key, options=options, time_left_s=time_left_s)
            try:
                reply = await self.encoders.call(peer, request, source, min(PROBE_TIMEOUT_S, time_left_s + 1.0))
            except TandemError as failure:
                if not error_info(failure).is_retryable:
                    raise
                error = failure
                continue
            except TimeoutError:
                continue
            assert isinstance(reply, ProbeReply)
            if reply.facts is not None:
                PROBES.labels("asked").inc()
                if self._cache is not None:
                    await self._cache.put_video_facts(key, reply.facts)
                return reply.facts
        raise error

    def generate(
        self, request: GenerateRequest, media: Sequence[LoadedMedia], deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one request; see `Backend`."""
        generation = Generation(
            request, media, deadline, decoders=self.decoders, encoders=self.encoders, cache=self._cache
        )
        return generation.events()

    def is_ready(self) -> bool:
        """Whether a decoder accepts requests."""
        return bool(self.decoders.ready)

    def status(self) -> dict[str, object]:
        """Who is there."""
        return {
            "model": self._model,
            "decoders": {"ready": len(self.decoders.ready), "configured": len(self.decoders.links)},
            "encoders": {"ready": len(self.encoders.ready()), "configured": len(self.encoders.peers)},
            "redis": "off" if self._cache is None else "ok" if self._cache.is_available else "failing",
        }

    def _on_encoder_change(self) -> None:
        for peer in self.encoders.peers:
            hello = peer.hello
            if hello is not None and hello.fingerprint is not None and hello.fingerprint != self._fingerprint:
                self._fingerprint = hello.fingerprint
                if self._cache is not None:
                    self._remember(self._cache.put_fleet(self._model, FleetFacts(hello.fingerprint)))

    def _remember(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._remembering.add(task)
        task.add_done_callback(self._remembering.discard)

    async def _measure(self) -> None:
        while True:
            PEERS_READY.labels("decoder").set(len(self.decoders.ready))
            PEERS_READY.labels("encoder").set(len(self.encoders.ready()))
            await asyncio.sleep(1.0)
