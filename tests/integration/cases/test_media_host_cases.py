"""Media hosts that stall, fail or point elsewhere, through the running system."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.gateway_svc.media_host import MediaHost
from tests.integration.cases.asking import ask, error_of, text_of
from tests.integration.cases.manifest import case
from tests.paths import needs_shared

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


def from_host(case_id: str, url: str) -> dict[str, Any]:
    """A case's request, with its image at another address."""
    body = case(case_id).request()
    body["messages"][0]["content"][0]["image_url"]["url"] = url
    return body


async def test_a_host_that_drips_is_given_up_and_holds_up_nobody_else(
    client: httpx.AsyncClient, host: MediaHost
) -> None:
    began = time.monotonic()
    slow = [asyncio.create_task(ask(client, from_host("IMG-34", host.url("/drip")))) for _ in range(4)]
    num_answers, slowest_probe = 0, 0.0
    while not all(task.done() for task in slow):
        asked = time.monotonic()
        assert (await client.get("/health")).status_code == 200
        slowest_probe = max(slowest_probe, time.monotonic() - asked)
        assert text_of(await ask(client, case("API-12").body()))
        num_answers += 1
    assert slowest_probe < 1
    assert num_answers >= 3
    assert time.monotonic() - began < 10
    for task in slow:
        response = task.result()
        assert response.status_code in case("IMG-34").statuses
        assert "messages[0].content[0]" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("case_id", "path", "words"),
    [
        ("IMG-37", "/404", ["404"]),
        ("SEC-02", "/to-private", ["private or reserved"]),
        ("SEC-02", "/to-file", ["neither a data URI nor an http"]),
        ("SEC-02", "/loop", ["more than 3 times"]),
        ("IMG-37", "/empty", ["empty"]),
        ("IMG-37", "/cut", ["broke off"]),
        ("IMG-37", "/lies", []),
        ("IMG-37", "/ok", ["format is not supported"]),
    ],
)
async def test_a_host_that_misleads_is_a_fault_of_the_request(
    client: httpx.AsyncClient, host: MediaHost, case_id: str, path: str, words: list[str]
) -> None:
    num_requests = len(host.requests)
    response = await ask(client, from_host(case_id, host.url(path)))
    assert response.status_code == 400
    error = error_of(response)
    for word in ["messages[0].content[0]", *words]:
        assert word in error["message"]
    assert 1 <= len(host.requests) - num_requests <= 4
