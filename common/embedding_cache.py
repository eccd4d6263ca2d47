"""Embeddings, video facts and the fleet's fingerprint in Redis. A cache: every failure is a miss and a counter.

An embedding is chunks of about 1 MB named by key and checksum under one `{key}` hash tag, and a manifest written
last, so a reader sees all of it or nothing. Each call has a hard time budget below the cost of a miss, and a breaker
keeps a Redis that is down or frozen off the path. Runs on the event loop of its process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from common.embedding import CHUNK_BYTES, ExpectedEmbedding, check_payload, chunks, pack_manifest, unpack_stored
from common.errors import ConfigError, ProtocolError
from common.messages import EmbeddingHeader, Fingerprint, VideoFacts
from common.metrics import Counter, Gauge

logger = structlog.get_logger(__name__)

CACHE_CALLS = Counter("tandem_cache_calls_total", "Calls to the Redis cache", ["call", "outcome"])
CACHE_BREAKER_OPEN = Gauge("tandem_cache_breaker_open", "1 while Redis is skipped because it failed")
CACHE_BYTES = Counter("tandem_cache_bytes_total", "Payload bytes moved to and from Redis", ["direction"])

CHUNKS_OUTLIVE_S = 60  # chunks live longer than the manifest that names them, so a manifest seldom lies

SLOWEST_BYTES_PER_S = 50 << 20  # a transfer slower than this is no better than encoding again

T = TypeVar("T")
Reply = bytes | str | None  # redis-py's type; always bytes here, since no decoding is asked for


class FleetFacts(msgspec.Struct, frozen=True):
    """What a restarted gateway must know to use cached media while no encoder is alive."""

    fingerprint: Fingerprint


class EmbeddingCache:
    """The cache of one process. No method raises because of Redis, and none takes longer than its budget."""

    def __init__(
        self, client: redis.Redis, *, ttl_s: int, call_timeout_s: float = 0.25, transfer_timeout_s: float = 2.0
    ) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._call_timeout_s = call_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._breaker = Breaker()

    @classmethod
    def connect(cls, url: str, *, ttl_s: int) -> "EmbeddingCache":
        """A cache at a Redis URL; nothing is contacted yet. Raises ConfigError for a URL that is none."""
        try:
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=16,
                timeout=1,
                socket_connect_timeout=0.25,
                socket_timeout=2.0,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except ValueError as exc:
            raise ConfigError(f"the Redis URL is not valid: {exc}") from exc
        return cls(redis.Redis.from_pool(pool), ttl_s=ttl_s)

    @property
    def is_available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._breaker.is_closed

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def probe(self, expected: Sequence[ExpectedEmbedding]) -> set[str]:
        """The keys whose manifests are here and right; refreshes their TTL. One round trip."""
        if not expected:
            return set()

        async def call() -> list[Reply]:
            async with self._client.pipeline(transaction=False) as pipeline:
                for item in expected:
                    pipeline.getex(_manifest_name(item.key), ex=self._ttl_s)
                return list(await pipeline.execute())

        manifests = await self._guard("probe", self._call_timeout_s, call)
        if manifests is None:
            return set()
        return {
            item.key
            for item, manifest in zip(expected, manifests, strict=True)
            if manifest is not None and self._checked_manifest(manifest, item) is not None
        }

    async def get(self, expected: ExpectedEmbedding) -> tuple[EmbeddingHeader, bytearray] | None:
        """An embedding that passed every check, or None."""

        async def call() -> tuple[EmbeddingHeader, bytearray] | None:
            manifest = await self._client.getex(_manifest_name(expected.key), ex=self._ttl_s)
            header = self._checked_manifest(manifest, expected) if manifest is not None else None
            if header is None:
                return None
            payload = bytearray(header.num_bytes)
            return (header, payload) if await self._read_chunks(header, payload) else None

        found = await self._guard("get", self._transfer_budget_s(_expected_bytes(expected)), call)
        if found is None:
            return None
        header, payload = found
        try:
            await asyncio.to_thread(check_payload, header, payload)
        except ProtocolError as error:
            CACHE_CALLS.labels("get", "corrupt").inc()
            logger.warning("a cached embedding was damaged", reason=error.message)
            return None
        CACHE_BYTES.labels("read").inc(len(payload))
        return header, payload

    async def put(self, header: EmbeddingHeader, payload: memoryview) -> bool:
        """Store an embedding; true when it is complete in Redis."""

        async def call() -> bool:
            for index, chunk in enumerate(chunks(payload, header.chunk_bytes)):
                await self._client.set(_chunk_name(header, index), bytes(chunk), ex=self._ttl_s + CHUNKS_OUTLIVE_S)
            await self._client.set(_manifest_name(header.key), pack_manifest(header), ex=self._ttl_s)
            return True

        stored = await self._guard("put", self._transfer_budget_s(len(payload)), call) is not None
        if stored:
            CACHE_BYTES.labels("written").inc(len(payload))
        return stored

    async def get_video_facts(self, key: str) -> VideoFacts | None:
        """What an encoder once found out about a video."""
        return await self._get_struct("facts", _facts_name(key), VideoFacts)

    async def put_video_facts(self, key: str, facts: VideoFacts) -> None:
        """Remember what an encoder found out about a video."""
        await self._put_struct("facts", _facts_name(key), facts)

    async def get_fleet(self, model: str) -> FleetFacts | None:
        """What is known of a model's encoders."""
        return await self._get_struct("fleet", _fleet_name(model), FleetFacts)

    async def put_fleet(self, model: str, facts: FleetFacts) -> None:
        """Remember what a model's encoders said of themselves."""
        await self._put_struct("fleet", _fleet_name(model), facts)

    async def _get_struct(self, name: str, redis_key: str, struct: type[T]) -> T | None:
        data = await self._guard(name, self._call_timeout_s, lambda: self._client.getex(redis_key, ex=self._ttl_s))
        if data is None:
            return None
        try:
            return unpack_stored(_as_bytes(data), struct)
        except ProtocolError:
            CACHE_CALLS.labels(name, "corrupt").inc()
            return None

    async def _put_struct(self, name: str, redis_key: str, value: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(value)
        await self._guard(name, self._call_timeout_s, lambda: self._client.set(redis_key, data, ex=self._ttl_s))

    async def _read_chunks(self, header: EmbeddingHeader, payload: bytearray) -> bool:
        view = memoryview(payload)
        for index in range(header.num_chunks):
            chunk = await self._client.getex(_chunk_name(header, index), ex=self._ttl_s + CHUNKS_OUTLIVE_S)
            target = view[index * header.chunk_bytes : (index + 1) * header.chunk_bytes]
            if chunk is None or len(chunk) != len(target):
                CACHE_CALLS.labels("get", "incomplete").inc()
                return False
            target[:] = _as_bytes(chunk)
        return True

    def _checked_manifest(self, manifest: bytes | str, expected: ExpectedEmbedding) -> EmbeddingHeader | None:
        try:
            header = unpack_stored(_as_bytes(manifest), EmbeddingHeader)
            expected.check(header)
            if header.chunk_bytes != CHUNK_BYTES:
                raise ProtocolError(f"chunks of {header.chunk_bytes} bytes, expected {CHUNK_BYTES}")
        except ProtocolError as error:
            CACHE_CALLS.labels("manifest", "corrupt").inc()
            logger.warning("a cached manifest was not usable", reason=error.message)
            return None
        return header

    def _transfer_budget_s(self, num_bytes: int) -> float:
        return self._transfer_timeout_s + num_bytes / SLOWEST_BYTES_PER_S

    async def _guard(self, name: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        if not self._breaker.allows(time.monotonic()):
            CACHE_CALLS.labels(name, "skipped").inc()
            return None
        try:
            async with asyncio.timeout(timeout_s):
                result = await call()
        except ResponseError as exc:  # Redis is there and says no: it is full, or read-only
            CACHE_CALLS.labels(name, "refused").inc()
            logger.warning("Redis refused a call", call=name, reason=type(exc).__name__)
            self._breaker.record_success()
            CACHE_BREAKER_OPEN.set(0)
            return None
        except Exception as exc:  # a cache is never worth a request: whatever answers there, requests go on
            CACHE_CALLS.labels(name, "failed").inc()
            if self._breaker.record_failure(time.monotonic()):
                is_expected = isinstance(exc, RedisError | OSError | TimeoutError)
                logger.warning(
                    "Redis is skipped for a while",
                    call=name,
                    reason=type(exc).__name__,
                    exc_info=None if is_expected else exc,
                )
            CACHE_BREAKER_OPEN.set(1)
            return None
        self._breaker.record_success()
        CACHE_BREAKER_OPEN.set(0)
        CACHE_CALLS.labels(name, "miss" if result is None else "ok").inc()
        return result


class Breaker:
    """Skips a dependency after a failure, for a time that doubles with each failure in a row. Pure: `now` is given."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 10.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = first_s
        self._open_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether nothing has failed since the last success."""
        return self._open_until == 0.0

    def allows(self, now: float) -> bool:
        """Whether a call may be tried."""
        return now >= self._open_until

    def record_failure(self, now: float) -> bool:
        """Open the breaker; true when it was closed. Calls that fail together count as one failure."""
        was_closed = self.is_closed
        if not self.allows(now):
            return False
        self._open_until = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        return was_closed

    def record_success(self) -> None:
        """Close the breaker."""
        self._open_until = 0.0
        self._pause_s = self._first_s


def _as_bytes(value: object) -> bytes:
    """What Redis gave for a string. Raises ProtocolError for anything else: it is not our Redis that answers."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if not isinstance(value, bytes):
        raise ProtocolError(f"Redis answered with {type(value).__name__} for a string")
    return value


def _expected_bytes(expected: ExpectedEmbedding) -> int:
    return (expected.rows or 0) * (expected.width or 0) * 4


def _manifest_name(key: str) -> str:
    return f"tandem:embedding:{{{key}}}"


def _chunk_name(header: EmbeddingHeader, index: int) -> str:
    return f"tandem:embedding:{{{header.key}}}:{header.checksum:08x}:{index}"


def _facts_name(key: str) -> str:
    return f"tandem:facts:{key}"


def _fleet_name(model: str) -> str:
    return f"tandem:fleet:{model}"
