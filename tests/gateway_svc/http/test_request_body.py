"""Bodies as they arrive: large ones hold up nobody, too many values are refused before they cost anything."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from common.errors import InvalidRequest
from gateway_svc.http.request_body import INLINE_BYTES, MAX_SEPARATORS, parse_large
from gateway_svc.schemas.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_PARTS_IN_ALL, MAX_TOOLS, ChatCompletionRequest
from tests.gateway_svc.fake_backend import MODEL, Harness, harness

TURN = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
PADDING = " " * INLINE_BYTES


def body_of(**fields: Any) -> bytes:
    """A body that is large enough for a thread."""
    return json.dumps({"model": MODEL, "messages": [TURN], "user": PADDING, **fields}).encode()


async def posted(setup: Harness, body: bytes) -> httpx.Response:
    return await setup.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}
    )


@contextlib.asynccontextmanager
async def worst_lag() -> AsyncIterator[list[float]]:
    """The longest time that the event loop kept a task waiting, once the block has ended.

    Counted in CPU time of all threads, so that other processes on a busy machine do not matter.
    """
    lags = [0.0]

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.005)
            lags[0] = max(lags[0], time.process_time() - before)

    ticking = asyncio.create_task(tick())
    try:
        yield lags
    finally:
        ticking.cancel()


async def test_a_huge_data_uri_holds_up_nobody() -> None:
    url = "data:image/png;base64," + "A" * (20 << 20)
    body = body_of(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    setup = harness()
    async with worst_lag() as lags:
        response = await posted(setup, body)
    assert response.json()["error"]["code"] == "unsupported_media"
    assert lags[0] < 0.3


async def test_a_hundred_thousand_messages_are_refused_and_hold_up_nobody() -> None:
    body = body_of(messages=[TURN] * 100_000)
    setup = harness()
    async with worst_lag() as lags:
        response = await posted(setup, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert f"100000 items, above the limit of {MAX_MESSAGES}" in response.json()["error"]["message"]
    assert lags[0] < 0.3


async def test_more_values_than_a_parser_should_see_are_refused_before_it_sees_them() -> None:
    body = b'{"model": "tandem-demo", "messages": [' + b"{}," * (10 << 20) + b"{}]}"
    setup = harness()
    async with worst_lag() as lags:
        response = await posted(setup, body)
    assert response.status_code == 400
    assert f"more than {MAX_SEPARATORS} commas" in response.json()["error"]["message"]
    assert lags[0] < 0.3


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"messages": [TURN] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
        ({"messages": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]}, "messages[0].content", MAX_PARTS),
        ({"messages": [TURN, {"role": "assistant", "tool_calls": [0] * 5000}]}, "messages[1].tool_calls", MAX_PARTS),
        ({"messages": [{"role": "user", "content": [PART] * 4096}] * 5}, "messages[4].content", MAX_PARTS_IN_ALL),
        ({"tools": [{}] * (MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
    ],
    ids=["messages", "parts", "tool calls", "parts in all", "tools"],
)
async def test_a_list_beyond_its_limit_is_refused_by_name(fields: dict[str, Any], param: str, limit: int) -> None:
    setup = harness()
    response = await posted(setup, body_of(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert str(limit) in response.json()["error"]["message"]
    assert setup.backend.requests == []


async def test_a_large_body_is_served_like_a_small_one() -> None:
    setup = harness()
    assert (await posted(setup, body_of())).json()["choices"] == (await setup.chat()).json()["choices"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (body_of(temperature=-1), "temperature", "temperature"),
        (body_of(messages=[{"role": "robot", "content": "a"}]), "messages[0].role", "messages[0].role"),
        (body_of(metadata=[{"a": {}}]), "metadata", "metadata"),
        (body_of()[:-1], "not valid JSON", None),
        (body_of() + b"x", "not valid JSON, at byte", None),
        (body_of(temperature=float("nan")), "not valid JSON, at byte", None),
        (body_of(metadata={"a": "\ud800"}), "not valid JSON", None),
        (b"[" * 100_000, "nested deeper than 64", None),
        (b'{"a": "' + b"a" * INLINE_BYTES + b'\xff"}', "not valid JSON", None),
        (b'["' + b"a" * INLINE_BYTES + b'"]', "must be a JSON object", None),
    ],
    ids=["range", "role", "kind", "cut", "trailing", "nan", "surrogate", "deep", "not utf-8", "list"],
)
def test_a_large_body_is_refused_like_a_small_one(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_large(body, ChatCompletionRequest)
    assert message in caught.value.message
    assert caught.value.param == param
