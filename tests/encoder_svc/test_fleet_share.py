"""What encoders tell each other: one claims, the others point to it; and what is written, dropped and given up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.embedding import ExpectedEmbedding
from common.embedding_cache import EmbeddingCache
from encoder_svc.embedding_store import EmbeddingStore
from encoder_svc.fleet_share import FleetShare
from encoder_svc.pipeline import Encoded
from tests.common.sockets import background, eventually
from tests.encoder_svc.embeddings import FINGERPRINT, held, key
from tests.encoder_svc.test_pipeline import running
from tests.valkey import Valkey, running_valkey


@pytest.fixture
async def server() -> AsyncIterator[Valkey]:
    async with running_valkey() as server:
        yield server


@contextlib.asynccontextmanager
async def share_of(server: Valkey, name: str) -> AsyncIterator[tuple[FleetShare, EmbeddingStore]]:
    cache = EmbeddingCache.connect(server.url, ttl_s=100, wait_s=1.0)
    store = EmbeddingStore(1 << 20, 60.0)
    share = FleetShare(cache, store, name)
    async with background(share.run()):
        yield share, store
    await cache.close()


def expected(number: int) -> ExpectedEmbedding:
    return ExpectedEmbedding(key(number), (1, 4, 4), FINGERPRINT)


async def claims(server: Valkey) -> list[bytes]:
    return sorted(await server.client.keys("tandem:inflight:*"))


async def test_one_of_two_encoders_is_at_work_until_redis_has_the_item(server: Valkey) -> None:
    async with share_of(server, "e1") as (one, store), share_of(server, "e2") as (two, _):
        assert await one.claim(expected(1), take_over=False) is None
        assert await two.claim(expected(1), take_over=False) == "e1"
        store.put(held(1))
        one.offer(key(1))
        await one.drained()
        store.lease(key(1), "r1", 0.0)
        assert (store.num_leases, store.num_leases_only_here) == (1, 0)
        assert await two.claim(expected(1), take_over=False) == "redis"
        assert await two.claim(expected(1), take_over=True) is None


async def test_what_is_given_up_may_be_claimed_by_another(server: Valkey) -> None:
    async with share_of(server, "e1") as (one, _), share_of(server, "e2") as (two, _):
        await one.claim(expected(1), take_over=False)
        one.give_up(key(1))
        await one.drained()
        assert await claims(server) == []
        assert await two.claim(expected(1), take_over=False) is None


async def test_a_claim_that_began_again_survives_that_its_first_try_was_given_up(server: Valkey) -> None:
    async with share_of(server, "e1") as (one, _):
        await one.claim(expected(1), take_over=False)
        one.give_up(key(1))
        one._claimed.add(key(1))  # as a second try does, before the writer has had its turn
        await one.drained()
        assert len(await claims(server)) == 1


async def test_what_was_evicted_before_its_turn_is_dropped_and_not_claimed(server: Valkey) -> None:
    async with share_of(server, "e1") as (one, _):
        await one.claim(expected(1), take_over=False)
        one.offer(key(1))
        await one.drained()
        assert await claims(server) == []


async def test_an_item_that_is_elsewhere_is_not_encoded_and_leaves_nothing() -> None:
    async with running() as bench:
        bench.cache.place = "e9"
        assert await bench.start(1) == Encoded(elsewhere="e9")
        assert bench.runner.batches == []
        assert (bench.store.num_leases, bench.store.reserved_bytes) == (0, 0)
        await eventually(lambda: bench.pipeline.num_in_flight == 0)
        bench.assert_idle()
        assert not (await bench.start(1, take_over=True)).elsewhere
        assert len(bench.runner.batches) == 1


async def test_a_redis_that_does_not_answer_delays_the_preparing_of_an_item_not_at_all() -> None:
    async with running() as bench:
        bench.cache.claim_gate = asyncio.Event()
        prepared: list[str] = []
        prepare = bench.pipeline._prepare

        def noting(request: Any, source: memoryview, is_over: Any) -> Any:
            prepared.append(request.key)
            return prepare(request, source, is_over)

        bench.pipeline._prepare = noting
        task = bench.start(1)
        await eventually(lambda: prepared == [key(1)])
        bench.cache.claim_gate.set()
        assert not (await task).was_held


async def test_work_that_fails_is_given_up() -> None:
    async with running() as bench:
        result = (await asyncio.gather(bench.start(1, source=b"no picture"), return_exceptions=True))[0]
        assert isinstance(result, Exception)
        await eventually(lambda: bench.cache.claims == set())
