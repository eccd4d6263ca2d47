"""A call to Redis ends with what it was told: a client that loses a cancellation keeps nobody from ending."""

import asyncio
from collections.abc import Callable

import pytest

from common.redis_guard import RedisGuard


def fails() -> int:
    raise ConnectionError("closed while it was cancelled")


@pytest.mark.parametrize("end", [lambda: 1, fails], ids=["returns", "fails"])
async def test_a_cancellation_that_the_client_loses_is_not_lost(end: Callable[[], int]) -> None:
    guard, is_called = RedisGuard(1.0), asyncio.Event()

    async def call() -> int:
        is_called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return end()
        return 0

    task = asyncio.create_task(guard.run("get", 60.0, call))
    await is_called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_takes_too_long_is_no_cancellation() -> None:
    assert await RedisGuard(1.0).run("get", 0.01, asyncio.Event().wait) is None
