"""Finds a source for each embedding that a decoder needs: Redis first, then the encoder that owns the key.

Owns the order of tries and what an item's failure means; one resolver serves one request. A source that failed is
not named again. An encoder that is at work on an item already, for whomever, is asked before its owner, and one that
names another place is followed there. With no encoder to ask it waits for one, within limits. Runs on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from common.embedding import ExpectedEmbedding
from common.embedding_cache import REDIS, EmbeddingCache, Located
from common.errors import EncoderUnavailable, TandemError, error_info
from common.messages import EncodeReply, EncodeRequest, WireDtype
from common.metrics import SECONDS_BUCKETS, Counter, Histogram
from common.vision_grid import num_patches
from gateway_svc.media.item import LoadedMedia, naming
from gateway_svc.routing.changes import wait_for_change
from gateway_svc.routing.encoder_pool import EncoderPeer, EncoderPool, Outgoing
from gateway_svc.routing.placement import owner_bounded_by_load, rendezvous_order

logger = structlog.get_logger(__name__)

ENCODE_RETRIES = Counter("tandem_gateway_encode_retries_total", "Items sent to another encoder after a failure")
ENCODE_SECONDS = Histogram("tandem_gateway_encode_seconds", "EncodeRequest to EncodeReply", buckets=SECONDS_BUCKETS)

ENCODER_WAIT_S = 30.0
MAX_TRIES = 6
MAX_LOST = 3
TRY_TIMEOUT_S = 120.0

Found = Callable[[LoadedMedia, str, bool], None]  # item, source, whether it was encoded for this request


class MediaResolver:
    """The items of one request."""

    def __init__(
        self,
        request_id: str,
        media: Sequence[LoadedMedia],
        *,
        fingerprint: str | None,
        wire_dtype: WireDtype | None,
        encoders: EncoderPool,
        cache: EmbeddingCache | None,
        deadline: float,
        encoder_wait_s: float,
        on_found: Found,
    ) -> None:
        self._request_id = request_id
        self._items = {item.key: item for item in media}
        self._fingerprint = fingerprint
        self._wire_dtype = wire_dtype
        self._encoders = encoders
        self._cache = cache
        self._deadline = deadline
        self._encoder_wait_s = encoder_wait_s
        self._on_found = on_found
        self._failed: dict[str, set[str]] = {}
        self._num_tries: dict[str, int] = {}
        self._in_work: dict[str, str] = {}  # item to the encoder that is said to be at work on it
        self._used: list[EncoderPeer] = []

    async def resolve(self, keys: Sequence[str], failed_source: str | None) -> None:
        """Name a source for each key. Raises a group of the errors that no other source can mend."""
        items = [self._items[key] for key in dict.fromkeys(keys) if key in self._items]
        if failed_source is not None:
            for item in items:
                self._failed.setdefault(item.key, set()).add(failed_source)
        located = await self._locate([item for item in items if REDIS not in self._failed.get(item.key, ())])
        self._in_work.update(located.in_work)
        for item in items:
            if item.key in located.cached:
                self._on_found(item, REDIS, False)
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                if item.key not in located.cached:
                    tasks.create_task(self._encode_counted(item))

    def release(self) -> None:
        """The decoder has what it needs: the encoders may forget it."""
        self._encoders.release(self._request_id, self._used)
        self._used = []

    async def _locate(self, items: Sequence[LoadedMedia]) -> Located:
        if self._cache is None or self._fingerprint is None:
            return Located()
        expected = [
            ExpectedEmbedding(key=item.key, grid=item.grid, fingerprint=self._fingerprint, dtype=self._wire_dtype)
            for item in items
        ]
        return await self._cache.locate(expected)

    async def _encode_counted(self, item: LoadedMedia) -> None:
        """Count the item as work of the encoders, also while there are none, until it is done or given up."""
        with self._encoders.demand.admitted(item.key, num_patches(item.grid)):
            await self._encode(item)

    async def _encode(self, item: LoadedMedia) -> None:
        error: TandemError = EncoderUnavailable(f"decoders could not fetch this {item.modality} from any encoder")
        num_lost = 0
        await item.source.load()
        # What Redis or an encoder has and could not give is encoded again.
        take_over = bool(self._failed.get(item.key))
        while self._num_tries.get(item.key, 0) < MAX_TRIES:
            self._num_tries[item.key] = self._num_tries.get(item.key, 0) + 1
            claimed_by = self._in_work.pop(item.key, None)
            instance_id, peer = await self._next_encoder(item, claimed_by)
            source = Outgoing(await item.source.read())
            began = time.monotonic()
            try:
                reply = await self._ask(peer, item, source, take_over=take_over)
            except TimeoutError:
                error = EncoderUnavailable(f"the encoder did not answer within {TRY_TIMEOUT_S:.0f} s")
            except TandemError as failure:
                error = failure
            else:
                if reply.elsewhere is None or reply.elsewhere == REDIS:
                    ENCODE_SECONDS.observe(time.monotonic() - began)
                    was_encoded = reply.elsewhere is None and not reply.was_held
                    if not was_encoded:
                        self._encoders.demand.discount(item.key)
                    self._on_found(item, reply.elsewhere or instance_id, was_encoded)
                    return
                self._in_work[item.key] = reply.elsewhere
                take_over = not self._can_be_asked(item, reply.elsewhere)
                continue
            num_lost += isinstance(error, EncoderUnavailable)
            take_over = take_over or instance_id == claimed_by or isinstance(error, EncoderUnavailable)
            # An item that ends encoder after encoder may be what ends them.
            if not error_info(error).is_retryable or num_lost >= MAX_LOST or time.monotonic() >= self._deadline:
                break
            logger.warning("an encoder failed; another is asked", encoder=instance_id, reason=str(error)[:200])
            ENCODE_RETRIES.inc()
            self._failed.setdefault(item.key, set()).add(instance_id)
        raise naming(error, item.param)

    def _can_be_asked(self, item: LoadedMedia, instance_id: str) -> bool:
        """Whether an encoder is ready, and has not failed on this item."""
        is_ready = instance_id in self._encoders.ready(self._fingerprint)
        return is_ready and instance_id not in self._failed.get(item.key, ())

    async def _ask(self, peer: EncoderPeer, item: LoadedMedia, source: Outgoing, *, take_over: bool) -> EncodeReply:
        assert self._fingerprint is not None
        time_left_s = min(TRY_TIMEOUT_S, max(0.0, self._deadline - time.monotonic()))
        request = EncodeRequest(
            request_id=self._request_id,
            key=item.key,
            modality=item.modality,
            options=item.options,
            expected_grid=item.grid,
            fingerprint=self._fingerprint,
            time_left_s=time_left_s,
            take_over=take_over,
        )
        if peer not in self._used:
            self._used.append(peer)
            peer.users.add(self._request_id)
        reply = await self._encoders.call(peer, request, source, time_left_s + 1.0)
        assert isinstance(reply, EncodeReply)
        return reply

    async def _next_encoder(self, item: LoadedMedia, claimed_by: str | None) -> tuple[str, EncoderPeer]:
        """The encoder at work on the item, or its first owner that has not failed; a failed one only when all have."""
        failed = self._failed.get(item.key, set())
        deadline = min(self._deadline, time.monotonic() + self._encoder_wait_s)
        while True:
            changed = self._encoders.changes.next
            peers = self._encoders.ready(self._fingerprint)
            queue_s = {name: self._encoders.queue_s(peer) for name, peer in peers.items()}
            order = owner_bounded_by_load(rendezvous_order(item.key, list(peers)), queue_s)
            if claimed_by is not None and self._can_be_asked(item, claimed_by):
                return claimed_by, peers[claimed_by]
            chosen = next((name for name in order if name not in failed), None)
            if chosen is None and order:
                failed.difference_update(order)
                await asyncio.sleep(min(0.1 * 2 ** self._num_tries[item.key], 2.0))
                continue
            if chosen is not None:
                return chosen, peers[chosen]
            await wait_for_change(changed, deadline, self._no_encoder(item))

    def _no_encoder(self, item: LoadedMedia) -> EncoderUnavailable:
        return EncoderUnavailable(
            f"no encoder became available for this {item.modality} in time: text and media seen before are still "
            "answered; try again later",
            param=item.param,
            retry_after_s=5.0,
        )
