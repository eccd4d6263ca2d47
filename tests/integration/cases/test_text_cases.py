"""Texts and conversations that broke other servers, through the running system."""

import base64
from typing import Any

import httpx
import pytest

from tests.integration.cases.asking import (
    ask,
    check_case,
    chunks_of,
    error_of,
    joined,
    streamed,
    text_of,
    vision_tokens_of,
)
from tests.integration.cases.manifest import FOLDER, Case, case, plain_cases
from tests.paths import needs_shared
from tests.stack import Stack
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

WITHOUT_END = ("TXT-20", "TXT-21")  # answers as long as the context: only their beginning is read, below


@pytest.mark.parametrize("entry", [p for p in plain_cases("TXT") if not p.id.startswith(WITHOUT_END)])
async def test_text_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


def num_plain_tokens(text: str) -> int:
    """Tokens of a user's text, in which no token is special."""
    tokenizer = tiny_tokenizer()
    tokenizer.encode_special_tokens = True
    return len(tokenizer.encode(text).ids)


# What the template adds around one user's turn.
NUM_FRAME_TOKENS = len(tiny_tokenizer().encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n").ids)


async def test_a_placeholder_in_a_users_text_is_ordinary_text(client: httpx.AsyncClient) -> None:
    body = case("TXT-01").request()
    usage = (await ask(client, body)).json()["usage"]
    text = body["messages"][0]["content"]
    assert usage["prompt_tokens"] == NUM_FRAME_TOKENS + num_plain_tokens(text)
    assert num_plain_tokens(text) > len(tiny_tokenizer().encode(text).ids)
    assert usage["prompt_tokens_details"]["encoded_media_tokens"] == 0


async def test_a_placeholder_before_an_image_takes_none_of_its_tokens(client: httpx.AsyncClient) -> None:
    body = case("TXT-02").request()
    response = await ask(client, body)
    texts = [part["text"] for part in body["messages"][0]["content"] if "text" in part]
    expected = NUM_FRAME_TOKENS + sum(map(num_plain_tokens, texts)) + 20 + 2  # the image and its two borders
    assert vision_tokens_of(response) == 20
    assert response.json()["usage"]["prompt_tokens"] == expected


async def test_an_empty_list_and_an_empty_text_are_answered_alike(client: httpx.AsyncClient) -> None:
    statuses = [(await ask(client, case("TXT-08").body(name))).status_code for name in ("request", "same_0")]
    assert statuses in ([200, 200], [400, 400])


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_surrogate_pair_is_refused_at_its_place(client: httpx.AsyncClient, stream: bool) -> None:
    body = case("TXT-15").body("raw_body").replace(b"{", b'{"stream": true, ' if stream else b"{", 1)
    response = await ask(client, body)
    assert response.status_code == 400
    error = error_of(response)
    assert "1" in error["message"]
    assert error["param"] == "messages[0].content"


async def test_a_prompt_above_the_context_is_refused_before_any_encoding(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    picture = base64.b64encode((FOLDER / "TXT-19" / "request_image.png").read_bytes()).decode()
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": "word " * 200_000},
    ]
    before = await stack.metric("encoder-0", "tandem_encoder_items_total")
    response = await ask(client, {"model": "tandem-demo", "messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert await stack.metric("encoder-0", "tandem_encoder_items_total") == before


@pytest.mark.parametrize(("case_id", "name"), [("TXT-20", "request"), ("TXT-21", "request")])
async def test_no_limit_and_a_huge_one_are_answered(client: httpx.AsyncClient, case_id: str, name: str) -> None:
    async with streamed(client, case(case_id).request(name)) as events:
        first = await anext(events)
    assert isinstance(first, dict)
    assert first["choices"][0]["delta"]["role"] == "assistant"


async def test_limits_below_one_token_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for name in case("TXT-21").names("more"):
        response = await ask(client, case("TXT-21").body(name))
        assert response.status_code == 400
        assert error_of(response)["param"] == "max_tokens"


async def test_a_part_that_is_not_understood_is_named(client: httpx.AsyncClient) -> None:
    entry = case("TXT-24")
    for name in ["request", *entry.names("more")]:
        error = error_of(await ask(client, entry.body(name)))
        assert error["param"].startswith("messages[0].content[0]")


async def test_a_stream_of_broken_and_whole_characters_joins_to_the_whole_text(client: httpx.AsyncClient) -> None:
    body = {**case("TXT-09").request(), "max_tokens": 96}
    whole = text_of(await ask(client, body))
    body.pop("logprobs")
    chunks = await chunks_of(client, body)
    assert joined(chunks) == whole
    assert len(chunks) > 3
