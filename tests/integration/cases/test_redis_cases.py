"""Redis away, stopped, frozen, full or lying: a miss and a counter, never a failed request. And a pool of KV blocks
that holds one and a half requests: who can never fit is told so, who can waits.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio as redis

from tests.integration.cases.asking import ask, client_of, error_of, text_of, until
from tests.integration.cases.manifest import case
from tests.paths import needs_shared
from tests.stack import Stack, running_stack
from tests.valkey import Valkey

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

BLOCK_BYTES = 2 * 4 * 2 * 16 * 16 * 4  # keys and values, layers, heads, head size, tokens, float32
NUM_BLOCKS = 16  # of 16 tokens


@dataclass
class Site:
    """A system, and the Redis-protocol server that it was told of, which is not running at first."""

    stack: Stack
    client: httpx.AsyncClient
    server: Valkey
    is_redis_running: bool = False

    @property
    def redis(self) -> redis.Redis:
        """A client to look behind the cache's back."""
        return self.server.client

    async def calls(self, process: str, call: str, outcome: str) -> float:
        """A counter of calls to the cache."""
        return await self.stack.metric(process, f'tandem_cache_calls_total{{call="{call}",outcome="{outcome}"}}')

    async def ask_new(self, case_id: str, salt: str) -> httpx.Response:
        """The case's request, with a salt that makes its picture one that nobody has seen."""
        return await ask(self.client, {**case(case_id).request(), "cache_salt": f"{case_id}-{salt}"})

    async def use(self) -> None:
        """Make Redis run, and return when the gateway and the encoder use it."""
        if not self.is_redis_running:
            await self.server.start()
            self.is_redis_running = True
        salts = iter(range(1000))

        async def is_used() -> bool:
            written = await self.calls("encoder-0", "put", "ok")
            assert (await self.ask_new("RED-01", f"use {time.monotonic()} {next(salts)}")).status_code == 200
            is_written = await self.calls("encoder-0", "put", "ok") > written
            return is_written and (await self.stack.ready())["redis"] == "ok"

        await until(is_used, within_s=40)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("redis")
    environment = {"TANDEM_KV_CACHE_BYTES": str(NUM_BLOCKS * BLOCK_BYTES), "TANDEM_EMBEDDING_CACHE_BYTES": "0"}
    server = Valkey(folder, ["--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru"])
    served = {"served_model_name": "tandem-demo", "redis": server.url}
    async with (
        running_stack(folder / "stack", tiny_checkpoint, environment, **served) as stack,
        client_of(stack.url) as client,
    ):
        site = Site(stack, client, server)
        try:
            yield site
        finally:
            if site.is_redis_running:
                await server.kill()


async def test_a_system_without_redis_starts_warns_once_and_serves(site: Site) -> None:
    for number in range(3):
        assert (await site.ask_new("RED-01", str(number))).status_code == 200
    warnings = [site.stack.log(name).count("Redis is skipped") for name in ("gateway-0", "encoder-0", "decoder-0")]
    assert warnings[0] == 1
    assert max(warnings) == 1


async def test_redis_that_stops_under_load_fails_no_request_and_is_used_again(site: Site) -> None:
    await site.use()
    answers: list[int] = []
    goal = asyncio.Event()

    async def load(worker: int) -> None:
        while not goal.is_set():
            answers.append((await site.ask_new("RED-02", f"{worker} {len(answers)}")).status_code)

    async def has_more(count: int) -> None:
        target = len(answers) + count

        async def is_there() -> bool:
            return len(answers) >= target

        await until(is_there, within_s=60)

    workers = [asyncio.create_task(load(worker)) for worker in range(4)]
    await has_more(8)
    await site.server.kill()
    site.is_redis_running = False
    await has_more(12)
    await site.use()
    await has_more(8)
    goal.set()
    await asyncio.gather(*workers)
    assert set(answers) == {200}


async def test_a_frozen_redis_costs_its_time_limit_once_and_is_then_skipped(site: Site) -> None:
    await site.use()
    asked = 0

    async def seconds() -> float:
        nonlocal asked
        asked += 1
        began = time.monotonic()
        assert (await site.ask_new("RED-03", str(asked))).status_code == 200
        return time.monotonic() - began

    usual = statistics.median([await seconds() for _ in range(5)])
    site.server.freeze()
    try:
        times = [await seconds() for _ in range(20)]
    finally:
        site.server.thaw()
    assert max(times) < usual * 4 + 1.0
    assert statistics.median(times) < usual * 4 + 0.1  # most did not wait at all
    assert await site.calls("gateway-0", "probe", "skipped") > 0
    assert await site.stack.metric("gateway-0", "tandem_cache_breaker_open") == 1
    await site.use()


async def test_a_damaged_value_is_a_miss_and_counted_and_the_answer_stays_right(site: Site) -> None:
    await site.use()
    body = case("RED-04").request()

    def half(value: bytes) -> bytes:
        return value[: len(value) // 2]

    def flipped(value: bytes) -> bytes:
        middle = len(value) // 2
        return value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]

    damages = [half, lambda value: b"", flipped, lambda value: random.Random(4).randbytes(len(value))]
    for number, damage in enumerate(damages):
        asked = {**body, "cache_salt": f"RED-04 {number}"}
        await site.redis.flushall()
        right = text_of(await ask(site.client, asked))

        async def is_stored() -> bool:
            return bool(await site.redis.keys("tandem:embedding:*}"))

        await until(is_stored)
        chunks = await site.redis.keys("tandem:embedding:*:*:*")
        assert chunks
        for name in chunks:
            await site.redis.set(name, damage(await site.redis.get(name)))
        await forget_prefixes(site)
        names = ("incomplete", "corrupt")
        before = sum([await site.calls("decoder-0", "get", outcome) for outcome in names])
        response = await ask(site.client, asked)
        assert text_of(response) == right
        assert sum([await site.calls("decoder-0", "get", outcome) for outcome in names]) == before + 1


async def forget_prefixes(site: Site) -> None:
    """Fill the decoder's KV pool with other things, so that it needs embeddings again."""
    for number in range(2):
        content = f"{number} {time.monotonic()} " + "zq" * 60
        body: dict[str, Any] = {**case("SCH-01").request("then"), "max_tokens": 64, "ignore_eos": True}
        assert (await ask(site.client, {**body, "messages": [{"role": "user", "content": content}]})).status_code == 200


async def test_a_full_redis_drops_writes_counts_them_and_fails_no_request(site: Site) -> None:
    await site.use()
    limits = await site.redis.config_get("maxmemory*")
    await site.redis.config_set("maxmemory-policy", "noeviction")
    await site.redis.config_set("maxmemory", "1mb")
    try:
        before = await site.calls("encoder-0", "put", "refused")
        assert (await site.ask_new("RED-06", "full")).status_code == 200

        async def is_counted() -> bool:
            return await site.calls("encoder-0", "put", "refused") > before

        await until(is_counted)
    finally:
        await site.redis.config_set("maxmemory", limits["maxmemory"])
        await site.redis.config_set("maxmemory-policy", limits["maxmemory-policy"])
    await site.use()


async def test_two_hundred_requests_that_leave_use_up_no_connection_to_redis(site: Site) -> None:
    await site.use()
    moments = random.Random(13)

    async def leave(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moments.uniform(0.005, 0.06)):
                await site.ask_new("RED-13", str(number))

    for begin in range(0, 200, 25):
        await asyncio.gather(*(leave(number) for number in range(begin, begin + 25)))
    failed = await site.calls("gateway-0", "probe", "failed")
    for _ in range(3):
        await site.use()
    assert await site.calls("gateway-0", "probe", "failed") == failed
    assert len(await site.redis.client_list()) <= 3 * 16 + 1


async def test_a_prompt_that_the_pool_can_never_hold_is_refused_at_once(site: Site) -> None:
    entry = case("SCH-01")
    response = await ask(site.client, entry.body())
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert text_of(await ask(site.client, entry.body("then")))


async def test_two_pictures_in_a_pool_for_one_and_a_half_are_answered_as_each_alone(site: Site) -> None:
    entry = case("SCH-03")
    bodies = [{**entry.request(name), "max_tokens": 128, "ignore_eos": True} for name in ("request", "more_0")]
    alone = [text_of(await ask(site.client, body)) for body in bodies]
    before = await site.stack.metric("decoder-0", "tandem_decoder_preemptions_total")
    together = await asyncio.gather(*(ask(site.client, {**body, "cache_salt": "both"}) for body in bodies))
    assert [text_of(response) for response in together] == alone
    assert await site.stack.metric("decoder-0", "tandem_decoder_preemptions_total") > before
