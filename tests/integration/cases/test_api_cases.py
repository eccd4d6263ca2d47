"""The surface of the API where other servers broke, through the running system."""

from typing import Any

import httpx
import pytest

from tests.integration.cases.asking import (
    CHAT,
    ask,
    check_case,
    chunks_of,
    error_of,
    joined,
    logprobs_of,
    streamed,
    text_of,
    until,
)
from tests.integration.cases.manifest import Case, case, plain_cases
from tests.paths import needs_shared
from tests.stack import Stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("entry", plain_cases("API"))
async def test_api_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


async def test_a_stop_text_over_several_tokens_is_never_streamed(client: httpx.AsyncClient) -> None:
    body = case("API-01").request()
    text = text_of(await ask(client, body))
    stop = text[20:25]
    chunks = await chunks_of(client, {**body, "stop": [stop]})
    assert joined(chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert text_of(await ask(client, {**body, "stop": [stop]})) == text[: text.index(stop)]


async def test_a_seed_gives_the_same_text_again_and_its_choices_differ(client: httpx.AsyncClient) -> None:
    body = case("API-04").request()
    assert text_of(await ask(client, body)) == text_of(await ask(client, case("API-04").body("same_0")))
    choices = (await ask(client, case("API-05").body())).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in choices}) > 1


async def test_the_usage_of_several_choices_comes_once_and_sums_them(client: httpx.AsyncClient) -> None:
    chunks = await chunks_of(client, case("API-08").request())
    with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert with_usage == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    single = (await ask(client, {**case("API-09").request(), "stream": False})).json()["usage"]
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == single["prompt_tokens"]
    assert usage["completion_tokens"] == 2 * single["completion_tokens"]
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == {0, 1}


async def test_without_stream_options_every_chunk_has_one_choice_and_no_usage(client: httpx.AsyncClient) -> None:
    for chunk in await chunks_of(client, case("API-09").request()):
        assert len(chunk["choices"]) == 1
        assert "usage" not in chunk


async def test_a_stream_has_role_deltas_finish_usage_done_and_then_ends(client: httpx.AsyncClient) -> None:
    body = case("API-10").request()
    chunks = await chunks_of(client, body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes[-1] == "length"
    assert set(finishes[:-1]) == {None}
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    whole = await ask(client, {key: value for key, value in body.items() if not key.startswith("stream")})
    assert joined(chunks) == text_of(whole)


async def test_logprobs_have_openais_shape(client: httpx.AsyncClient) -> None:
    content = (await ask(client, case("API-12").body())).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert token["logprob"] <= 0
        assert token["top_logprobs"] == []


async def test_a_streamed_token_has_its_own_alternatives(client: httpx.AsyncClient) -> None:
    whole = (await ask(client, case("API-13").body())).json()["choices"][0]["logprobs"]["content"]
    chunks = await chunks_of(client, case("API-13").request("same_0"))
    pieces = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
    found = [token for piece in pieces for token in piece]
    assert [alternatives(token) for token in found] == [alternatives(token) for token in whole]
    assert all(len(token["top_logprobs"]) == 3 for token in found)
    assert len({str(alternatives(token)) for token in found}) > 1


def alternatives(token: dict[str, Any]) -> list[list[int]]:
    """The bytes of a token and of its alternatives."""
    return [token["bytes"], *(other["bytes"] for other in token["top_logprobs"])]


async def test_penalties_over_image_placeholders_give_finite_logprobs(client: httpx.AsyncClient) -> None:
    values = logprobs_of(await ask(client, case("API-18").body()))
    assert len(values) == 8
    assert all(-100 < value <= 0 for value in values)


@pytest.mark.parametrize(
    ("case_id", "params"),
    [
        ("API-07", ["n"]),
        ("API-15", ["top_logprobs", "top_logprobs"]),
        ("API-16", ["logit_bias"]),
        ("API-20", ["response_format.schema"]),
        ("API-21", ["response_format"]),
        ("API-24", ["max_tokens"]),
        ("API-28", ["zzz"]),
        ("API-29", ["model"]),
        ("API-31", ["temperature", "top_p", "top_p", "n"]),
        ("API-36", ["tools", "messages", "messages[0].tool_calls"]),
    ],
)
async def test_a_refused_field_is_named(client: httpx.AsyncClient, case_id: str, params: list[str]) -> None:
    entry = case(case_id)
    names = ["request", *entry.names("more")]
    assert [error_of(await ask(client, entry.body(name)))["param"] for name in names] == params


async def test_a_field_that_is_not_served_is_refused_by_name_rather_than_ignored(client: httpx.AsyncClient) -> None:
    body = case("API-04").request()
    for name, value in [("guided_json", {}), ("use_beam_search", True), ("chat_template", "x"), ("best_of", 2)]:
        response = await ask(client, {**body, name: value})
        assert response.status_code == 400
        assert error_of(response)["param"] == name


async def test_unknown_routes_and_methods_are_answered_with_the_error_object(client: httpx.AsyncClient) -> None:
    for path, status in ((case("API-30").path, 404), (CHAT, 405)):
        response = await client.get(path)
        assert response.status_code == status
        error_of(response)


async def test_a_broken_image_is_no_stream_with_status_200(client: httpx.AsyncClient) -> None:
    response = await ask(client, case("API-34").body())
    assert response.status_code == 400
    error_of(response)


async def load_of(stack: Stack) -> tuple[float, float, float]:
    """Requests, running sequences and used KV blocks of the decoder."""
    names = ("tandem_decoder_active_requests", "tandem_decoder_running", 'tandem_decoder_kv_blocks{state="used"}')
    active, running, used = [await stack.metric("decoder-0", name) for name in names]
    return active, running, used


async def test_a_client_that_leaves_takes_its_request_and_its_blocks_along(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    base = await load_of(stack)
    assert base[:2] == (0, 0)
    async with streamed(client, case("API-32").request()) as events:
        for _ in range(3):
            await anext(events)
        assert (await load_of(stack))[0] == 1

    async def is_back() -> bool:
        return await load_of(stack) == base

    await until(is_back, within_s=2)
