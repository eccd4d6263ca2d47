"""How tests ask a running system, and what they look at in its answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.integration.cases.manifest import Case

CHAT = "/v1/chat/completions"
TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}
CODES = ("context_length_exceeded", "model_not_found")


def client_of(url: str) -> httpx.AsyncClient:
    """A plain HTTP client for one gateway."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0, limits=limits)


async def ask(
    client: httpx.AsyncClient, body: bytes | dict[str, Any], path: str = CHAT, **headers: str
) -> httpx.Response:
    """Send one request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.post(path, content=content, headers={"content-type": "application/json", **headers})


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after checking that it is one that an OpenAI client understands and that tells no secret."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    for leaked in ("Traceback", "0x", "BytesIO", "/tmp", "site-packages", "Errno"):
        assert leaked not in error["message"], error
    assert response.headers["content-type"].startswith("application/json")
    if response.status_code in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    return error


def text_of(response: httpx.Response, choice: int = 0) -> str:
    """The text of an answer."""
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][choice]["message"]["content"]
    return text


def vision_tokens_of(response: httpx.Response) -> int:
    """How many prompt tokens were media."""
    details = response.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_media_tokens"] + details["encoded_media_tokens"])


def tokens_of(response: httpx.Response) -> list[list[int]]:
    """The bytes of each token of an answer that was asked for with logprobs."""
    assert response.status_code == 200, response.text
    return [token["bytes"] for token in response.json()["choices"][0]["logprobs"]["content"]]


def logprobs_of(response: httpx.Response) -> list[float]:
    """The log probability of each token."""
    return [token["logprob"] for token in response.json()["choices"][0]["logprobs"]["content"]]


def assert_same(response: httpx.Response, twin: httpx.Response) -> None:
    """The same tokens with the same log probabilities."""
    assert tokens_of(response) == tokens_of(twin)
    assert logprobs_of(response) == pytest.approx(logprobs_of(twin), abs=1e-4)


def assert_different(response: httpx.Response, other: httpx.Response) -> None:
    """Other tokens, or clearly other log probabilities."""
    if tokens_of(response) == tokens_of(other):
        assert logprobs_of(response) != pytest.approx(logprobs_of(other), abs=1e-3)


def check_status(case: Case, response: httpx.Response, statuses: frozenset[int] | None = None) -> None:
    """The status that the case allows, with an error object where it is none of success."""
    allowed = statuses or case.statuses or {200}
    assert response.status_code in allowed, f"{case.id}: {response.status_code} {response.text[:500]}"
    if response.status_code == 200:
        return
    error = error_of(response)
    assert error["type"] == TYPES.get(response.status_code, error["type"])
    if case.error_type in CODES:
        assert error["code"] == case.error_type


async def check_case(client: httpx.AsyncClient, case: Case) -> None:
    """Send all requests of a case and hold their answers against what it says of them."""
    first = (case.names("request") or case.names("raw_body"))[0]
    response = await ask(client, with_logprobs(case, first), case.path)
    check_status(case, response)
    if case.vision_tokens is not None:
        assert vision_tokens_of(response) == case.vision_tokens
    for name in case.names("more"):
        check_status(case, await ask(client, case.body(name), case.path))
    twins = [await ask(client, with_logprobs(case, name), case.path) for name in case.names("same")]
    for twin in twins:
        check_status(case, twin)
        if response.status_code == 200:
            assert_same(response, twin)
    for name in case.names("other"):
        assert_different(response, await ask(client, with_logprobs(case, name), case.path))
    for name in case.names("then"):
        assert (await ask(client, case.body(name), case.path)).status_code == 200


def with_logprobs(case: Case, name: str) -> bytes | dict[str, Any]:
    """A body, with log probabilities asked for where answers are compared. A stream is compared elsewhere."""
    if not (case.names("same") or case.names("other")):
        return case.body(name)
    body = case.request(name)
    body.pop("stream", None)
    return {**body, "logprobs": True}


@asynccontextmanager
async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[AsyncIterator[dict[str, Any] | str]]:
    """The events of a stream: chunks, and at the end the string `[DONE]`. Leaving the block closes the connection."""
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[dict[str, Any] | str]:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)
                else:
                    assert line == "" or line.startswith(":"), line

        yield events()


async def chunks_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a stream that ended well."""
    async with streamed(client, body) as events:
        found = [event async for event in events]
    assert found[-1] == "[DONE]"
    chunks = [chunk for chunk in found if isinstance(chunk, dict)]
    assert len(chunks) == len(found) - 1
    assert not any("error" in chunk for chunk in chunks), chunks
    return chunks


def joined(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    """The text of a stream's deltas."""
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(delta.get("content") or "" for delta in deltas)


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    """Return when a condition holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)
