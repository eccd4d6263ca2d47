"""Pulling from a producer: limits of time and room, and a clean end in every case."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from common.errors import Cancelled, ModelFailure
from gateway_svc.http.sse import MAX_PENDING, Puller, collect, encode_event


async def never() -> Any:
    """The receive side of a client that stays."""
    await asyncio.Event().wait()


async def gone() -> Any:
    """The receive side of a client that has left."""
    return {"type": "http.disconnect"}


class Producer:
    """Counts up to `limit`, then waits, ends or fails; remembers that it was closed."""

    def __init__(self, limit: int, end: Any = None) -> None:
        self.num_made = 0
        self.is_closed = False
        self._limit = limit
        self._end = end

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while self.num_made < self._limit:
                self.num_made += 1
                yield self.num_made
            if isinstance(self._end, Exception):
                raise self._end
            if self._end is not None:
                await self._end.wait()
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


async def test_a_client_that_reads_slowly_holds_the_producer_up() -> None:
    producer = Producer(5 * MAX_PENDING)
    puller = Puller(producer.items(), never)
    num_pulled = 0
    while num_pulled < 5 * MAX_PENDING:
        items = await puller.pull(1)
        num_pulled += len(items)
        assert len(items) <= MAX_PENDING
        assert producer.num_made <= num_pulled + MAX_PENDING
    with pytest.raises(StopAsyncIteration):
        await puller.pull(1)
    await puller.aclose()


async def test_a_pull_that_times_out_is_empty_and_leaves_the_producer_at_work() -> None:
    release = asyncio.Event()
    producer = Producer(0, release)
    puller = Puller(producer.items(), never)
    assert await puller.pull(0.01) == []
    release.set()
    with pytest.raises(StopAsyncIteration):
        await puller.pull(1)
    await puller.aclose()


async def test_items_come_before_the_error_that_followed_them() -> None:
    puller = Puller(Producer(2, ModelFailure("x")).items(), never)
    assert await puller.pull(1) == [1, 2]
    with pytest.raises(ModelFailure):
        await puller.pull(1)
    await puller.aclose()


async def test_a_client_that_left_cancels_and_the_producer_cleans_up() -> None:
    producer = Producer(0, asyncio.Event())
    with pytest.raises(Cancelled):
        await collect(Puller(producer.items(), gone))
    assert producer.is_closed


async def test_a_client_that_stops_reading_is_given_up_and_the_producer_cleans_up() -> None:
    producer = Producer(2 * MAX_PENDING)
    puller = Puller(producer.items(), never, stall_s=0.05)
    await asyncio.wait({puller._producer}, timeout=5)
    assert producer.is_closed
    assert len(await puller.pull(1)) == MAX_PENDING == producer.num_made
    with pytest.raises(Cancelled, match=r"read nothing of its stream for 0\.05 s"):
        await puller.pull(1)
    await puller.aclose()


async def test_closing_before_the_first_item_runs_nothing_further() -> None:
    producer = Producer(1)
    await Puller(producer.items(), never).aclose()
    assert producer.num_made == 0


def test_an_event_is_one_data_line() -> None:
    assert encode_event({"text": "a\nb\r\u2028"}) == 'data: {"text":"a\\nb\\r\u2028"}\n\n'.encode()
