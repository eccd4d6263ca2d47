"""A gateway whose peers come and go: running requests end where they run, new ones go to who is there."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import zmq.asyncio

from common.discovery import LOOK_UP_EVERY_S, DnsMembers
from common.discovery_kubernetes import KubernetesMembers
from common.kubernetes_api import connect
from common.members import MemberSource, StaticMembers
from common.messages import GenerateRequest, SamplingParams
from common.transport import Router
from decoder_svc.embedding_fetch import EncoderFetcher
from gateway_svc.routing.fleet import Fleet
from tests.common.sockets import background, hello
from tests.gateway_svc.fake_encoders import FINGERPRINT, FakeEncoder
from tests.gateway_svc.fake_services import FakeDecoder
from tests.kubernetes.fake_api import NAMESPACE, FakeApi, endpoint, endpoint_slice, fake_api
from tests.kubernetes.pods import next_host


class PlacedDecoder(FakeDecoder):
    """A fake decoder at an address of its own, as a pod has one."""

    def __init__(self, context: zmq.asyncio.Context, name: str, port: int = 0) -> None:
        super().__init__(context, name)
        self.router.close()
        self.host = next_host()
        self.router = Router(context, f"tcp://{self.host}:{port}", name="control")
        self.port = int(self.router.endpoint.rpartition(":")[2])


class World:
    """A real fleet and fake decoders and encoders, which sources tell of."""

    def __init__(self, context: zmq.asyncio.Context, decoders: MemberSource, encoders: MemberSource) -> None:
        self.context = context
        self.fleet = Fleet(
            context,
            model="tiny",
            instance_id="gateway-1",
            cache=None,
            keys=None,
            encoder_source=encoders,
            decoder_source=decoders,
        )

    @property
    def ready(self) -> list[str]:
        return sorted(link.peer.instance_id for link in self.fleet.decoders.ready if link.peer is not None)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - links have no event for all that is waited for
                await asyncio.sleep(0.005)

    def ask(self, request_id: str) -> "asyncio.Task[list[Any]]":
        request = GenerateRequest(
            request_id=request_id,
            model="tiny",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(seed=1, max_tokens=8),
            time_left_s=30,
        )
        deadline = asyncio.get_running_loop().time() + 30

        async def events() -> list[Any]:
            return [event async for event in self.fleet.generate(request, [], deadline)]

        return asyncio.create_task(events())


def placed_encoder(context: zmq.asyncio.Context, name: str, ports: Sequence[int] = (0, 0)) -> tuple[str, FakeEncoder]:
    """A fake encoder at an address of its own, and that address."""
    host = next_host()
    control, data = (Router(context, f"tcp://{host}:{port}", name="test") for port in ports)
    return host, FakeEncoder(control, data, hello("encoder", name, model="tiny", fingerprint=FINGERPRINT))


@asynccontextmanager
async def world(decoders: MemberSource | None = None, encoders: MemberSource | None = None) -> AsyncIterator[World]:
    context = zmq.asyncio.Context()
    nobody = StaticMembers([])
    found = World(context, decoders or nobody, encoders or nobody)
    try:
        async with background(found.fleet.run()):
            yield found
    finally:
        context.destroy(linger=0)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """For sockets outside of the fleet; closed also when a test fails, since what is left open waits for ever."""
    found = zmq.asyncio.Context()
    yield found
    found.destroy(linger=0)


def tell(api: FakeApi, decoder: PlacedDecoder, **conditions: bool) -> None:
    """The slice of one decoder."""
    entry = endpoint(decoder.host, decoder.name, **conditions)
    api.put(endpoint_slice(decoder.name, "decoder", [entry], {"control": decoder.port}))


def tokens(events: Sequence[Any]) -> list[int]:
    return [token for event in events for token in event.tokens]


async def test_a_request_ends_at_the_pod_that_terminates_and_new_ones_go_to_the_next() -> None:
    async with fake_api() as api:
        source = KubernetesMembers(partial(connect, api.url), NAMESPACE, "decoder", ["control"])
        async with world(source) as w:
            old, new = PlacedDecoder(w.context, "old"), PlacedDecoder(w.context, "new")
            async with background(old.run(), new.run()):
                tell(api, old)
                await w.until(lambda: w.ready == ["old"])
                running = w.ask("r1")
                first = await old.request()
                old.give(first, 0, [5])
                tell(api, new)
                await w.until(lambda: w.ready == ["new", "old"])
                tell(api, old, ready=False, serving=True, terminating=True)
                await w.until(lambda: w.ready == ["new"])  # though it says itself that it is ready
                later = w.ask("r2")
                second = await new.request()
                new.give(second, 0, [7], finish_reason="length")
                assert tokens(await later) == [7]
                api.delete("old")  # Kubernetes may forget it while its last answer runs
                await asyncio.sleep(0.05)
                old.give(first, 1, [6], finish_reason="length")
                assert tokens(await running) == [5, 6]
                assert len(old.mailbox.of(GenerateRequest)) == 1
                await w.until(lambda: len(w.fleet.decoders.links) == 1)


async def test_the_fleet_goes_on_with_whom_it_knows_while_the_api_server_is_away() -> None:
    async with fake_api() as api:
        source = KubernetesMembers(
            partial(connect, api.url), NAMESPACE, "decoder", ["control"], first_pause_s=0.01, longest_pause_s=0.05
        )
        async with world(source) as w:
            decoder = PlacedDecoder(w.context, "d")
            async with background(decoder.run()):
                tell(api, decoder)
                await w.until(lambda: w.ready == ["d"])
                await api.stop()
                await w.until(lambda: source.status()["failing"])
                asked = w.ask("r1")
                decoder.give(await decoder.request(), 0, [9], finish_reason="length")
                assert tokens(await asked) == [9]
                shown = w.fleet.status()["discovery"]
                assert shown["decoders"]["failing"] == "unreachable"  # type: ignore[index]


async def test_an_encoder_that_restarts_at_another_address_behind_its_name_is_used_again_within_10_s(
    context: zmq.asyncio.Context,
) -> None:
    """K8S-08: the name leads elsewhere, and neither gateways nor decoders are restarted.

    A decoder fetches from the encoder that it has never met before. What production waits longer for the next look-up
    is added to the time.
    """
    host, first = placed_encoder(context, "first")
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in first.member.endpoints]
    answer = [host]

    def name() -> DnsMembers:
        return DnsMembers("encoder.shop", ports, every_s=0.1, look_up=lambda host: list(answer))

    fetcher = EncoderFetcher(context, lambda: hello("decoder", "d"), source=name())
    async with world(encoders=name()) as w, background(fetcher.run()):
        async with background(first.run()):
            await w.until(lambda: list(w.fleet.encoders.ready()) == ["first"] and fetcher.encoder_ids == ["first"])
        first.close()
        host, second = placed_encoder(context, "second", ports)
        async with background(second.run()):
            answer[:] = [host]
            began = time.monotonic()
            await w.until(lambda: list(w.fleet.encoders.ready()) == ["second"] == fetcher.encoder_ids)
            assert time.monotonic() - began + LOOK_UP_EVERY_S < 10.0
            await w.until(lambda: len(w.fleet.encoders.peers) == 1)


async def test_a_decoder_that_restarts_at_another_address_behind_its_name_is_used_again(
    context: zmq.asyncio.Context,
) -> None:
    """An old connection that keeps trying the old address is left, and nobody else is restarted."""
    answer: list[str] = []
    with_port: list[int] = []
    first = PlacedDecoder(context, "first")
    with_port.append(first.port)
    answer.append(first.host)
    source = DnsMembers("decoder.shop", with_port, every_s=0.02, look_up=lambda host: list(answer))
    async with world(source) as w:
        async with background(first.run()):
            await w.until(lambda: w.ready == ["first"])
        first.die()
        second = PlacedDecoder(w.context, "second", port=first.port)
        async with background(second.run()):
            answer[:] = [second.host]
            await w.until(lambda: w.ready == ["second"])
            asked = w.ask("r1")
            second.give(await second.request(), 0, [3], finish_reason="length")
            assert tokens(await asked) == [3]
            await w.until(lambda: len(w.fleet.decoders.links) == 1)
