"""`/v1/completions`, `/tokenize` and `/detokenize`, with a decoder that is scripted."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest

from common.errors import ModelFailure
from common.messages import GenerateRequest, SequenceTokens, TokenLogprobs
from gateway_svc.routes.merged import merged
from tests.gateway_svc.fake_backend import MODEL, TOKENIZER, FakeBackend, Harness, harness
from tests.gateway_svc.routes.test_chat import USAGE_OPTION, events_of


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


async def complete(setup: Harness, **fields: Any) -> httpx.Response:
    return await setup.client.post("/v1/completions", json={"model": MODEL, "prompt": "the quick", **fields})


def texts_of(chunks: list[Any], num_choices: int) -> list[str]:
    texts = [""] * num_choices
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        texts[choice["index"]] += choice["text"]
    return texts


async def test_a_completion_has_openai_s_older_shape() -> None:
    setup = harness(FakeBackend(answers=[" brown fox"]))
    body = (await complete(setup)).json()
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", MODEL, "cmpl-")
    assert body["choices"] == [{"index": 0, "text": " brown fox", "logprobs": None, "finish_reason": "stop"}]
    request = setup.backend.requests[0]
    assert request.prompt_token_ids == ids_of("the quick")
    assert request.sampling.max_tokens == 16
    assert body["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


async def test_special_tokens_of_a_prompt_are_what_they_say() -> None:
    setup = harness()
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    assert (await complete(setup, prompt=prompt)).status_code == 200
    assert setup.backend.requests[0].prompt_token_ids == TOKENIZER.encode(prompt).ids
    assert TOKENIZER.token_to_id("<|im_start|>") in setup.backend.requests[0].prompt_token_ids


async def test_prompts_are_text_or_ids_one_or_many() -> None:
    setup = harness(FakeBackend(answers=["x", "y"]))
    for prompt, expected in (
        (["a", "the quick"], [ids_of("a"), ids_of("the quick")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        setup.backend.requests.clear()
        body = (await complete(setup, prompt=prompt, n=2)).json()
        assert sorted(r.prompt_token_ids for r in setup.backend.requests) == sorted(expected)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
        assert [choice["text"] for choice in body["choices"]] == ["x", "y"] * len(expected)
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert len({request.request_id for request in setup.backend.requests}) == 2


async def test_a_stream_of_several_prompts_joins_to_the_same() -> None:
    setup = harness(FakeBackend(answers=[" brown fox", " lazy dog"]))
    fields: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "echo": True}
    whole = (await complete(setup, **fields)).json()
    *chunks, done = events_of(await complete(setup, **fields, **USAGE_OPTION))
    assert done == "[DONE]"
    assert texts_of(chunks, 4) == [choice["text"] for choice in whole["choices"]]
    assert whole["choices"][3]["text"] == "b lazy dog"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] == "stop"]
    assert sorted(finishes) == [0, 1, 2, 3]


async def test_logprobs_are_lists_with_offsets_streamed_and_not() -> None:
    setup = harness(FakeBackend(answers=[" brown fox"]))
    whole = (await complete(setup, logprobs=2)).json()["choices"][0]["logprobs"]
    assert "".join(whole["tokens"]) == " brown fox"
    assert whole["token_logprobs"][0] == -0.5
    assert all(len(top) >= 2 for top in whole["top_logprobs"])
    assert whole["text_offset"] == [len("".join(whole["tokens"][:index])) for index in range(len(whole["tokens"]))]
    chunks = events_of(await complete(setup, logprobs=2, stream=True))[:-1]
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]] == values


class ScoringBackend(FakeBackend):
    """Tells log probabilities of the prompt as well."""

    def _events(self, request: GenerateRequest) -> list[SequenceTokens]:
        first, *others = super()._events(request)
        entries = [TokenLogprobs(logprob=-float(i), top=[(i, -0.1)]) for i in request.prompt_token_ids[1:]]
        return [msgspec.structs.replace(first, prompt_logprobs=entries), *others]


async def test_echo_with_logprobs_and_no_tokens_scores_the_prompt() -> None:
    backend = ScoringBackend(answers=["zz"])
    body = (await complete(harness(backend), prompt="the quick", echo=True, logprobs=1, max_tokens=0)).json()
    ids = ids_of("the quick")
    (choice,) = body["choices"]
    assert choice["text"] == "the quick"
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in ids[1:])]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(ids)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(ids), 0)
    assert (backend.requests[0].sampling.max_tokens, backend.requests[0].sampling.num_prompt_logprobs) == (1, 1)


async def test_echo_of_ids_is_their_text() -> None:
    setup = harness(FakeBackend(answers=["!"]))
    body = (await complete(setup, prompt=ids_of("the fox"), echo=True)).json()
    assert body["choices"][0]["text"] == "the fox!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [999_999_999]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[5], [5, 600]]}, "prompt[1][1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 3}, "prompt"),
        ({"prompt": "<|image_pad|>"}, "prompt"),
        ({"prompt": [TOKENIZER.token_to_id("<|video_pad|>")]}, "prompt"),
        ({"prompt": "x " * 5000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json"),
        ({"model": "nope"}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    response = await complete(harness(), **fields)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


async def test_one_failing_prompt_fails_the_request_and_ends_the_others() -> None:
    backend = FakeBackend(error=ModelFailure("no"), error_after_tokens=1)
    response = await complete(harness(backend), prompt=["a", "b", "c"])
    assert response.json()["error"]["code"] == "model_failure"
    assert backend.num_closed == len(backend.requests)


async def test_merging_ends_with_its_sources_and_closes_them() -> None:
    closed: list[int] = []

    async def count(number: int, limit: int) -> AsyncGenerator[int, None]:
        try:
            for value in range(limit):
                yield value
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    items = [item async for item in merged([count(0, 3), count(1, 0), count(2, 5000)])]
    assert [value for number, value in items if number == 2] == list(range(5000))
    assert [value for number, value in items if number == 0] == [0, 1, 2]
    assert sorted(closed) == [0, 1, 2]
    closed.clear()
    endless = merged([count(0, 1 << 30), count(1, 1 << 30)])
    assert (await anext(endless))[1] == 0
    await endless.aclose()
    assert sorted(closed) == [0, 1]


async def test_tokens_of_a_text_and_back() -> None:
    post = harness().client.post
    text = "the quick 猫<|im_end|>"
    body = (await post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True})).json()
    assert body["tokens"] == TOKENIZER.encode(text).ids
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 2048)
    assert body["token_strs"][-1] == "<|im_end|>"
    back = await post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokens_of_a_conversation_are_those_of_its_answer_s_prompt() -> None:
    setup = harness()
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    body = (await setup.client.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
    await setup.chat(messages=messages)
    assert body["tokens"] == setup.backend.requests[0].prompt_token_ids
    without = await setup.client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert without.json()["count"] < body["count"]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x/y.png"}]}]
    tokens = (await setup.client.post("/tokenize", json={"messages": picture})).json()["tokens"]
    assert tokens.count(TOKENIZER.token_to_id("<|image_pad|>")) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 20]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_refusals_of_token_routes_name_their_field(path: str, body: dict[str, Any], param: str) -> None:
    response = await harness().client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param
