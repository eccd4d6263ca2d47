"""The gateway's view of the fleet, as the `Backend` that its HTTP half uses.

Owns both pools, the cache and the facts of the vision side, which are learnt from encoders, remembered in Redis, and
read from there when no encoder is alive. Runs on the event loop; knows nothing of HTTP or text.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from weakref import WeakValueDictionary

import structlog
import zmq.asyncio

from common import __version__
from common.embedding import FleetFacts
from common.embedding_cache import EmbeddingCache, Survey
from common.errors import (
    DeadlineExceeded,
    DecoderUnavailable,
    EncoderUnavailable,
    ProtocolError,
    TandemError,
    error_info,
)
from common.members import MemberSource
from common.messages import GenerateRequest, Hello, MediaOptions, ProbeReply, ProbeRequest, VideoFacts
from common.metrics import Counter, Gauge
from common.processor_config import VideoSettings
from common.transport import CurveKeys
from common.vision_grid import is_consistent_video
from gateway_svc.backend import GenerationEvent, MediaOutcome
from gateway_svc.drain import Drain
from gateway_svc.media.item import LoadedMedia
from gateway_svc.routing.autoscale_signals import Autoscale
from gateway_svc.routing.changes import wait_for_change
from gateway_svc.routing.decoder_pool import DecoderPool
from gateway_svc.routing.encoder_pool import DEFAULT_PATCHES_PER_S, EncoderPeer, EncoderPool, Outgoing
from gateway_svc.routing.generation import DECODER_WAIT_S, Generation, first_error
from gateway_svc.routing.media_resolver import ENCODER_WAIT_S, MediaResolver
from gateway_svc.routing.placement import fleet_facts_of, rendezvous_order

logger = structlog.get_logger(__name__)

PEERS_READY = Gauge("tandem_gateway_peers_ready", "Services that accept work", ["role"])
OTHER_MODELS = Gauge(
    "tandem_gateway_peers_of_other_models", "Services that serve another model, and get nothing", ["role"]
)
PROBES = Counter("tandem_gateway_probes_total", "Videos whose grid was asked for", ["outcome"])
MAX_PROBE_TRIES = 4
PROBE_TIMEOUT_S = 60.0
REMEMBER_EVERY_S = 60.0


class Fleet:
    """Encoders, decoders and the cache of one model."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        model: str,
        instance_id: str | None,
        encoder_source: MemberSource,
        decoder_source: MemberSource,
        cache: EmbeddingCache | None,
        keys: CurveKeys | None,
        encoder_wait_s: float = ENCODER_WAIT_S,
        decoder_wait_s: float = DECODER_WAIT_S,
        video_settings: VideoSettings | None = None,
        encoder_patches_per_s: float = DEFAULT_PATCHES_PER_S,
    ) -> None:
        self._model = model
        self._cache = cache
        self._encoder_wait_s = encoder_wait_s
        self._decoder_wait_s = decoder_wait_s
        self._video_settings = video_settings
        self._facts: FleetFacts | None = None
        self._generations: WeakValueDictionary[str, Generation] = WeakValueDictionary()
        self._hello = Hello(
            role="gateway",
            instance_id=instance_id or f"gateway-{uuid.uuid4().hex[:12]}",
            model=model,
            version=__version__,
            is_ready=True,
        )
        self.encoders = EncoderPool(
            context,
            self.hello,
            keys=keys,
            on_change=self._on_encoder_change,
            patches_per_s=encoder_patches_per_s,
        )
        self.decoders = DecoderPool(context, self.hello, keys=keys)
        self.autoscale = Autoscale(self.encoders, self.decoders, self._hello.instance_id)
        self.drain = Drain()
        self._encoder_source = encoder_source
        self._decoder_source = decoder_source

    def hello(self) -> Hello:
        """What this gateway says of itself."""
        return self._hello

    async def run(self) -> None:
        """Keep all connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.encoders.run())
            tasks.create_task(self.decoders.run())
            tasks.create_task(self._encoder_source.run(self.encoders.set_members))
            tasks.create_task(self._decoder_source.run(self.decoders.set_members))
            tasks.create_task(self._measure())
            if self._cache is not None:
                tasks.create_task(self._remember(self._cache))

    # Backend

    @property
    def max_model_len(self) -> int:
        """The context of the decoders; 0 before one was heard."""
        return self.decoders.last_hello.limits.max_model_len if self.decoders.last_hello is not None else 0

    @property
    def vocab_size(self) -> int:
        """The vocabulary of the decoders; 0 before one was heard."""
        return self.decoders.last_hello.vocab_size if self.decoders.last_hello is not None else 0

    async def wait_for_decoder(self, deadline: float) -> None:
        """Return once a decoder was heard."""
        deadline = min(deadline, time.monotonic() + self._decoder_wait_s)
        error = DecoderUnavailable("no decoder has been seen yet: try again later", retry_after_s=5.0)
        while self.decoders.last_hello is None:
            with self.decoders.holding():
                await wait_for_change(self.decoders.changes.next, deadline, error)

    async def fleet_facts(self) -> FleetFacts:
        """The facts of the ready encoders; without one the last that were known, here or in Redis."""
        deadline = time.monotonic() + self._encoder_wait_s
        error = EncoderUnavailable("no encoder has been seen yet: try again later", retry_after_s=5.0)
        while True:
            changed = self.encoders.changes.next
            if (known := self._ready_facts() or self._facts) is not None:
                return known
            remembered = await self._cache.get_fleet(self._model) if self._cache is not None else None
            if remembered is not None:
                return remembered
            await wait_for_change(changed, deadline, error)

    async def probe_video(self, key: str, options: MediaOptions, source: bytes, deadline: float) -> VideoFacts:
        """A video's facts, from Redis or from the encoder that will probably encode it."""
        facts = await self._cache.get_video_facts(key) if self._cache is not None else None
        if facts is not None and self._is_consistent(facts):
            PROBES.labels("cached").inc()
            return facts
        error: TandemError = EncoderUnavailable("no encoder is available to read this video", retry_after_s=5.0)
        failed: list[str] = []
        while len(failed) < MAX_PROBE_TRIES:
            name, peer = await self._owner(key, failed, deadline, error)
            try:
                facts = await self._probe(peer, key, options, source, deadline)
            except TimeoutError:
                error = DeadlineExceeded("the video could not be read in the time that the request was given")
            except TandemError as failure:
                error = failure
            else:
                PROBES.labels("asked").inc()
                if self._cache is not None:
                    await self._cache.put_video_facts(key, facts)
                return facts
            if not error_info(error).is_retryable or time.monotonic() >= deadline:
                break
            failed.append(name)
        raise error

    async def _owner(
        self, key: str, failed: Sequence[str], deadline: float, error: TandemError
    ) -> tuple[str, EncoderPeer]:
        """The first owner of a key that has failed least; waits for an encoder when there is none."""
        deadline = min(deadline, time.monotonic() + self._encoder_wait_s)
        while True:
            changed, peers = self.encoders.changes.next, self.encoders.ready()
            if peers:
                name = min(rendezvous_order(key, list(peers)), key=failed.count)
                return name, peers[name]
            await wait_for_change(changed, deadline, error)

    async def _probe(
        self, peer: EncoderPeer, key: str, options: MediaOptions, source: bytes, deadline: float
    ) -> VideoFacts:
        time_left_s = min(PROBE_TIMEOUT_S, max(0.0, deadline - time.monotonic()))
        request = ProbeRequest(request_id=uuid.uuid4().hex, key=key, options=options, time_left_s=time_left_s)
        reply = await self.encoders.call(peer, request, Outgoing(source), time_left_s + 1.0)
        if not isinstance(reply, ProbeReply) or reply.facts is None or not self._is_consistent(reply.facts):
            raise ProtocolError("an encoder answered a probe with neither an error nor facts that can be true")
        return reply.facts

    def _is_consistent(self, facts: VideoFacts) -> bool:
        settings = self._video_settings
        return settings is None or is_consistent_video(facts.grid, facts.frame_indices, facts.timestamps, settings)

    def generate(
        self, request: GenerateRequest, media: Sequence[LoadedMedia], deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one request; see `Backend`."""
        generation = Generation(
            request,
            media,
            deadline,
            decoders=self.decoders,
            encoders=self.encoders,
            cache=self._cache,
            encoder_wait_s=self._encoder_wait_s,
            decoder_wait_s=self._decoder_wait_s,
        )
        self._generations[request.request_id] = generation
        return generation.events()

    def end_choice(self, request_id: str, choice: int) -> None:
        """One choice of a request is long enough."""
        if (generation := self._generations.get(request_id)) is not None:
            generation.end_choice(choice)

    async def warm(self, media: Sequence[LoadedMedia], facts: FleetFacts, deadline: float) -> dict[str, MediaOutcome]:
        """Have every item encoded that no cache has. An encoder keeps it as long as it has room, Redis for its time."""
        outcomes: dict[str, MediaOutcome] = {}

        def on_found(item: LoadedMedia, source: str, was_encoded: bool) -> None:
            outcomes[item.key] = "encoded" if was_encoded else "cache"

        resolver = MediaResolver(
            uuid.uuid4().hex,
            media,
            fingerprint=facts.fingerprint,
            wire_dtype=facts.wire_dtype,
            encoders=self.encoders,
            cache=self._cache,
            deadline=deadline,
            encoder_wait_s=self._encoder_wait_s,
            on_found=on_found,
        )
        error: TandemError | None = None
        try:
            await resolver.resolve([item.key for item in media], None)
        except* TandemError as group:
            error = first_error(group)
        finally:
            resolver.release()
        if error is not None:
            raise error
        return outcomes

    async def forget_media(self, key: str) -> bool | None:
        """Remove an embedding from Redis."""
        return await self._cache.remove(key) if self._cache is not None else None

    async def survey_media(self, fingerprint: str, *, is_removed: bool) -> Survey | None:
        """What Redis has of a fingerprint."""
        return await self._cache.survey(fingerprint, is_removed=is_removed) if self._cache is not None else None

    def is_ready(self) -> bool:
        """Whether a decoder accepts requests, and this gateway does."""
        return bool(self.decoders.ready) and not self.drain.is_draining

    def status(self) -> dict[str, object]:
        """Who is there."""
        return {
            "model": self._model,
            "decoders": {
                "ready": len(self.decoders.ready),
                "configured": len(self.decoders.links),
                "other_models": self.decoders.num_of_other_models,
            },
            "encoders": {
                "ready": len(self.encoders.ready()),
                "configured": len(self.encoders.peers),
                "other_models": self.encoders.num_of_other_models,
            },
            "draining": self.drain.is_draining,
            "discovery": {"encoders": self._encoder_source.status(), "decoders": self._decoder_source.status()},
            "redis": "off" if self._cache is None else "ok" if self._cache.is_available else "failing",
        }

    def _ready_facts(self) -> FleetFacts | None:
        hellos = [hello for peer in self.encoders.ready().values() if (hello := peer.hello) is not None]
        return fleet_facts_of(hellos, self.decoders.last_hello)

    def _on_encoder_change(self) -> None:
        self._facts = self._ready_facts() or self._facts

    async def _remember(self, cache: EmbeddingCache) -> None:
        """Keep the facts in Redis, for gateways that start when no encoder is alive.

        Reads first, so that a Redis that cannot be reached shows at start and not with the first picture.
        """
        await cache.get_fleet(self._model)
        while True:
            changed = self.encoders.changes.next
            if self._facts is not None:
                await cache.put_fleet(self._model, self._facts)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REMEMBER_EVERY_S):
                    await changed.wait()

    async def _measure(self) -> None:
        while True:
            PEERS_READY.labels("decoder").set(len(self.decoders.ready))
            PEERS_READY.labels("encoder").set(len(self.encoders.ready()))
            OTHER_MODELS.labels("decoder").set(self.decoders.num_of_other_models)
            OTHER_MODELS.labels("encoder").set(self.encoders.num_of_other_models)
            self.autoscale.measure()
            await asyncio.sleep(1.0)
