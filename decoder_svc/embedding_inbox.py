"""Which embeddings are fetched when: in the order of need, under a byte budget, each once however many wait for it.

Owns the items of requests until they are delivered, and the bytes of what was delivered and is still needed. Turns
a failed fetch into a report, so that the gateway can name another source. Runs on the event loop; knows nothing of
blocks or tensors' use.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from torch import Tensor

from common.embedding import ExpectedEmbedding
from common.embedding_cache import EmbeddingCache
from common.errors import EncoderUnavailable, ModelFailure, TandemError
from common.messages import EmbeddingHeader, GenerateRequest
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.tensors import check_finite, tensor_of

logger = structlog.get_logger(__name__)

FETCHES = Counter("tandem_decoder_fetches_total", "Embeddings fetched", ["source", "outcome"])
FETCH_SECONDS = Histogram("tandem_decoder_fetch_seconds", "Time of one fetch", ["source"], buckets=SECONDS_BUCKETS)
BYTES_IN_FLIGHT = Gauge("tandem_decoder_embedding_bytes", "Bytes of embeddings fetched and still needed")

REDIS = "redis"
FETCH_TIMEOUT_S = 30.0


class Fetcher(Protocol):
    """Where embeddings of encoders come from."""

    async def fetch(
        self, encoder_id: str, expected: ExpectedEmbedding, timeout_s: float
    ) -> tuple[EmbeddingHeader, bytearray]:
        """The embedding, complete and checked, or an error."""
        ...


class Listener(Protocol):
    """Who is told what came of a fetch."""

    def delivered(self, key: str, embedding: Tensor) -> None:
        """An embedding arrived, checked."""
        ...

    def source_failed(self, request_id: str, key: str, source: str) -> None:
        """A source could not give an item: another may."""
        ...

    def unusable(self, request_id: str, error: TandemError) -> None:
        """What a source gave can never be used: the request cannot be served."""
        ...


@dataclass
class _Item:
    expected: ExpectedEmbedding
    num_bytes: int
    waiting: dict[str, str] = field(default_factory=dict)  # request id -> source that its gateway named
    task: "asyncio.Task[None] | None" = None


class EmbeddingInbox:
    """Items that requests wait for."""

    def __init__(
        self,
        fetcher: Fetcher,
        cache: EmbeddingCache | None,
        listener: Listener,
        *,
        width: int,
        levels: int,
        itemsize: int,
        max_bytes: int,
    ) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._listener = listener
        self._width = width
        self._levels = levels
        self._itemsize = itemsize
        self._max_bytes = max_bytes
        self._expected: dict[str, dict[str, ExpectedEmbedding]] = {}  # request id -> key -> what it must be
        self._items: dict[str, _Item] = {}  # located and not delivered, in the order of need
        self._in_use: dict[str, int] = {}  # bytes of keys that are fetched or delivered and still needed

    @property
    def bytes_in_use(self) -> int:
        """Bytes that count against the budget."""
        return sum(self._in_use.values())

    @property
    def num_waiting(self) -> int:
        """Items that are not delivered."""
        return len(self._items)

    def expect(self, request: GenerateRequest) -> None:
        """Learn what the items of a request must look like."""
        if request.media:
            assert request.fingerprint is not None
            self._expected[request.request_id] = {
                item.key: ExpectedEmbedding(
                    key=item.key,
                    grid=item.grid,
                    fingerprint=request.fingerprint,
                    rows=item.num_tokens,
                    width=self._width,
                    levels=self._levels,
                )
                for item in request.media
            }

    def locate(self, request_id: str, key: str, source: str) -> None:
        """A gateway says where an item of its request is. Unknown requests and keys are ignored: they are over."""
        expected = self._expected.get(request_id, {}).get(key)
        if expected is None or expected.rows is None:
            return
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(expected, expected.rows * self._width * self._itemsize)
        item.waiting[request_id] = source
        self._start_fetches()

    def freed(self, key: str) -> None:
        """No sequence needs a delivered item any more."""
        if key not in self._items and self._in_use.pop(key, None) is not None:
            self._start_fetches()

    def forget(self, request_id: str) -> None:
        """A request is over; fetches that nobody else waits for stop."""
        self._expected.pop(request_id, None)
        for key, item in list(self._items.items()):
            if item.waiting.pop(request_id, None) is None or item.waiting:
                continue
            if item.task is not None:
                item.task.cancel()
            else:
                del self._items[key]

    async def close(self) -> None:
        """Stop all fetches."""
        tasks = [item.task for item in self._items.values() if item.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_fetches(self) -> None:
        """Start what fits the budget, in order. The oldest request may exceed it: progress never stops."""
        is_running = any(item.task is not None for item in self._items.values())
        oldest = next((r for r in self._expected if any(r in item.waiting for item in self._items.values())), None)
        for key, item in self._items.items():
            if item.task is not None:
                continue
            is_within = self.bytes_in_use + item.num_bytes <= self._max_bytes
            if not is_within and (is_running or oldest not in item.waiting):
                continue
            is_running = True
            self._in_use[key] = item.num_bytes
            item.task = asyncio.create_task(self._fetch(key, item), name="fetch")
        BYTES_IN_FLIGHT.set(self.bytes_in_use)

    async def _fetch(self, key: str, item: _Item) -> None:
        source = next(iter(item.waiting.values()))
        kind = REDIS if source == REDIS else "encoder"
        began = asyncio.get_running_loop().time()
        try:
            embedding = await self._fetch_from(source, item.expected)
        except (EncoderUnavailable, TimeoutError) as error:
            FETCHES.labels(kind, "failed").inc()
            logger.info("a fetch failed", source=source, reason=str(error) or type(error).__name__)
            for request_id in self._finish(key, is_delivered=False):
                self._listener.source_failed(request_id, key, source)
        except TandemError as error:
            FETCHES.labels(kind, "unusable").inc()
            for request_id in self._finish(key, is_delivered=False):
                self._listener.unusable(request_id, error)
        except asyncio.CancelledError:
            for request_id in self._finish(key, is_delivered=False):  # came while the fetch was being stopped
                self._listener.source_failed(request_id, key, source)
            raise
        else:
            FETCHES.labels(kind, "ok").inc()
            FETCH_SECONDS.labels(kind).observe(asyncio.get_running_loop().time() - began)
            self._finish(key, is_delivered=True)
            self._listener.delivered(key, embedding)

    def _finish(self, key: str, *, is_delivered: bool) -> Iterable[str]:
        item = self._items.pop(key)
        if not is_delivered:
            del self._in_use[key]
        # Started from the loop, not from here: the fetch that ends still counts as running.
        asyncio.get_running_loop().call_soon(self._start_fetches)
        return list(item.waiting)

    async def _fetch_from(self, source: str, expected: ExpectedEmbedding) -> Tensor:
        if source != REDIS:
            header, payload = await self._fetcher.fetch(source, expected, FETCH_TIMEOUT_S)
        else:
            found = await self._cache.get(expected) if self._cache is not None else None
            if found is None:
                raise EncoderUnavailable("the embedding is not in Redis (any more)")
            header, payload = found
        embedding = tensor_of(header, payload)
        try:
            await asyncio.to_thread(check_finite, embedding, "an embedding")
        except ModelFailure as error:
            if source == REDIS:
                raise EncoderUnavailable(error.message) from error  # an encoder can give a better one
            raise
        return embedding
