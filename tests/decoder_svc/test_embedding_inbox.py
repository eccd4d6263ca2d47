"""The inbox: one fetch for many, in the order of need, within its bytes, and nothing forgotten or leaked."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.embedding import ExpectedEmbedding, checksum, pack_manifest
from common.embedding_cache import REDIS, EmbeddingCache
from common.errors import EncoderUnavailable, ProtocolError, TandemError
from common.messages import EmbeddingHeader
from common.tensors import payload_of
from decoder_svc.embedding_inbox import EmbeddingInbox
from tests.decoder_svc.requests import FINGERPRINT, PAD_ID, generate_request, key_of, picture
from tests.valkey import running_valkey

WIDTH = 6
ITEM_BYTES = 4 * WIDTH * 4


def embedding_of(expected: ExpectedEmbedding, value: float = 1.0) -> tuple[EmbeddingHeader, bytearray]:
    assert expected.rows
    payload = bytearray(payload_of(torch.full((expected.rows, WIDTH), value)))
    header = EmbeddingHeader(
        key=expected.key,
        grid=expected.grid,
        dtype="float32",
        rows=expected.rows,
        width=WIDTH,
        levels=1,
        fingerprint=FINGERPRINT,
        checksum=checksum(payload),
        chunk_bytes=1 << 20,
    )
    return header, payload


class FakeFetcher:
    """Fetches that end when the test says so."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[tuple[EmbeddingHeader, bytearray]]] = {}
        self.started: list[tuple[str, str]] = []
        self.expected: dict[str, ExpectedEmbedding] = {}
        self.num_cancelled = 0

    async def fetch(
        self, encoder_id: str, expected: ExpectedEmbedding, timeout_s: float
    ) -> tuple[EmbeddingHeader, bytearray]:
        assert expected.key not in self.running, "one item is fetched twice at once"
        self.started.append((encoder_id, expected.key))
        self.expected[expected.key] = expected
        self.running[expected.key] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[expected.key]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            del self.running[expected.key]

    def succeed(self, key: str, value: float = 1.0) -> None:
        self.running[key].set_result(embedding_of(self.expected[key], value))

    def fail(self, key: str, error: Exception) -> None:
        self.running[key].set_exception(error)


class FakeCache:
    """Redis with what the test put in."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}

    async def get(self, expected: ExpectedEmbedding) -> tuple[EmbeddingHeader, bytearray] | None:
        value = self.held.get(expected.key)
        return None if value is None else embedding_of(expected, value)


@dataclass
class FakeListener:
    """What the inbox said."""

    deliveries: list[str] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    errors: list[tuple[str, TandemError]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def delivered(self, key: str, embedding: Tensor) -> None:
        self.deliveries.append(key)
        self.changed.set()

    def source_failed(self, request_id: str, key: str, source: str) -> None:
        self.failures.append((request_id, key, source))
        self.changed.set()

    def unusable(self, request_id: str, error: TandemError) -> None:
        self.errors.append((request_id, error))
        self.changed.set()


@dataclass
class World:
    """An inbox between fakes."""

    fetcher: FakeFetcher
    cache: FakeCache
    listener: FakeListener
    inbox: EmbeddingInbox
    held: set[str] = field(default_factory=set)

    def expect(self, request_id: str, *numbers: int) -> None:
        media = [picture(number, 5 * index) for index, number in enumerate(numbers)]
        self.inbox.expect(generate_request([PAD_ID] * 50, request_id=request_id, media=media))

    def want(self, request_id: str, *numbers: int, source: str = "enc") -> None:
        self.expect(request_id, *numbers)
        for number in numbers:
            self.inbox.locate(request_id, key_of(number), source)

    @property
    def fetching(self) -> list[int]:
        return [int(key, 16) for key in self.fetcher.running]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 (fakes have no event for it)
                await asyncio.sleep(0.001)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def complete(self, number: int) -> None:
        count = len(self.listener.deliveries)
        self.fetcher.succeed(key_of(number))
        await self.until(lambda: len(self.listener.deliveries) > count)
        await self.settle()


def make_world(max_items: float = 100) -> World:
    fetcher, cache, listener = FakeFetcher(), FakeCache(), FakeListener()
    held: set[str] = set()
    inbox = EmbeddingInbox(
        fetcher,
        cache,  # type: ignore[arg-type]
        listener,
        width=WIDTH,
        levels=1,
        dtype=torch.float32,
        max_bytes=int(max_items * ITEM_BYTES),
        is_held=held.__contains__,
    )
    return World(fetcher, cache, listener, inbox, held)


@pytest.mark.parametrize("forged", [False, True])
async def test_an_entry_of_redis_in_another_dtype_of_the_same_width_is_a_miss(forged: bool) -> None:
    world = make_world()
    async with running_valkey() as server:
        cache = EmbeddingCache.connect(server.url, ttl_s=60, wait_s=1.0)
        world.inbox._cache = cache
        media = [picture(1, 0)]
        (rows,) = (item.num_tokens for item in media)
        values = torch.full((rows, WIDTH), 1.0, dtype=torch.bfloat16)
        fields = {"rows": rows, "checksum": checksum(payload_of(values)), "dtype": "bfloat16"}
        expected = ExpectedEmbedding(key_of(1), media[0].grid, FINGERPRINT, rows=rows)
        header = msgspec.structs.replace(embedding_of(expected)[0], **fields)
        await cache.put(header, payload_of(values))
        if forged:  # read so, each 1.0 would be 1.875
            manifest = pack_manifest(msgspec.structs.replace(header, dtype="float16"))
            await server.client.set(f"tandem:embedding:{{{key_of(1)}}}", manifest)
        world.inbox.expect(generate_request([PAD_ID] * 50, media=media, wire_dtype="bfloat16"))
        world.inbox.locate("r", key_of(1), REDIS)
        await world.until(world.listener.changed.is_set)
        assert world.listener.failures == ([("r", key_of(1), REDIS)] if forged else [])
        assert world.listener.deliveries == ([] if forged else [key_of(1)])
        await world.inbox.close()
        await cache.close()


async def test_items_are_fetched_oldest_request_first_within_the_bytes() -> None:
    world = make_world(2)
    world.expect("old", 1, 2)
    world.want("young", 3)
    world.inbox.locate("old", key_of(1), "enc")
    world.inbox.locate("old", key_of(2), "enc")
    await world.settle()
    assert world.fetching == [3, 1]
    assert world.inbox.bytes_in_use == 2 * ITEM_BYTES
    world.want("younger", 4)
    await world.complete(3)
    assert world.fetching == [1], "delivered bytes count until they are released"
    world.inbox.released(ITEM_BYTES, None)
    await world.settle()
    assert world.fetching == [1, 2]
    await world.inbox.close()
    assert world.inbox.bytes_in_use == 0


async def test_a_smaller_younger_item_does_not_pass_one_that_must_wait_for_room() -> None:
    world = make_world(2.5)
    world.want("running", 1)
    world.inbox.expect(generate_request([PAD_ID] * 50, request_id="big", media=[picture(2, 0, (1, 8, 4))]))
    world.inbox.locate("big", key_of(2), "enc")
    world.want("small", 3)
    await world.settle()
    assert world.fetching == [1]
    await world.complete(1)
    world.inbox.released(ITEM_BYTES, "big")
    await world.settle()
    assert world.fetching == [2]
    await world.inbox.close()


async def test_an_item_larger_than_all_the_bytes_runs_alone_for_the_request_that_is_next() -> None:
    world = make_world(0.5)
    world.want("next", 1)
    world.want("later", 2)
    await world.settle()
    assert world.fetching == []
    world.inbox.released(0, "next")
    await world.settle()
    assert world.fetching == [1]
    await world.complete(1)
    assert world.fetching == [], "the later one waits until it is next: else bytes would grow without end"
    world.inbox.released(ITEM_BYTES, "later")
    await world.settle()
    assert world.fetching == [2]
    await world.inbox.close()


async def test_one_fetch_serves_all_requests_that_wait_for_an_item() -> None:
    world = make_world()
    for name in ("a", "b", "c"):
        world.want(name, 1)
    await world.settle()
    world.inbox.forget("a")
    await world.complete(1)
    assert world.fetcher.started == [("enc", key_of(1))]
    assert world.listener.deliveries == [key_of(1)]
    assert world.inbox.num_waiting == 0


async def test_an_item_that_the_engine_holds_is_not_fetched_again() -> None:
    world = make_world()
    world.held.add(key_of(1))
    world.want("a", 1)
    await world.settle()
    assert world.fetcher.started == []


@pytest.mark.parametrize("error", [EncoderUnavailable("gone"), TimeoutError()])
async def test_a_failed_source_is_told_to_each_request_that_named_it_and_the_others_go_on(error: Exception) -> None:
    world = make_world()
    world.cache.held[key_of(1)] = 2.0
    world.want("a", 1, source="enc-1")
    world.want("b", 1, source="enc-1")
    world.want("c", 1, source="redis")
    await world.settle()
    world.fetcher.fail(key_of(1), error)
    await world.until(lambda: world.listener.deliveries)
    assert world.listener.failures == [("a", key_of(1), "enc-1"), ("b", key_of(1), "enc-1")]
    assert world.fetcher.started == [("enc-1", key_of(1))]
    world.inbox.released(ITEM_BYTES, None)
    assert world.inbox.bytes_in_use == 0


async def test_another_source_may_be_named_after_a_failure() -> None:
    world = make_world()
    world.want("a", 1, source="enc-1")
    await world.settle()
    world.fetcher.fail(key_of(1), EncoderUnavailable("gone"))
    await world.until(lambda: world.listener.failures)
    assert world.inbox.bytes_in_use == 0
    world.inbox.locate("a", key_of(1), "enc-2")
    await world.settle()
    await world.complete(1)
    assert [source for source, _ in world.fetcher.started] == ["enc-1", "enc-2"]


@pytest.mark.parametrize("error", [ProtocolError("the embedding's width is 5, expected 6"), RuntimeError("a bug")])
async def test_what_can_never_be_used_ends_the_requests_that_wait_for_it(error: Exception) -> None:
    world = make_world()
    world.want("a", 1)
    world.want("b", 1)
    await world.settle()
    world.fetcher.fail(key_of(1), error)
    await world.until(lambda: len(world.listener.errors) == 2)
    assert [name for name, _ in world.listener.errors] == ["a", "b"]
    if isinstance(error, ProtocolError):
        assert world.listener.errors[0][1] is error
    assert (world.inbox.bytes_in_use, world.inbox.num_waiting) == (0, 0)


async def test_values_that_are_not_finite_are_refused_and_from_redis_another_source_is_asked_for() -> None:
    world = make_world()
    world.cache.held[key_of(2)] = float("nan")
    world.want("a", 1)
    world.want("b", 2, source="redis")
    await world.settle()
    world.fetcher.succeed(key_of(1), float("inf"))
    await world.until(lambda: world.listener.errors and world.listener.failures)
    assert world.listener.errors[0][0] == "a"
    assert "not finite" in world.listener.errors[0][1].message
    assert world.listener.failures == [("b", key_of(2), "redis")]


async def test_a_miss_in_redis_is_a_failed_source() -> None:
    world = make_world()
    world.want("a", 1, source="redis")
    await world.until(lambda: world.listener.failures)
    assert world.listener.failures == [("a", key_of(1), "redis")]


async def test_forgetting_the_last_request_stops_the_fetch_and_frees_its_bytes() -> None:
    world = make_world()
    world.want("a", 1)
    await world.settle()
    world.inbox.forget("a")
    await world.until(lambda: world.fetcher.num_cancelled)
    await world.settle()
    assert (world.inbox.bytes_in_use, world.inbox.num_waiting) == (0, 0)
    assert world.listener == FakeListener(changed=world.listener.changed)


async def test_a_fetch_that_is_stopped_before_it_began_leaves_nothing() -> None:
    world = make_world()
    world.want("a", 1)
    world.inbox.forget("a")
    await world.settle()
    assert (world.inbox.bytes_in_use, world.inbox.num_waiting) == (0, 0)
    world.want("b", 1)
    await world.settle()
    await world.complete(1)


async def test_a_request_that_comes_while_a_fetch_is_being_stopped_gets_a_new_one() -> None:
    world = make_world()
    world.want("a", 1)
    await world.settle()
    world.inbox.forget("a")
    world.want("b", 1)
    await world.until(lambda: len(world.fetcher.started) == 2)
    await world.complete(1)
    assert world.listener.failures == []


async def test_unknown_requests_and_keys_are_ignored() -> None:
    world = make_world()
    world.inbox.locate("nobody", key_of(1), "enc")
    world.want("a", 1)
    world.inbox.locate("a", key_of(7), "enc")
    world.inbox.forget("nobody")
    await world.settle()
    assert world.fetcher.started == [("enc", key_of(1))]
    await world.inbox.close()
    assert world.inbox.bytes_in_use == 0


@given(st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_every_request_gets_its_items_within_the_bytes_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)

    async def story() -> None:
        max_items = chance.choice([0.5, 1, 2, 3])
        world = make_world(max_items)
        wants = {f"r{n}": chance.sample(range(1, 6), chance.randint(1, 3)) for n in range(chance.randint(1, 5))}
        left = {name: {key_of(n) for n in numbers} for name, numbers in wants.items()}
        pinned: set[str] = set()

        def engine() -> None:
            """Requests are served strictly in order; what nobody needs is released."""
            while left and (first := next(iter(left))) and left[first] <= pinned:
                del left[first]
                world.inbox.forget(first)
            needed = set().union(*left.values())
            world.held.clear()
            released, kept = pinned - needed, pinned & needed
            pinned.intersection_update(kept)
            world.held.update(pinned)
            world.inbox.released(len(released) * ITEM_BYTES, next(iter(left), None))

        for name, numbers in wants.items():
            world.want(name, *numbers)
        engine()
        async with asyncio.timeout(20):
            while left:
                await world.settle()
                is_over = world.inbox.bytes_in_use > max_items * ITEM_BYTES
                assert not is_over or len(world.fetcher.running) <= 1, "only the next in need may exceed the bytes"
                for name, key, _ in world.listener.failures:
                    if name in left:
                        world.inbox.locate(name, key, "enc")
                world.listener.failures.clear()
                if world.fetcher.running:
                    key = chance.choice(sorted(world.fetcher.running))
                    if chance.random() < 0.2:
                        world.fetcher.fail(key, EncoderUnavailable("by chance"))
                    elif chance.random() < 0.1:
                        gone = chance.choice(sorted(left))
                        del left[gone]
                        world.inbox.forget(gone)
                        engine()
                    else:
                        world.fetcher.succeed(key)
                        await world.until(lambda: world.listener.deliveries)
                pinned.update(world.listener.deliveries)
                world.listener.deliveries.clear()
                engine()
        await world.settle()
        assert (world.inbox.bytes_in_use, world.inbox.num_waiting) == (0, 0)

    asyncio.run(story())


async def test_a_request_that_expects_another_shape_of_an_item_is_fetched_and_fails_alone() -> None:
    world = make_world()
    wrong = generate_request([PAD_ID] * 50, request_id="wrong", media=[picture(1, 0, (1, 4, 8))])
    world.inbox.expect(wrong)
    world.inbox.locate("wrong", key_of(1), "enc")
    await world.settle()
    world.cache.held[key_of(1)] = 1.0
    world.want("right", 1, source="redis")
    await world.until(lambda: world.listener.deliveries == [key_of(1)])
    world.fetcher.fail(key_of(1), error := ProtocolError("the embedding's rows is 4, expected 8"))
    await world.until(lambda: world.listener.errors)
    assert world.listener.errors == [("wrong", error)]
    assert (world.inbox.bytes_in_use, world.inbox.num_waiting) == (ITEM_BYTES, 0)
