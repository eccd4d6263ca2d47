"""The gateway's view of its fleet: fingerprints with and without encoders, and probes that try elsewhere."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.embedding import FleetFacts
from common.errors import EncoderUnavailable, Overloaded, TandemError, UnsupportedMedia
from common.messages import LoadReport, MediaOptions, ProbeRequest, VideoFacts
from tests.gateway_svc.fake_services import FACTS, FINGERPRINT, FakeCache, FakeFleet, fake_fleet

KEY = "a" * 64
OTHER_MODELS = "tandem_gateway_peers_of_other_models"


async def probe(world: FakeFleet, time_s: float = 10.0) -> VideoFacts:
    return await world.fleet.probe_video(KEY, MediaOptions(), b"video", time.monotonic() + time_s)


def num_probes(world: FakeFleet) -> int:
    return sum(len(encoder.mailbox.of(ProbeRequest)) for encoder in world.encoders)


async def test_the_fingerprint_is_that_of_a_ready_encoder_and_is_remembered_in_redis() -> None:
    async with fake_fleet(num_encoders=2) as world:
        assert await world.fleet.fleet_facts() == FleetFacts(FINGERPRINT, "float32")
        await world.until(lambda: world.cache.fleet == FleetFacts(FINGERPRINT, "float32"))


async def test_the_fingerprint_comes_from_redis_when_no_encoder_is_alive() -> None:
    async with fake_fleet(cache=FakeCache(fleet=FleetFacts("e" * 64, "bfloat16"))) as world:
        assert await world.fleet.fleet_facts() == FleetFacts("e" * 64, "bfloat16")


async def test_the_fingerprint_outlives_the_last_encoder() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.encoders[0].die()
        await world.until(lambda: not world.fleet.encoders.ready())
        world.cache.fleet = None
        assert await world.fleet.fleet_facts() == FleetFacts(FINGERPRINT, "float32")


async def test_a_fingerprint_that_was_never_known_is_an_error_in_time_however_often_encoders_change() -> None:
    async with fake_fleet(encoder_wait_s=0.2) as world:

        async def flap() -> None:
            while True:
                world.fleet.encoders._changed()
                await asyncio.sleep(0.01)

        flapping = asyncio.create_task(flap())
        async with asyncio.timeout(5):
            with pytest.raises(EncoderUnavailable) as raised:
                await world.fleet.fleet_facts()
        flapping.cancel()
        assert raised.value.retry_after_s


async def test_a_probe_is_asked_once_and_remembered() -> None:
    async with fake_fleet(num_encoders=2) as world:
        assert await probe(world) == await probe(world) == FACTS
        assert num_probes(world) == 1
        assert world.cache.facts == {KEY: FACTS}


async def test_a_probe_that_fails_is_tried_at_another_encoder() -> None:
    async with fake_fleet(num_encoders=3) as world:
        asked: list[str] = []

        def answer(name: str) -> Callable[[str], TandemError | bool | None]:
            def decide(key: str) -> Any:
                asked.append(name)
                return Overloaded("busy") if len(asked) < 3 else True

            return decide

        for encoder in world.encoders:
            encoder.answer = answer(encoder.name)
        assert await probe(world) == FACTS
        assert sorted(asked) == ["encoder-0", "encoder-1", "encoder-2"]


async def test_a_probe_goes_elsewhere_when_its_encoder_dies() -> None:
    async with fake_fleet(num_encoders=2) as world:
        for encoder in world.encoders:
            encoder.answer = lambda key: None
        probing = asyncio.create_task(probe(world))
        await world.until(lambda: num_probes(world) == 1)
        for encoder in world.encoders:
            encoder.answer = lambda key: True
            if encoder.mailbox.of(ProbeRequest):
                encoder.die()
        assert await probing == FACTS


async def test_a_video_that_cannot_be_read_is_not_tried_again() -> None:
    async with fake_fleet(num_encoders=2) as world:
        for encoder in world.encoders:
            encoder.answer = lambda key: UnsupportedMedia("no video")
        with pytest.raises(UnsupportedMedia):
            await probe(world)
        assert num_probes(world) == 1


async def test_a_probe_that_every_try_fails_tells_the_last_error() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.encoders[0].answer = lambda key: Overloaded("busy")
        with pytest.raises(Overloaded, match="busy"):
            await probe(world)
        assert num_probes(world) == 4


async def test_a_probe_waits_for_an_encoder_however_often_others_come_and_go() -> None:
    async with fake_fleet(num_encoders=0, encoder_wait_s=0.2) as world:
        for _ in range(10):
            world.fleet.encoders._changed()
        probing = asyncio.create_task(probe(world))
        for _ in range(10):
            await asyncio.sleep(0.005)
            world.fleet.encoders._changed()
        assert not probing.done()
        with pytest.raises(EncoderUnavailable):
            await probing


async def test_the_state_of_the_fleet_is_told() -> None:
    async with fake_fleet(num_decoders=2, num_encoders=1) as world:
        assert world.fleet.is_ready()
        assert (world.fleet.max_model_len, world.fleet.vocab_size) == (100, 300)
        assert world.fleet.status() == {
            "model": "tiny",
            "decoders": {"ready": 2, "configured": 2, "other_models": 0},
            "encoders": {"ready": 1, "configured": 1, "other_models": 0},
            "redis": "ok",
            "draining": False,
            "discovery": {
                "encoders": {"source": "static", "members": 1},
                "decoders": {"source": "static", "members": 2},
            },
        }
        for decoder in world.decoders:
            decoder.die()
        await world.until(lambda: not world.fleet.is_ready())


async def test_members_of_another_model_get_nothing_are_told_and_count_for_nothing() -> None:
    async with fake_fleet(num_decoders=2, num_encoders=2) as world:
        fleet = world.fleet
        world.decoders[0].model = world.encoders[0].model = "another"
        world.decoders[0].say_hello()
        await world.until(lambda: len(fleet.decoders.ready) == len(fleet.encoders.ready()) == 1)
        for tier in ("decoders", "encoders"):
            assert fleet.status()[tier] == {"ready": 1, "configured": 2, "other_models": 1}
        labels = [{"role": role} for role in ("decoder", "encoder")]
        await world.until(lambda: [REGISTRY.get_sample_value(OTHER_MODELS, role) for role in labels] == [1, 1])
        for number in range(8):
            facts = await fleet.probe_video(f"{number:064x}", MediaOptions(), b"video", time.monotonic() + 5)
            assert facts == FACTS
            assert fleet.decoders.pick([]) is fleet.decoders.links[1]
        assert world.encoders[0].mailbox.of(ProbeRequest) == []
        fleet.encoders.peers[0].control.load = LoadReport(instance_id="encoder-0", patches_per_s=9e6)
        fleet.decoders.links[0].load = LoadReport(instance_id="decoder-0", running=3)
        encoder, decoder = (fleet.autoscale.share(tier) for tier in ("encoder", "decoder"))
        assert encoder.patches_per_s < 9e6
        assert [len(share.loads) for share in (encoder, decoder)] == [1, 0]
