"""A gateway that ends: nothing new, the rest in peace, and no longer than it was given."""

import asyncio

import pytest

from common.errors import Overloaded, error_info
from gateway_svc.drain import Drain
from tests.gateway_svc.fake_services import fake_fleet


async def test_what_runs_ends_and_what_comes_is_sent_elsewhere() -> None:
    drain = Drain()
    drain.enter()
    drain.enter()
    ending = asyncio.create_task(drain.run(30.0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="another will answer") as caught:
        drain.enter()
    assert error_info(caught.value).is_retryable
    assert error_info(caught.value).http_status == 503
    assert caught.value.retry_after_s
    drain.leave()
    await asyncio.sleep(0)
    assert not ending.done()
    drain.leave()
    await ending


async def test_an_idle_gateway_ends_at_once() -> None:
    async with asyncio.timeout(1.0):
        await Drain().run(30.0)


async def test_a_drain_takes_no_longer_than_it_may() -> None:
    drain = Drain()
    drain.enter()
    async with asyncio.timeout(5.0):
        await drain.run(0.01)


async def test_a_gateway_that_drains_is_not_ready_at_once() -> None:
    async with fake_fleet(num_decoders=1) as world:
        assert world.fleet.is_ready()
        world.fleet.drain.is_draining = True
        assert not world.fleet.is_ready()
        assert world.fleet.status()["draining"] is True
