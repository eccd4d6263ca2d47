"""Which embeddings are fetched when: in the order of need, under a byte budget, each once however many wait for it.

Owns the items of requests until they are delivered, and the count of bytes of what was delivered and is still needed.
Turns a failed fetch into a report, so that the gateway can name another source. Runs on the event loop; knows nothing
of blocks or tensors' use.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch
from torch import Tensor

from common.embedding import ExpectedEmbedding, Payload
from common.embedding_cache import REDIS, EmbeddingCache
from common.errors import EncoderUnavailable, ModelFailure, TandemError
from common.messages import EmbeddingHeader, GenerateRequest
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.tensors import check_finite, tensor_of

logger = structlog.get_logger(__name__)

FETCHES = Counter("tandem_decoder_fetches_total", "Embeddings fetched", ["source", "outcome"])
FETCH_SECONDS = Histogram("tandem_decoder_fetch_seconds", "Time of one fetch", ["source"], buckets=SECONDS_BUCKETS)
BYTES_IN_FLIGHT = Gauge("tandem_decoder_embedding_bytes", "Bytes of embeddings fetched and still needed")

FETCH_TIMEOUT_S = 30.0


class Fetcher(Protocol):
    """Where embeddings of encoders come from."""

    async def fetch(
        self, encoder_id: str, expected: ExpectedEmbedding, timeout_s: float
    ) -> tuple[EmbeddingHeader, Payload]:
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


@dataclass(frozen=True)
class _Request:
    """What a request expects. `number` grows with each one."""

    number: int
    expected: dict[str, ExpectedEmbedding]


@dataclass
class _Item:
    """An embedding that was located and is not delivered."""

    expected: ExpectedEmbedding
    num_bytes: int
    waiting: dict[str, str] = field(default_factory=dict)  # request id -> source that its gateway named
    task: "asyncio.Task[Tensor] | None" = None
    source: str = ""  # of the task


class EmbeddingInbox:
    """Items that requests wait for, by what is expected of them: a request that expects something else of the same item
    is served, and fails, alone. `dtype` is the model's; `is_held` says whether the engine has an embedding already."""

    def __init__(
        self,
        fetcher: Fetcher,
        cache: EmbeddingCache | None,
        listener: Listener,
        *,
        width: int,
        levels: int,
        dtype: torch.dtype,
        max_bytes: int,
        is_held: Callable[[str], bool] = lambda key: False,
    ) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._listener = listener
        self._width = width
        self._levels = levels
        self._dtype = dtype
        self._max_bytes = max_bytes
        self._is_held = is_held
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()
        self._items: dict[ExpectedEmbedding, _Item] = {}
        self._first_in_need: str | None = None
        self.bytes_in_use = 0
        """Bytes that count against the budget: being fetched, or delivered and still needed."""

    @property
    def num_waiting(self) -> int:
        """Items that are not delivered."""
        return len(self._items)

    def expect(self, request: GenerateRequest) -> None:
        """Learn what the items of a request must look like."""
        if request.media:
            assert request.fingerprint is not None
            expected = {
                item.key: ExpectedEmbedding(
                    key=item.key,
                    grid=item.grid,
                    fingerprint=request.fingerprint,
                    rows=item.num_tokens,
                    width=self._width,
                    levels=self._levels,
                    dtype=request.wire_dtype,
                )
                for item in request.media
            }
            self._requests[request.request_id] = _Request(next(self._numbers), expected)

    def locate(self, request_id: str, key: str, source: str) -> None:
        """A gateway says where an item of its request is. Unknown requests and keys are ignored: they are over.

        What another request's fetch brought meanwhile is not fetched again: whoever needs it keeps it in the engine.
        """
        request = self._requests.get(request_id)
        expected = request.expected.get(key) if request is not None else None
        if expected is None or expected.rows is None or self._is_held(key):
            return
        item = self._items.get(expected)
        if item is None:
            item = self._items[expected] = _Item(expected, expected.rows * self._width * self._dtype.itemsize)
        item.waiting[request_id] = source
        self._start_fetches()

    def released(self, num_bytes: int, first_in_need: str | None) -> None:
        """So many delivered bytes are needed no more, and this request is the next to need an item."""
        self.bytes_in_use -= num_bytes
        self._first_in_need = first_in_need
        self._start_fetches()

    def forget(self, request_id: str) -> None:
        """A request is over; fetches that nobody else waits for stop."""
        self._requests.pop(request_id, None)
        for expected, item in list(self._items.items()):
            if item.waiting.pop(request_id, None) is None or item.waiting:
                continue
            if item.task is not None:
                item.task.cancel()
            else:
                del self._items[expected]

    async def close(self) -> None:
        """Stop all fetches."""
        tasks = [item.task for item in self._items.values() if item.task is not None]
        self._items.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_fetches(self) -> None:
        """Start what fits the budget, oldest request first; what does not fit lets nothing younger pass.

        The request that is next in need comes first, and may exceed the budget when nothing else is being fetched:
        what the others hold is not released before it has run.
        """
        is_running = any(item.task is not None for item in self._items.values())
        pending = [item for item in self._items.values() if item.task is None and item.waiting]
        for item in sorted(pending, key=self._order):
            is_within = self.bytes_in_use + item.num_bytes <= self._max_bytes
            if not is_within and (is_running or not self._is_first(item)):
                break
            is_running = True
            self.bytes_in_use += item.num_bytes
            item.source = next(iter(item.waiting.values()))
            item.task = asyncio.create_task(self._fetch(item.source, item.expected), name="fetch")
            item.task.add_done_callback(functools.partial(self._on_done, item))
        BYTES_IN_FLIGHT.set(self.bytes_in_use)

    def _order(self, item: _Item) -> tuple[bool, int]:
        oldest = min(self._requests[request_id].number for request_id in item.waiting)
        return not self._is_first(item), oldest

    def _is_first(self, item: _Item) -> bool:
        return self._first_in_need in item.waiting

    def _on_done(self, item: _Item, task: "asyncio.Task[Tensor]") -> None:
        """A fetch has ended; whoever was told of another source, or came while it was being stopped, gets a new one."""
        self.bytes_in_use -= item.num_bytes
        if self._items.get(item.expected) is not item:
            return  # closed
        item.task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_error(item, error)
        elif not task.cancelled():
            del self._items[item.expected]
            self.bytes_in_use += task.result().nbytes
            self._listener.delivered(item.expected.key, task.result())
        if not item.waiting and self._items.get(item.expected) is item:
            del self._items[item.expected]
        self._start_fetches()

    def _on_error(self, item: _Item, error: BaseException) -> None:
        source, key = item.source, item.expected.key
        failed = [request_id for request_id, named in item.waiting.items() if named == source]
        for request_id in failed:
            del item.waiting[request_id]
        if isinstance(error, EncoderUnavailable | TimeoutError):
            logger.info("a fetch failed", source=source, reason=str(error) or type(error).__name__)
            for request_id in failed:
                self._listener.source_failed(request_id, key, source)
            return
        if not isinstance(error, TandemError):
            logger.error("a fetch ended unexpectedly", source=source, exc_info=error)
            error = ModelFailure("an internal error kept an embedding from being fetched")
        for request_id in failed:
            self._listener.unusable(request_id, error)

    async def _fetch(self, source: str, expected: ExpectedEmbedding) -> Tensor:
        kind = REDIS if source == REDIS else "encoder"
        began = asyncio.get_running_loop().time()
        try:
            embedding = await self._fetch_from(source, expected)
        except (EncoderUnavailable, TimeoutError):
            FETCHES.labels(kind, "failed").inc()
            raise
        except TandemError:
            FETCHES.labels(kind, "unusable").inc()
            raise
        FETCHES.labels(kind, "ok").inc()
        FETCH_SECONDS.labels(kind).observe(asyncio.get_running_loop().time() - began)
        return embedding

    async def _fetch_from(self, source: str, expected: ExpectedEmbedding) -> Tensor:
        if source != REDIS:
            header, payload = await self._fetcher.fetch(source, expected, FETCH_TIMEOUT_S)
        else:
            found = await self._cache.get(expected) if self._cache is not None else None
            if found is None:
                raise EncoderUnavailable("the embedding is not in Redis (any more)")
            header, payload = found
        try:
            return await asyncio.to_thread(_checked_tensor, header, payload, self._dtype)
        except ModelFailure as error:
            if source == REDIS:
                raise EncoderUnavailable(error.message) from error  # an encoder can give a better one
            raise


def _checked_tensor(header: EmbeddingHeader, payload: Payload, dtype: torch.dtype) -> Tensor:
    """The tensor of a payload; raises ModelFailure when a value is not finite. Takes milliseconds of a thread."""
    embedding = tensor_of(header, payload, dtype)
    check_finite(embedding, "an embedding")
    return embedding
