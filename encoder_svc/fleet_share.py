"""What this encoder and the rest of the fleet tell each other through Redis: who is at work on what, and what is done.

Owns the claims of this encoder and the queue of embeddings to write. The queue holds keys only: what the store evicts
before its turn is not written. Nothing here delays an encode or fails one. Runs on the event loop.
"""

import asyncio
from collections import deque

from common.embedding import ExpectedEmbedding
from common.embedding_cache import CLAIM_TTL_MS, REDIS, EmbeddingCache
from common.metrics import Counter
from encoder_svc.embedding_store import EmbeddingStore

CACHE_WRITES_DROPPED = Counter(
    "tandem_encoder_cache_writes_dropped_total", "Embeddings not written to Redis: queue full, or evicted before"
)
REDIS_LOOKUPS = Counter(
    "tandem_encoder_redis_lookups_total", "Items that Redis was asked for before they were encoded", ["result"]
)

RENEW_EVERY_S = CLAIM_TTL_MS / 1000 / 4


class FleetShare:
    """Claims and cache writes of one encoder. The owner awaits `run`."""

    def __init__(
        self, cache: EmbeddingCache, store: EmbeddingStore, instance_id: str, *, max_queued_items: int = 1024
    ) -> None:
        self._cache = cache
        self._store = store
        self._instance_id = instance_id
        self._max_queued_items = max_queued_items
        self._claimed: set[str] = set()
        self._queue: deque[tuple[str, bool]] = deque()  # keys, and whether their embeddings are to be written
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Write and renew until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._renew())

    async def claim(self, expected: ExpectedEmbedding, *, take_over: bool) -> str | None:
        """Claim an item that is about to be encoded; the place to look instead, if another has it."""
        place = await self._cache.claim(expected, self._instance_id, take_over=take_over)
        if place is None:
            self._claimed.add(expected.key)
        REDIS_LOOKUPS.labels("miss" if place is None else REDIS if place == REDIS else "in_work").inc()
        return place

    def offer(self, key: str) -> None:
        """An item is held: write it when its turn comes. Its claim stays until then."""
        if len(self._queue) >= self._max_queued_items:
            CACHE_WRITES_DROPPED.inc()
            self._claimed.discard(key)  # the claim lapses by itself: until then others find it here
            return
        self._queue.append((key, True))
        self._wake()

    def give_up(self, key: str) -> None:
        """An item will not come: others may encode it."""
        if key in self._claimed:
            self._claimed.discard(key)
            self._queue.append((key, False))
            self._wake()

    async def drained(self) -> None:
        """Return when all that was offered is written or dropped."""
        await self._idle.wait()

    def _wake(self) -> None:
        self._idle.clear()
        self._changed.set()

    async def _write(self) -> None:
        while True:
            if not self._queue:
                self._idle.set()
                self._changed.clear()
                await self._changed.wait()
            key, is_finished = self._queue.popleft()
            if is_finished:
                await self._write_one(key)
            elif key not in self._claimed:  # it was not begun again
                await self._cache.end_claim(key)

    async def _write_one(self, key: str) -> None:
        """Write an embedding and end its claim; one that could not be written is held here, as its claim says."""
        self._claimed.discard(key)
        if (embedding := self._store.pin(key)) is None:
            CACHE_WRITES_DROPPED.inc()
            await self._cache.end_claim(key)
            return
        try:
            is_stored = await self._cache.put(embedding.header, embedding.payload)
            if is_stored:
                self._store.note_in_redis(key)
        finally:
            self._store.unpin(key)
        if is_stored:
            await self._cache.end_claim(key)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            await self._cache.renew_claims(sorted(self._claimed), self._instance_id)
