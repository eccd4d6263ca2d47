"""Embeddings, video facts and the fleet's facts in Redis. A cache: every failure is a miss and a counter.

An embedding is chunks of about 1 MB named by key and checksum under one `{key}` hash tag, and a manifest written
last, so a reader sees all of it or nothing. A claim names the encoder that is at work on a key. Each call has a hard
time budget below the cost of a miss, those that a request waits for a much shorter one, and a breaker keeps a Redis
that is down or frozen off the path. Runs on the event loop of its process.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from common.embedding import (
    CHUNK_BYTES,
    ExpectedEmbedding,
    FleetFacts,
    Payload,
    check_payload,
    chunks,
    new_payload,
    pack_manifest,
    unpack_stored,
)
from common.errors import ProtocolError
from common.messages import EmbeddingHeader, Id, VideoFacts
from common.metrics import Counter
from common.redis_connect import RedisClient, connect_redis
from common.redis_guard import CACHE_CALLS, RedisGuard
from common.redis_read import BlockingReader, Reading

logger = structlog.get_logger(__name__)

CACHE_BYTES = Counter("tandem_cache_bytes_total", "Payload bytes moved to and from Redis", ["direction"])

CHUNKS_OUTLIVE_S = 60  # chunks live longer than the manifest that names them, so a manifest seldom lies

CLAIM_TTL_MS = 10_000  # a claim that nobody renews, since its encoder died, is soon forgotten
WAIT_S = 0.02  # how long a request waits to hear what Redis has; the call itself may go on
REDIS = "redis"
SURVEY_STEP = 500
SURVEY_TIMEOUT_S = 30.0

SLOWEST_BYTES_PER_S = 50 << 20  # a transfer slower than this is no better than encoding again

T = TypeVar("T")
Reply = bytes | str | None  # redis-py's type; always bytes here, since no decoding is asked for


@dataclass(frozen=True)
class Located:
    """What Redis knows of some keys: which embeddings it has, and which encoder is at work on which other ones."""

    cached: set[str] = field(default_factory=set)
    in_work: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Survey:
    """The embeddings of one fingerprint in Redis."""

    num_items: int
    num_bytes: int


class EmbeddingCache:
    """The cache of one process. No method raises because of Redis, and none takes longer than its budget."""

    def __init__(
        self,
        client: RedisClient,
        *,
        ttl_s: int,
        call_timeout_s: float = 0.25,
        transfer_timeout_s: float = 2.0,
        wait_s: float = WAIT_S,
        reader: BlockingReader | None = None,
        new_payload: Callable[[int], Payload] = new_payload,
    ) -> None:
        self._new_payload = new_payload
        self._client = client
        self._reader = reader
        self._ttl_s = ttl_s
        self._call_timeout_s = call_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._guard = RedisGuard(wait_s)

    @classmethod
    def connect(
        cls, url: str, *, ttl_s: int, wait_s: float = WAIT_S, new_payload: Callable[[int], Payload] = new_payload
    ) -> "EmbeddingCache":
        """A cache at a Redis URL; nothing is contacted yet. Raises ConfigError for a URL that is none.

        `new_payload` gives memory for so many bytes, in any thread.
        """
        reader = None if "+" in url.partition(":")[0] else BlockingReader(url)
        return cls(connect_redis(url), ttl_s=ttl_s, wait_s=wait_s, reader=reader, new_payload=new_payload)

    @property
    def is_available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._guard.is_closed

    async def close(self) -> None:
        """Close all connections."""
        await self._guard.close()
        if self._reader is not None:
            self._reader.close()
        await self._client.aclose()

    async def probe(self, expected: Sequence[ExpectedEmbedding]) -> set[str]:
        """The keys whose manifests are here and right; refreshes their TTL. One round trip."""
        return (await self.locate(expected)).cached

    async def locate(self, expected: Sequence[ExpectedEmbedding]) -> Located:
        """What is here, and what is being encoded somewhere; refreshes the TTL of what is here. One round trip."""
        if not expected:
            return Located()

        async def call() -> list[Reply]:
            async with self._client.pipeline(transaction=False) as pipeline:
                for item in expected:
                    pipeline.getex(_manifest_name(item.key), ex=self._ttl_s)
                    pipeline.get(_claim_name(item.key))
                return list(await pipeline.execute())

        replies = await self._guard.run_briefly("probe", self._call_timeout_s, call)
        located = Located()
        for item, manifest, claim in zip(expected, (replies or [])[::2], (replies or [])[1::2], strict=False):
            if manifest is not None and self._checked_manifest(manifest, item) is not None:
                located.cached.add(item.key)
            elif (owner := _checked_owner(claim)) is not None:
                located.in_work[item.key] = owner
        return located

    async def claim(self, expected: ExpectedEmbedding, owner: str, *, take_over: bool = False) -> str | None:
        """Say that `owner` begins to encode an item, unless it need not: then the place where the item is or will be.

        The place is the word `redis` or another encoder's id; None says to go on, as it does when Redis is away. With
        `take_over` the claim is made whatever Redis has. One round trip.
        """

        async def call() -> list[Reply]:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.getex(_manifest_name(expected.key), ex=self._ttl_s)
                pipeline.set(_claim_name(expected.key), owner, px=CLAIM_TTL_MS, nx=not take_over)
                pipeline.get(_claim_name(expected.key))
                return list(await pipeline.execute())

        replies = await self._guard.run_briefly("claim", self._call_timeout_s, call)
        if replies is None or take_over:
            return None
        manifest, _, claim = replies
        if manifest is not None and self._checked_manifest(manifest, expected) is not None:
            return REDIS
        found = _checked_owner(claim)
        return found if found != owner else None

    async def renew_claims(self, keys: Sequence[str], owner: str) -> None:
        """Keep claims that are still ours to keep."""

        async def call() -> bool:
            async with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.set(_claim_name(key), owner, px=CLAIM_TTL_MS)
                await pipeline.execute()
            return True

        if keys:
            await self._guard.run("claim", self._call_timeout_s, call)

    async def end_claim(self, key: str) -> None:
        """The item is in Redis, or will not come."""
        await self._guard.run("claim", self._call_timeout_s, lambda: self._client.delete(_claim_name(key)))

    async def get(self, expected: ExpectedEmbedding) -> tuple[EmbeddingHeader, Payload] | None:
        """An embedding that passed every check, or None."""

        async def call() -> tuple[EmbeddingHeader, Payload] | None:
            if self._reader is None:
                return await self._get_by_parts(expected)
            return await self._reader.run(lambda reading: self._read(reading, expected), budget_s)

        budget_s = self._transfer_budget_s(expected.num_bytes("float32"))
        found = await self._guard.run("get", budget_s, call)
        if found is not None:
            CACHE_BYTES.labels("read").inc(len(found[1]))
        return found

    def _read(self, reading: Reading, expected: ExpectedEmbedding) -> tuple[EmbeddingHeader, Payload] | None:
        """Read an embedding in place, in one of the reader's threads."""
        manifest = reading.command("GETEX", _manifest_name(expected.key), "EX", self._ttl_s)
        header = self._checked_manifest(_as_bytes(manifest), expected) if manifest is not None else None
        if header is None:
            return None
        payload = self._new_payload(header.num_bytes)
        ttl_s = self._ttl_s + CHUNKS_OUTLIVE_S
        commands = [("GETEX", _chunk_name(header, index), "EX", ttl_s) for index in range(header.num_chunks)]
        checksum = reading.values_into(memoryview(payload), commands, header.chunk_bytes)
        if checksum is None:
            reading.give_up()
            CACHE_CALLS.labels("get", "incomplete").inc()
            return None
        if checksum != header.checksum:
            _note_damage(f"its checksum is {checksum:08x}, its manifest says {header.checksum:08x}")
            return None
        return header, payload

    async def _get_by_parts(self, expected: ExpectedEmbedding) -> tuple[EmbeddingHeader, Payload] | None:
        """The same with a client that finds each value's server by itself, as a Cluster's does."""
        manifest = await self._client.getex(_manifest_name(expected.key), ex=self._ttl_s)
        header = self._checked_manifest(manifest, expected) if manifest is not None else None
        if header is None:
            return None
        payload = self._new_payload(header.num_bytes)
        if not await self._read_chunks(header, payload):
            return None
        try:
            await asyncio.to_thread(check_payload, header, payload)
        except ProtocolError as error:
            _note_damage(error.message)
            return None
        return header, payload

    async def put(self, header: EmbeddingHeader, payload: memoryview) -> bool:
        """Store an embedding; true when it is complete in Redis."""

        async def call() -> bool:
            for index, chunk in enumerate(chunks(payload, header.chunk_bytes)):
                await self._client.set(_chunk_name(header, index), bytes(chunk), ex=self._ttl_s + CHUNKS_OUTLIVE_S)
            await self._client.set(_manifest_name(header.key), pack_manifest(header), ex=self._ttl_s)
            return True

        stored = await self._guard.run("put", self._transfer_budget_s(len(payload)), call) is not None
        if stored:
            CACHE_BYTES.labels("written").inc(len(payload))
        return stored

    async def remove(self, key: str) -> bool | None:
        """Forget an item; whether it was here, or None when Redis did not say. Its chunks go with their TTL."""
        removed = await self._guard.run("remove", self._call_timeout_s, lambda: self._delete([key]))
        return None if removed is None else removed > 0

    async def survey(self, fingerprint: str, *, is_removed: bool = False) -> Survey | None:
        """Count what is here of one fingerprint, or remove it all; None when Redis did not answer in time.

        Walks over every manifest, in small steps that hold up nobody else's calls.
        """

        async def call() -> Survey:
            headers: list[EmbeddingHeader] = []
            names: list[bytes | str] = []
            async for name in self._client.scan_iter(match=_manifest_name("*"), count=SURVEY_STEP):
                names.append(name)
                if len(names) == SURVEY_STEP:
                    headers += await self._headers(names)
                    names.clear()
            headers += await self._headers(names)
            own = {header.key: header.num_bytes for header in headers if header.fingerprint == fingerprint}
            if is_removed:
                for start in range(0, len(own), SURVEY_STEP):
                    await self._delete(list(own)[start : start + SURVEY_STEP])
            return Survey(len(own), sum(own.values()))

        return await self._guard.run("survey", SURVEY_TIMEOUT_S, call)

    async def _headers(self, names: Sequence[bytes | str]) -> list[EmbeddingHeader]:
        """The manifests of these names that can be read."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.get(name)
            manifests: list[Reply] = list(await pipeline.execute()) if names else []
        headers = []
        for manifest in manifests:
            with contextlib.suppress(ProtocolError):
                headers.append(unpack_stored(_as_bytes(manifest), EmbeddingHeader))
        return headers

    async def _delete(self, keys: Sequence[str]) -> int:
        """Remove items; how many were here."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.delete(_manifest_name(key))
                pipeline.delete(_facts_name(key))
            return sum(list(await pipeline.execute())[::2])

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
        data = await self._guard.run_briefly(
            name, self._call_timeout_s, lambda: self._client.getex(redis_key, ex=self._ttl_s)
        )
        if data is None:
            return None
        try:
            return unpack_stored(_as_bytes(data), struct)
        except ProtocolError:
            CACHE_CALLS.labels(name, "corrupt").inc()
            return None

    async def _put_struct(self, name: str, redis_key: str, value: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(value)
        await self._guard.run(name, self._call_timeout_s, lambda: self._client.set(redis_key, data, ex=self._ttl_s))

    async def _read_chunks(self, header: EmbeddingHeader, payload: Payload) -> bool:
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


def _as_bytes(value: object) -> bytes:
    """What Redis gave for a string. Raises ProtocolError for anything else: it is not our Redis that answers."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if not isinstance(value, bytes):
        raise ProtocolError(f"Redis answered with {type(value).__name__} for a string")
    return value


def _note_damage(reason: str) -> None:
    CACHE_CALLS.labels("get", "corrupt").inc()
    logger.warning("a cached embedding was damaged", reason=reason)


def _manifest_name(key: str) -> str:
    return f"tandem:embedding:{{{key}}}"


def _chunk_name(header: EmbeddingHeader, index: int) -> str:
    return f"tandem:embedding:{{{header.key}}}:{header.checksum:08x}:{index}"


def _claim_name(key: str) -> str:
    return f"tandem:inflight:{{{key}}}"


def _checked_owner(claim: Reply) -> str | None:
    """The encoder that a claim names; None for no claim, or for something that is none."""
    if claim is None:
        return None
    try:
        return msgspec.convert(_as_bytes(claim).decode(), Id)
    except (ProtocolError, UnicodeDecodeError, msgspec.ValidationError):
        CACHE_CALLS.labels("claim", "corrupt").inc()
        return None


def _facts_name(key: str) -> str:
    return f"tandem:facts:{key}"


def _fleet_name(model: str) -> str:
    return f"tandem:fleet:{model}"
