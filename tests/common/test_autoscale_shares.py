"""Shares of several gateways: added up, and known to be incomplete when one does not tell its own."""

import json
from typing import Any

import httpx
import pytest

from common.autoscale_shares import ShareCollector
from common.members import Member, StaticMembers
from tests.kubernetes.stage import Clock


def gateways(answers: dict[str, Any], clock: Clock | None = None) -> ShareCollector:
    """A collector whose gateways answer so: a body, a status, or an exception."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["scope"] == "self"
        found = answers[request.url.host]
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, content=found)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=1.0)
    collector = ShareCollector(StaticMembers([]), client, clock or Clock())
    collector._set_members([Member((f"http://{host}:8000",)) for host in answers])
    return collector


def body(gateway: str, replicas: float, tier: str = "encoder") -> bytes:
    return json.dumps({"gateway": gateway, "share": {"tier": tier, "replicas": replicas}}).encode()


async def test_a_gateway_that_is_silent_for_minutes_is_not_waited_for_any_more() -> None:
    """A pod that restarts for ever stays in the list of a Service that publishes addresses that are not ready."""
    clock = Clock()
    answers: dict[str, Any] = {"a": body("g1", 1.5), "b": httpx.ConnectError("refused")}
    collector = gateways(answers, clock)
    assert not (await collector.collect("encoder")).is_complete
    clock.now += 299.0
    assert not (await collector.collect("encoder")).is_complete
    clock.now += 2.0
    assert (await collector.collect("encoder")).is_complete
    answers["b"] = body("g2", 1.0)
    assert (await collector.collect("encoder")).total.replicas == 2.5
    answers["b"] = httpx.ConnectError("refused")
    assert not (await collector.collect("encoder")).is_complete


async def test_shares_are_added_and_a_gateway_that_is_listed_twice_counts_once() -> None:
    collected = await gateways({"a": body("g1", 1.5), "b": body("g2", 2.0), "c": body("g2", 2.0)}).collect("encoder")
    assert collected.total.replicas == 3.5
    assert collected.is_complete


@pytest.mark.parametrize(
    "bad",
    [
        500,
        404,
        b"",
        b"<html>",
        b'{"gateway": "", "share": {"tier": "encoder"}}',
        b'{"gateway": "g", "share": {"tier": "encoder", "replicas": -1}}',
        b'{"gateway": "g", "share": {"tier": "encoder", "replicas": NaN}}',
        b'{"gateway": "g", "share": {"tier": "walrus"}}',
        body("g", 1.0, tier="decoder"),
        b" " * (5 << 20),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
    ],
)
async def test_an_answer_that_is_none_makes_the_sum_incomplete(bad: Any) -> None:
    collected = await gateways({"a": body("g1", 1.5), "b": bad}).collect("encoder")
    assert collected.total.replicas == 1.5
    assert not collected.is_complete
