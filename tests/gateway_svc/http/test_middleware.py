"""Bodies that do not arrive, and more of them than a gateway can hold: refused in OpenAI's shape, and forgotten."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway_svc.routes.api import HttpLimits
from tests.gateway_svc.fake_backend import MODEL, FakeBackend, Harness, harness

HEADERS = {"content-type": "application/json"}
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


class Call:
    """One request straight to the application, whose client sends the given pieces of a body and then nothing."""

    def __init__(self, setup: Harness, *pieces: bytes, headers: dict[str, str] | None = None) -> None:
        self.sent: list[Any] = []
        self.all_taken = asyncio.Event()
        self._pieces = list(pieces)
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in {**HEADERS, **(headers or {})}.items()],
        }
        self.task = asyncio.create_task(setup.app(self._scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if not self._pieces:
            self.all_taken.set()
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": True}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def answer(self) -> httpx.Response:
        """What the application answered."""
        await asyncio.wait_for(self.task, 5)
        body = b"".join(message["body"] for message in self.sent[1:])
        return httpx.Response(self.sent[0]["status"], headers=self.sent[0]["headers"], content=body)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.parametrize(
    "limits",
    [HttpLimits(body_idle_s=0.05), HttpLimits(request_timeout_s=0.05)],
    ids=["pause", "whole"],
)
async def test_a_body_that_stops_arriving_is_refused_and_the_connection_closed(limits: HttpLimits) -> None:
    setup = harness(limits=limits)
    response = await Call(setup, BODY[:10]).answer()
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "body_timeout"
    assert response.headers["connection"] == "close"
    assert setup.backend.requests == []


async def test_the_wait_for_an_answer_is_no_pause_of_the_body() -> None:
    async def wait(number: int) -> None:
        await asyncio.sleep(0.02)

    setup = harness(FakeBackend(before_token=wait), limits=HttpLimits(body_idle_s=0.05))
    assert (await setup.chat()).status_code == 200


@pytest.mark.parametrize("is_declared", [True, False])
async def test_bodies_beyond_what_all_may_have_are_refused_until_there_is_room(is_declared: bool) -> None:
    setup = harness(limits=HttpLimits(max_inflight_body_bytes=1000))
    first = Call(setup, BODY + b" " * (990 - len(BODY)))
    await first.all_taken.wait()

    async def undeclared() -> AsyncIterator[bytes]:
        yield BODY

    url, content = "/v1/chat/completions", BODY if is_declared else undeclared()
    refused = await setup.client.post(url, content=content, headers=HEADERS)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["connection"] == "close"
    assert (await setup.client.get("/health")).status_code == 200
    await first.leave()
    for _ in range(20):
        assert (await setup.client.post(url, content=BODY, headers=HEADERS)).status_code == 200


async def test_a_promise_of_a_body_takes_no_room() -> None:
    setup = harness(limits=HttpLimits(max_inflight_body_bytes=1000))
    promise = Call(setup, headers={"content-length": "1000"})
    await promise.all_taken.wait()
    assert (await setup.client.post("/v1/chat/completions", content=BODY, headers=HEADERS)).status_code == 200
    await promise.leave()
