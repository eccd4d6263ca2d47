"""The cache against a real server that is killed, frozen, full or holds damaged values: a miss, never an error."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from common.embedding import CHUNK_BYTES, ExpectedEmbedding, FleetFacts, checksum, pack_manifest
from common.embedding_cache import EmbeddingCache, Survey
from common.errors import ConfigError
from common.messages import EmbeddingHeader, VideoFacts
from common.redis_guard import CACHE_CALLS, Breaker
from tests.paths import SHARED, needs_shared
from tests.valkey import Valkey, running_valkey

CALL_BUDGET_S = 0.25
TTL_S = 1000
FACTS = VideoFacts(grid=(2, 4, 6), frame_indices=[0, 1, 2, 3], timestamps=[0.25, 1.25])


@pytest.fixture
async def server() -> AsyncIterator[Valkey]:
    async with running_valkey() as server:
        yield server


@pytest.fixture
async def cache(server: Valkey) -> AsyncIterator[EmbeddingCache]:
    cache = EmbeddingCache.connect(server.url, ttl_s=TTL_S, wait_s=1.0)  # on a busy machine as well
    yield cache
    await cache.close()


def embedding(name: str = "a", num_bytes: int = 2 * CHUNK_BYTES + 4096) -> tuple[EmbeddingHeader, bytes]:
    """Random bytes and their header."""
    payload = os.urandom(num_bytes)
    header = EmbeddingHeader(
        key=name * 64,
        grid=(1, 4, 4),
        dtype="float32",
        rows=num_bytes // 1024,
        width=256,
        levels=3,
        fingerprint="f" * 64,
        checksum=checksum(payload),
        chunk_bytes=CHUNK_BYTES,
    )
    assert header.num_bytes == num_bytes
    return header, payload


def expected(header: EmbeddingHeader, **changes: Any) -> ExpectedEmbedding:
    names = ("key", "grid", "fingerprint", "rows", "width", "levels", "dtype")
    return ExpectedEmbedding(**{**{name: getattr(header, name) for name in names}, **changes})


def count(call: str, outcome: str) -> float:
    return CACHE_CALLS.labels(call, outcome)._value.get()


def manifest_name(header: EmbeddingHeader) -> str:
    return f"tandem:embedding:{{{header.key}}}"


def chunk_name(header: EmbeddingHeader, index: int) -> str:
    return f"{manifest_name(header)}:{header.checksum:08x}:{index}"


async def test_what_was_put_is_got_and_probed(cache: EmbeddingCache) -> None:
    header, payload = embedding()
    assert await cache.get(expected(header)) is None
    assert await cache.put(header, memoryview(payload))
    assert await cache.get(expected(header)) == (header, payload)
    other = expected(header, key="b" * 64)
    assert await cache.probe([other, expected(header), other]) == {header.key}
    assert await cache.probe([]) == set()
    assert cache.is_available


async def test_what_one_process_put_another_gets(server: Valkey, cache: EmbeddingCache) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    another = EmbeddingCache.connect(server.url, ttl_s=TTL_S)
    assert await another.get(expected(header)) == (header, payload)
    await another.close()


async def test_all_items_of_a_request_are_looked_for_in_one_round_trip(server: Valkey) -> None:
    turns: list[str] = []  # who spoke, each time that it was the other before

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        while data := await reader.read(1 << 16):
            if turns[-1:] != [name]:
                turns.append(name)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, questions, "cache"), pump(answers, writer, "redis"))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        cache = EmbeddingCache.connect(f"redis://127.0.0.1:{port}", ttl_s=TTL_S, wait_s=1.0)
        wanted = [expected(embedding()[0], key=f"{number:064x}") for number in range(40)]
        await cache.probe(wanted)  # connects
        turns.clear()
        assert await cache.probe(wanted) == set()
        assert turns == ["cache", "redis"]
        await cache.close()


async def test_probing_and_reading_refresh_the_time_to_live(server: Valkey, cache: EmbeddingCache) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    names = [manifest_name(header), *(chunk_name(header, index) for index in range(3))]
    assert sorted(await server.client.keys()) == sorted(name.encode() for name in names)
    for name in names:
        await server.client.expire(name, 10)
    await cache.probe([expected(header)])
    assert await server.client.ttl(names[0]) > TTL_S - 10
    await server.client.expire(names[0], 10)
    await cache.get(expected(header))
    assert all([await server.client.ttl(name) > TTL_S - 10 for name in names])
    assert await server.client.ttl(names[1]) > await server.client.ttl(names[0])


async def test_the_manifest_is_written_last(server: Valkey, cache: EmbeddingCache) -> None:
    header, payload = embedding(num_bytes=3 * 1024)
    header = msgspec.structs.replace(header, chunk_bytes=1024)  # short lines, for the monitor's sake
    async with server.client.monitor() as monitor:
        await cache.put(header, memoryview(payload))
        keys = [command["command"].split()[1] async for command in _first(monitor.listen(), 4)]
    assert keys == [*(chunk_name(header, index) for index in range(3)), manifest_name(header)]


async def _first(commands: Any, wanted: int) -> AsyncIterator[Any]:
    """The first SET commands that a monitor hears."""
    async with asyncio.timeout(10):
        async for command in commands:
            if command["command"].startswith("SET "):
                yield command
                wanted -= 1
            if wanted == 0:
                return


DAMAGES: list[tuple[str, Callable[[bytes], bytes | None]]] = [
    ("half", lambda value: value[: len(value) // 2]),
    ("empty", lambda value: b""),
    (
        "flipped",
        lambda value: value[: len(value) // 2] + bytes([value[len(value) // 2] ^ 1]) + value[len(value) // 2 + 1 :],
    ),
    ("random", lambda value: os.urandom(len(value))),
    ("longer", lambda value: value + b"x"),
    ("evicted", lambda value: None),
    ("deep", lambda value: b"\x81\xa3new" + b"\x91" * 100_000),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=[name for name, _ in DAMAGES])
@pytest.mark.parametrize("piece", ["manifest", "first", "last"])
async def test_a_damaged_value_is_a_miss(
    server: Valkey, cache: EmbeddingCache, name: str, damage: Callable[[bytes], bytes | None], piece: str
) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    place = {"manifest": manifest_name(header), "first": chunk_name(header, 0), "last": chunk_name(header, 2)}[piece]
    value = await server.client.get(place)
    assert isinstance(value, bytes)
    damaged = damage(value)
    await (server.client.delete(place) if damaged is None else server.client.set(place, damaged))
    assert await cache.get(expected(header)) is None
    assert cache.is_available
    if piece == "manifest" and name != "flipped":  # a flipped bit may leave a valid manifest of other bytes
        assert await cache.probe([expected(header)]) == set()
    assert await cache.put(header, memoryview(payload))
    assert await cache.get(expected(header)) == (header, payload)


async def test_damage_is_counted(server: Valkey, cache: EmbeddingCache) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    await server.client.setrange(chunk_name(header, 0), 100, b"\0\0\0\0\0\0\0\0")
    corrupt, incomplete = count("get", "corrupt"), count("get", "incomplete")
    await cache.get(expected(header))
    await server.client.delete(chunk_name(header, 0))
    await cache.get(expected(header))
    assert (count("get", "corrupt"), count("get", "incomplete")) == (corrupt + 1, incomplete + 1)


@needs_shared
async def test_a_pickle_in_place_of_a_value_is_a_miss(
    server: Valkey, cache: EmbeddingCache, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = (SHARED / "cases" / "SEC-08" / "canary.pkl").read_bytes()
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    await server.client.set(chunk_name(header, 0), canary)
    assert await cache.get(expected(header)) is None
    for name in (manifest_name(header), f"tandem:facts:{header.key}", "tandem:fleet:m"):
        await server.client.set(name, canary)
    assert await cache.get(expected(header)) is None
    assert await cache.probe([expected(header)]) == set()
    assert await cache.get_video_facts(header.key) is None
    assert await cache.get_fleet("m") is None
    output = capfd.readouterr()
    assert "CANARY" not in output.out + output.err


@pytest.mark.parametrize(
    "change",
    [
        {"key": "b" * 64},
        {"fingerprint": "0" * 64},
        {"grid": (1, 2, 8)},
        {"rows": 1},
        {"width": 1},
        {"levels": 0},
        {"dtype": "int8"},
    ],
)
async def test_a_manifest_that_is_not_what_was_expected_is_a_miss(
    server: Valkey, cache: EmbeddingCache, change: dict[str, Any]
) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    await server.client.set(manifest_name(header), pack_manifest(msgspec.structs.replace(header, **change)))
    assert await cache.get(expected(header)) is None
    assert await cache.probe([expected(header)]) == set()


async def test_a_manifest_that_swaps_the_dtype_for_one_of_the_same_width_is_a_miss(
    server: Valkey, cache: EmbeddingCache
) -> None:
    header, payload = embedding()
    header = msgspec.structs.replace(header, dtype="bfloat16", width=2 * header.width)
    await cache.put(header, memoryview(payload))
    assert await cache.get(expected(header)) is not None
    forged = msgspec.structs.replace(header, dtype="float16")
    assert forged.num_bytes == header.num_bytes
    await server.client.set(manifest_name(header), pack_manifest(forged))
    assert await cache.get(expected(header)) is None
    assert await cache.probe([expected(header)]) == set()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
async def test_a_manifest_of_a_dtype_of_another_size_is_a_miss_also_for_one_who_does_not_know_the_dtype(
    server: Valkey, cache: EmbeddingCache, dtype: str
) -> None:
    header, payload = embedding()
    await cache.put(header, memoryview(payload))
    await server.client.set(manifest_name(header), pack_manifest(msgspec.structs.replace(header, dtype=dtype)))
    assert await cache.get(expected(header, dtype=None)) is None


async def test_a_manifest_of_gigabytes_allocates_nothing(server: Valkey, cache: EmbeddingCache) -> None:
    header, _ = embedding()
    lie = msgspec.structs.replace(header, rows=1 << 24, width=1 << 20)
    await server.client.set(manifest_name(header), pack_manifest(lie))
    assert await cache.get(expected(header)) is None


async def test_of_many_encoders_that_claim_a_key_at_once_one_gets_it(server: Valkey) -> None:
    header, _ = embedding()
    caches = [EmbeddingCache.connect(server.url, ttl_s=TTL_S, wait_s=1.0) for _ in range(8)]
    places = await asyncio.gather(*(cache.claim(expected(header), f"e{i}") for i, cache in enumerate(caches)))
    (winner,) = [f"e{index}" for index, place in enumerate(places) if place is None]
    assert set(places) == {None, winner}
    located = await caches[0].locate([expected(header), expected(header, key="b" * 64)])
    assert (located.cached, located.in_work) == (set(), {header.key: winner})
    for cache in caches:
        await cache.close()


async def test_a_claim_ends_by_itself_by_its_owner_or_by_what_is_stored(server: Valkey, cache: EmbeddingCache) -> None:
    header, payload = embedding()
    name = f"tandem:inflight:{{{header.key}}}"
    assert await cache.claim(expected(header), "e1") is None
    assert await cache.claim(expected(header), "e1") is None
    assert 0 < await server.client.pttl(name) <= 10_000
    await server.client.pexpire(name, 100)
    await cache.renew_claims([header.key], "e1")
    assert await server.client.pttl(name) > 5000
    assert await cache.claim(expected(header), "e2") == "e1"
    await cache.end_claim(header.key)
    assert await cache.claim(expected(header), "e2") is None
    await cache.put(header, memoryview(payload))
    assert await cache.claim(expected(header), "e1") == "redis"
    located = await cache.locate([expected(header)])
    assert (located.cached, located.in_work) == ({header.key}, {})


async def test_a_claim_is_taken_over_from_an_owner_and_from_what_is_stored(cache: EmbeddingCache) -> None:
    header, payload = embedding()
    await cache.claim(expected(header), "e1")
    assert await cache.claim(expected(header), "e2", take_over=True) is None
    assert (await cache.locate([expected(header)])).in_work == {header.key: "e2"}
    await cache.put(header, memoryview(payload))
    assert await cache.claim(expected(header), "e3", take_over=True) is None


@pytest.mark.parametrize("claim", [b"", b"x" * 129, b"\xff\xfe"])
async def test_a_claim_that_names_nobody_is_none(server: Valkey, cache: EmbeddingCache, claim: bytes) -> None:
    header, _ = embedding()
    await server.client.set(f"tandem:inflight:{{{header.key}}}", claim)
    assert (await cache.locate([expected(header)])).in_work == {}
    assert await cache.claim(expected(header), "e1") is None


async def test_a_frozen_server_costs_a_request_its_short_wait_and_the_next_ones_nothing(server: Valkey) -> None:
    """Item by item: what a request waits for is heard within 20 ms or not at all."""
    header, _ = embedding()
    cache = EmbeddingCache.connect(server.url, ttl_s=TTL_S, wait_s=0.02)
    await cache.put_video_facts("k", FACTS)  # connects
    server.freeze()
    skipped, times = count("probe", "skipped"), []
    for _ in range(5):
        began = time.monotonic()
        assert await cache.probe([expected(header)]) == set()
        times.append(time.monotonic() - began)
    assert 0.015 < times[0] < CALL_BUDGET_S  # a busy machine may take its share of it
    assert min(times[1:]) < 0.01
    assert count("probe", "skipped") == skipped + 4
    assert not cache.is_available
    server.thaw()
    await comes_back(cache)
    await cache.close()


async def test_facts_and_fleet_are_remembered(server: Valkey, cache: EmbeddingCache) -> None:
    assert await cache.get_video_facts("k") is None
    await cache.put_video_facts("k", FACTS)
    assert await cache.get_video_facts("k") == FACTS
    assert await cache.get_fleet("m") is None
    await cache.put_fleet("m", FleetFacts("f" * 64, "float32"))
    assert await cache.get_fleet("m") == FleetFacts("f" * 64, "float32")
    assert 0 < await server.client.ttl("tandem:facts:k") <= TTL_S
    await server.client.set("tandem:facts:k", b"\xc1garbage")
    assert await cache.get_video_facts("k") is None


# A server that is full, gone or frozen


async def test_a_full_server_drops_the_write_and_still_reads() -> None:
    header, payload = embedding("b")
    async with running_valkey("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        cache = EmbeddingCache.connect(server.url, ttl_s=TTL_S)
        small_header, small = embedding("a", 1024)
        await cache.put(small_header, memoryview(small))
        refused = count("put", "refused")
        for _ in range(3):
            assert not await cache.put(header, memoryview(payload))
        assert count("put", "refused") == refused + 3
        assert cache.is_available
        assert await cache.get(expected(header)) is None
        assert await cache.get(expected(small_header)) == (small_header, small)
        await cache.put_video_facts("k", FACTS)
        await cache.close()


def every_call(cache: EmbeddingCache) -> list[tuple[str, Callable[[], Awaitable[Any]], Any]]:
    header, payload = embedding("c", 1024)
    return [
        ("probe", lambda: cache.probe([expected(header)]), set()),
        ("get", lambda: cache.get(expected(header)), None),
        ("put", lambda: cache.put(header, memoryview(payload)), False),
        ("facts", lambda: cache.get_video_facts("k"), None),
        ("facts", lambda: cache.put_video_facts("k", FACTS), None),
        ("fleet", lambda: cache.get_fleet("m"), None),
        ("fleet", lambda: cache.put_fleet("m", FleetFacts("f" * 64, "float32")), None),
    ]


async def fails_within(cache_of: Callable[[], EmbeddingCache], budget_s: float) -> None:
    """Each call, as the first that meets the trouble, gives its miss in time; the next ones are skipped."""
    for index in range(7):
        cache = cache_of()
        name, call, miss = every_call(cache)[index]
        began = time.monotonic()
        assert await call() == miss
        assert time.monotonic() - began < budget_s + 1.0
        assert not cache.is_available
        skipped = count(name, "skipped")
        assert await call() == miss
        assert count(name, "skipped") == skipped + 1
        await cache.close()


async def comes_back(cache: EmbeddingCache) -> None:
    header, payload = embedding("d", 1024)
    async with asyncio.timeout(15):
        while True:
            if await cache.put(header, memoryview(payload)):
                break
            await asyncio.sleep(0.02)
    assert await cache.get(expected(header)) == (header, payload)
    assert cache.is_available


async def test_a_server_that_is_not_there_is_a_miss(server: Valkey, cache: EmbeddingCache) -> None:
    await cache.put_video_facts("k", FACTS)
    await server.kill()
    await fails_within(lambda: EmbeddingCache.connect(server.url, ttl_s=TTL_S), CALL_BUDGET_S)
    assert await cache.get_video_facts("k") is None
    await server.start()
    await comes_back(cache)


async def test_a_frozen_server_costs_its_budget_once(server: Valkey, cache: EmbeddingCache) -> None:
    """RED-03: connections are accepted and nothing is ever answered, for new connections and for old ones."""
    await cache.put_video_facts("k", FACTS)
    server.freeze()
    short = {"call_timeout_s": CALL_BUDGET_S, "transfer_timeout_s": CALL_BUDGET_S}
    await fails_within(lambda: _with_budgets(server, **short), CALL_BUDGET_S)
    began = time.monotonic()
    assert await cache.get_video_facts("k") is None
    assert await cache.get_video_facts("k") is None
    assert time.monotonic() - began < CALL_BUDGET_S + 1.0
    server.thaw()
    await comes_back(cache)


def _with_budgets(server: Valkey, **budgets: float) -> EmbeddingCache:
    whole = EmbeddingCache.connect(server.url, ttl_s=TTL_S)
    return EmbeddingCache(whole._client, ttl_s=TTL_S, reader=whole._reader, **budgets)


async def test_many_calls_that_meet_a_frozen_server_together_pause_it_once(
    server: Valkey, cache: EmbeddingCache
) -> None:
    await cache.put_video_facts("k", FACTS)
    server.freeze()
    began = time.monotonic()
    assert await asyncio.gather(*(cache.get_video_facts("k") for _ in range(100))) == [None] * 100
    assert time.monotonic() - began < CALL_BUDGET_S + 4.0  # a hundred calls one after another would take 25 s
    server.thaw()
    async with asyncio.timeout(5):  # not the ten seconds of a hundred failures in a row
        while True:
            if await cache.get_video_facts("k") == FACTS:
                break
            await asyncio.sleep(0.02)


async def test_cancelled_calls_leave_every_connection_usable(cache: EmbeddingCache) -> None:
    """RED-13, and redis-py#2665: no reply of a call that was cancelled may reach another one."""
    stored = [embedding(name, 4096) for name in "abcdef"]
    for header, payload in stored:
        await cache.put(header, memoryview(payload))
    for number in range(200):
        header, _ = stored[number % len(stored)]
        task = asyncio.create_task(cache.get(expected(header)) if number % 2 else cache.probe([expected(header)]))
        for _ in range(number % 23):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for _ in range(4):
        results = await asyncio.gather(*(cache.get(expected(header)) for header, _ in stored for _ in range(8)))
        assert results == [item for item in stored for _ in range(8)]
    assert cache.is_available


async def test_more_calls_than_connections_are_all_answered(server: Valkey) -> None:
    cache = _with_budgets(server, call_timeout_s=10.0, wait_s=10.0)  # what counts is that each has its turn
    header, payload = embedding("a", 4096)
    await cache.put(header, memoryview(payload))
    assert await asyncio.gather(*(cache.probe([expected(header)]) for _ in range(100))) == [{header.key}] * 100
    await cache.close()


@pytest.mark.parametrize("url", ["http://x", "redis://h:port", "nonsense"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="Redis URL is not valid"):
        EmbeddingCache.connect(url, ttl_s=1)


# The breaker


def test_a_breaker_pauses_longer_with_each_failure_in_a_row_and_forgets_at_success() -> None:
    breaker = Breaker(first_s=1.0, longest_s=3.0)
    assert breaker.is_closed
    assert breaker.record_failure(10.0)
    assert not breaker.is_closed
    assert (breaker.allows(10.9), breaker.allows(11.0)) == (False, True)
    assert not breaker.record_failure(11.0)
    assert (breaker.allows(12.9), breaker.allows(13.0)) == (False, True)
    assert not breaker.record_failure(13.0)
    assert (breaker.allows(15.9), breaker.allows(16.0)) == (False, True)
    breaker.record_success()
    assert breaker.is_closed
    assert breaker.record_failure(20.0)
    assert breaker.allows(21.0)


def test_failures_of_calls_that_began_together_count_once() -> None:
    breaker = Breaker(first_s=1.0, longest_s=100.0)
    assert [breaker.record_failure(10.0 + delay) for delay in (0.0, 0.1, 0.2, 0.3)] == [True, False, False, False]
    assert breaker.allows(11.0)


@pytest.mark.parametrize(
    "reply",
    [b":7\r\n", b"$-5\r\n", b"-ASK 1 x\r\n", b"*1\r\n:3\r\n", b"+OK\r\n", b"%1\r\n+a\r\n:1\r\n", b"junk\r\n", b""],
)
async def test_whatever_answers_in_the_place_of_redis_is_a_miss(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(reply * 4)
            await writer.drain()
            if not reply:
                break
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    header, payload = embedding(num_bytes=4096)
    reads: list[Callable[[EmbeddingCache], Awaitable[object]]] = [
        lambda cache: cache.get(expected(header)),
        lambda cache: cache.probe([expected(header)]),
        lambda cache: cache.get_fleet("tiny"),
        lambda cache: cache.get_video_facts("a" * 64),
    ]

    async def meet(read: Callable[[EmbeddingCache], Awaitable[object]]) -> None:
        cache = EmbeddingCache.connect(url, ttl_s=TTL_S)
        assert not await read(cache)
        await cache.put(header, memoryview(payload))  # whatever it answers, it raises nothing
        await cache.close()

    await asyncio.gather(*map(meet, reads))
    server.close()


async def test_fleet_facts_of_another_version_are_a_miss(server: Valkey, cache: EmbeddingCache) -> None:
    await cache.put_fleet("tiny", FleetFacts("v2:" + "a" * 64, "float32"))
    assert await cache.get_fleet("tiny") is None


async def test_an_item_is_forgotten_by_its_key(cache: EmbeddingCache) -> None:
    header, payload = embedding("a")
    await cache.put(header, memoryview(payload))
    await cache.put_video_facts(header.key, FACTS)
    assert await cache.remove(header.key) is True
    assert await cache.get(expected(header)) is None
    assert await cache.get_video_facts(header.key) is None
    assert await cache.remove(header.key) is False


async def test_a_survey_counts_and_removes_one_fingerprint_s_items_alone(cache: EmbeddingCache, server: Valkey) -> None:
    headers = []
    for name, fingerprint in (("a", "1" * 64), ("b", "1" * 64), ("c", "2" * 64)):
        header, payload = embedding(name, 4096)
        headers.append(msgspec.structs.replace(header, fingerprint=fingerprint))
        await cache.put(headers[-1], memoryview(payload))
    assert await cache.survey("1" * 64) == Survey(2, 8192)
    assert await cache.survey("1" * 64, is_removed=True) == Survey(2, 8192)
    assert await cache.survey("1" * 64) == Survey(0, 0)
    assert await cache.survey("2" * 64) == Survey(1, 4096)


async def test_without_redis_nothing_is_known(cache: EmbeddingCache, server: Valkey) -> None:
    await server.kill()
    assert await cache.remove("a" * 64) is None
    assert await cache.survey("1" * 64) is None
