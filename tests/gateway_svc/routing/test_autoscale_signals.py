"""The signals of one gateway: counted where work enters, and there from the start."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from common.errors import EncoderUnavailable
from common.messages import LoadReport
from gateway_svc.routing.autoscale_signals import Autoscale
from gateway_svc.routing.encoder_demand import EncoderDemand
from tests.gateway_svc.fake_services import fake_fleet


class Clock:
    """A time that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_item_counts_once_however_many_wait_for_it() -> None:
    demand = EncoderDemand(Clock())
    with demand.admitted("a", 100):
        with demand.admitted("a", 100), demand.admitted("b", 50):
            assert demand.backlog_patches == 150
        assert demand.backlog_patches == 100
    assert demand.backlog_patches == 0


def test_a_failure_is_no_backlog_any_more() -> None:
    demand = EncoderDemand(Clock())
    with pytest.raises(EncoderUnavailable), demand.admitted("a", 100):
        raise EncoderUnavailable("gone")
    assert demand.backlog_patches == 0


def test_the_rate_is_that_of_new_work_of_half_a_minute() -> None:
    clock = Clock()
    demand = EncoderDemand(clock)
    assert demand.patches_per_s() == 0.0
    clock.now = 100.0
    for key in ("a", "b", "held"):
        with demand.admitted(key, 300):
            pass
    demand.discount("held")  # an encoder had it after all
    assert demand.patches_per_s() == pytest.approx(20.0)
    clock.now = 129.0
    assert demand.patches_per_s() == pytest.approx(20.0)
    clock.now = 131.0
    assert demand.patches_per_s() == 0.0


def test_an_item_that_was_work_before_stays_counted_when_it_turns_out_held_later() -> None:
    clock = Clock()
    demand = EncoderDemand(clock)
    clock.now = 60.0
    with demand.admitted("a", 300):
        pass
    clock.now = 70.0
    with demand.admitted("a", 300):
        pass
    assert demand.patches_per_s() == pytest.approx(20.0)
    demand.discount("a")
    demand.discount("a")
    demand.discount("never seen")
    assert demand.patches_per_s() == pytest.approx(10.0)
    clock.now = 91.0
    assert demand.patches_per_s() == 0.0
    assert not demand._latest or demand._latest.keys() == {"a"}
    clock.now = 101.0
    assert demand.patches_per_s() == 0.0
    assert not demand._latest


METRICS = {
    "tandem_autoscale_replicas": [{"tier": "encoder"}, {"tier": "decoder"}],
    "tandem_autoscale_backlog_seconds": [{}],
    "tandem_autoscale_backlog_patches": [{}],
    "tandem_autoscale_offered_seconds": [{}],
    "tandem_autoscale_occupancy": [{}],
    "tandem_autoscale_held_requests": [{}],
}


async def test_signals_are_there_and_zero_without_traffic() -> None:
    """K8S-10: a metric that is absent, or 0 over 0, is ignored by the scaler, or blocks it for ever."""
    async with fake_fleet(num_decoders=0) as world:
        world.fleet.autoscale.measure()
        for name, labels in METRICS.items():
            for each in labels:
                assert REGISTRY.get_sample_value(name, each) == 0.0, name


async def test_work_is_counted_with_no_encoder_alive_at_the_configured_and_then_the_last_known_rate() -> None:
    async with fake_fleet(num_decoders=0, num_encoders=1) as world:
        encoders, autoscale = world.fleet.encoders, world.fleet.autoscale
        with encoders.demand.admitted("a", 4000):
            assert autoscale.share("encoder").backlog_seconds == pytest.approx(4.0)  # of 1000 patches a second
            encoders.peers[0].control.load = LoadReport(instance_id="encoder-0", patches_per_s=8000.0)
            assert autoscale.share("encoder").backlog_seconds == pytest.approx(0.5)
            encoders.set_members([])
            await world.until(lambda: not encoders.peers)
            assert autoscale.share("encoder").backlog_seconds == pytest.approx(0.5)
            assert autoscale.share("encoder").ready == 0


async def test_requests_that_wait_for_a_decoder_are_held() -> None:
    async with fake_fleet(num_decoders=0) as world:
        waiting = asyncio.create_task(world.fleet.wait_for_decoder(asyncio.get_running_loop().time() + 30))
        await world.until(lambda: world.fleet.decoders.num_held == 1)
        assert world.fleet.autoscale.share("decoder").replicas == 1.0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert world.fleet.autoscale.share("decoder").replicas == 0.0


async def test_a_decoder_counts_by_the_part_of_it_that_this_gateway_fills() -> None:
    async with fake_fleet(num_decoders=1) as world:
        (link,) = world.fleet.decoders.links
        link.load = LoadReport(instance_id="decoder-0", running=3, waiting=1, kv_used_tokens=400, kv_total_tokens=1000)
        assert world.fleet.autoscale.share("decoder").occupancy == 0.0  # the requests are other gateways'
        world.fleet.decoders._num_own[link] = 2
        share = world.fleet.autoscale.share("decoder")
        assert share.occupancy == pytest.approx(0.4 / 0.8 * 2 / 4)
        assert share.loads == {link.endpoint: 2.0}


async def test_a_decoder_whose_prompts_queue_is_full_however_empty_its_cache_is() -> None:
    async with fake_fleet(num_decoders=1) as world:
        (link,) = world.fleet.decoders.links
        link.load = LoadReport(instance_id="decoder-0", running=1, waiting=3, queue_s=2.5)
        world.fleet.decoders._num_own[link] = 4
        assert world.fleet.autoscale.share("decoder").occupancy == pytest.approx(2.5)


async def test_metrics_follow_the_fleet_by_themselves() -> None:
    async with fake_fleet(num_decoders=0) as world:
        assert isinstance(world.fleet.autoscale, Autoscale)
        with world.fleet.encoders.demand.admitted("a", 4000):
            await world.until(lambda: REGISTRY.get_sample_value("tandem_autoscale_backlog_patches") == 4000.0)
