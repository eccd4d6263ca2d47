"""Mixed requests with cancels by chance against a decoder over real sockets: nothing of them is left.

`SOAK_REQUESTS=1000` makes it the long run; the number by default suits every run of the tests.
"""

import asyncio
import os
import random

import psutil
import pytest

from common.messages import Cancel, GenerateRequest, MediaAt, MediaNeeded, TokenBatch
from tests.decoder_svc.engines import World
from tests.decoder_svc.requests import generate_request, greedy
from tests.decoder_svc.test_server import Gateway, serving

pytestmark = pytest.mark.usefixtures("steps")
NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "100"))
MAX_TOGETHER = 24
MAX_GROWTH_BYTES = 32 << 20


def request_by_chance(world: World, chance: random.Random, name: str) -> GenerateRequest:
    """Text or pictures, often with a beginning that others have too, one or more choices, bound or free."""
    start = [chance.randrange(4)] * chance.randrange(12)
    parts: list[int | list[int]] = [start]
    for _ in range(chance.choice([0, 0, 1, 2])):
        parts += [chance.randrange(3), [chance.randrange(250)]]
    ids, media = world.prompt(*parts, [1, 2])
    grammar = {"grammar_kind": "regex", "grammar": "[a-c]{2,5}"} if chance.random() < 0.15 else {}
    sampling = greedy(chance.randint(1, 5), n=chance.choice([1, 1, 1, 2, 3]), **grammar)
    return generate_request(
        ids,
        media=media,
        request_id=name,
        sampling=sampling,
        priority=chance.choice([0, 0, 1]),
        cache_salt=chance.choice([None, None, "tenant"]),
    )


class Crowd:
    """Keeps some requests open, and cancels some of them, or of their choices, at any moment."""

    def __init__(self, world: World, gateway: Gateway, chance: random.Random) -> None:
        self._world, self._gateway, self._chance = world, gateway, chance
        self._open: dict[str, set[int]] = {}
        self._numbers = iter(range(NUM_REQUESTS))
        self.num_finished = self.num_cancelled = 0
        self.rss_at_half = 0

    async def run(self) -> None:
        self._fill()
        while self._open:
            async with asyncio.timeout(20):
                message = (await self._gateway.dealer.receive()).message
            if isinstance(message, MediaNeeded):
                for key in message.keys:
                    source = "broken" if self._chance.random() < 0.1 else "enc"
                    self._gateway.send(MediaAt(request_id=message.request_id, key=key, source=source))
            elif isinstance(message, TokenBatch):
                self._note(message)
            if self._chance.random() < 0.1:
                self._cancel_one()
            self._fill()

    def _fill(self) -> None:
        while len(self._open) < MAX_TOGETHER and (number := next(self._numbers, None)) is not None:
            request = request_by_chance(self._world, self._chance, f"r{number}")
            if number == NUM_REQUESTS // 2:
                self.rss_at_half = psutil.Process().memory_info().rss
            self._open[request.request_id] = set(range(request.sampling.n))
            self._gateway.send(request)

    def _note(self, batch: TokenBatch) -> None:
        for tokens in batch.sequences:
            choices = self._open.get(tokens.request_id)
            if choices is None or tokens.finish_reason is None:
                continue
            assert tokens.error is None, tokens.error
            assert tokens.choice in choices, "a choice ended twice"
            self._close(tokens.request_id, tokens.choice)
            self.num_finished += 1

    def _cancel_one(self) -> None:
        if not self._open:
            return
        request_id = self._chance.choice(list(self._open))
        choice = min(self._open[request_id]) if self._chance.random() < 0.5 else None
        self._gateway.send(Cancel(request_id=request_id, choice=choice))
        self.num_cancelled += 1
        if choice is None:
            del self._open[request_id]
        else:
            self._close(request_id, choice)

    def _close(self, request_id: str, choice: int) -> None:
        self._open[request_id].discard(choice)
        if not self._open[request_id]:
            del self._open[request_id]


async def test_many_requests_with_cancels_leave_every_block_free_and_memory_flat(world: World) -> None:
    chance = random.Random(11)
    async with serving(world, num_blocks=60, max_tokens_per_step=48) as served:
        gateway = await served.gateway()
        crowd = Crowd(world, gateway, chance)
        await crowd.run()
        await served.until_idle()
        engine = served.server._engine
        engine.blocks.check()
        assert not engine._media.wanted
        assert not engine.pool.has_needs
        assert crowd.num_finished > 0.7 * NUM_REQUESTS
        assert crowd.num_cancelled > 0.05 * NUM_REQUESTS
        assert psutil.Process().memory_info().rss - crowd.rss_at_half < MAX_GROWTH_BYTES
