"""`/autoscale/v1/{tier}`: one gateway's work, and that of all added up."""

from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from common.autoscale import Share
from common.autoscale_shares import OwnShare, ShareCollector
from common.members import Member, StaticMembers
from gateway_svc.routes.autoscale import add_autoscale_route
from tests.gateway_svc.fake_services import FakeFleet, fake_fleet


def client_for(world: FakeFleet, gateways: ShareCollector | None) -> httpx.AsyncClient:
    app = FastAPI()
    add_autoscale_route(app, world.fleet.autoscale.own, gateways)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


async def asked(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def test_one_gateway_answers_for_itself_and_for_all() -> None:
    async with fake_fleet(num_decoders=0) as world:
        other = OwnShare(gateway="gateway-2", share=Share(tier="encoder", replicas=2.0, backlog_seconds=1.0))
        own_again = OwnShare(gateway="gateway-1", share=Share(tier="encoder", replicas=50.0))
        answers = {"two": msgspec.json.encode(other), "one": msgspec.json.encode(own_again)}
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=answers[request.url.host]))
        collector = ShareCollector(StaticMembers([]), httpx.AsyncClient(transport=transport))
        collector._set_members([Member(("http://one:8000",)), Member(("http://two:8000",))])
        with world.fleet.encoders.demand.admitted("a", 4000):
            async with client_for(world, collector) as client:
                alone = await asked(client, "/autoscale/v1/encoder?scope=self")
                together = await asked(client, "/autoscale/v1/encoder")
            own = alone["share"]["replicas"]
        assert alone["gateway"] == "gateway-1"
        assert own > 0
        assert together["replicas"] == pytest.approx(2.0 + own)  # itself counts once, as it is now
        assert together["backlog_seconds"] == pytest.approx(5.0)
        assert together["gateways"] == {"asked": 2, "answered": 2}
        assert isinstance(together["desired"], int)


async def test_without_other_gateways_it_answers_for_itself() -> None:
    async with fake_fleet(num_decoders=0) as world, client_for(world, None) as client:
        for tier in ("encoder", "decoder"):
            body = await asked(client, f"/autoscale/v1/{tier}")
            assert (body["replicas"], body["desired"], body["gateways"]) == (0.0, 0, {"asked": 1, "answered": 1})
        assert (await client.get("/autoscale/v1/walrus")).status_code == 422
