"""Tool calls, reasoning and constraints through the HTTP half, with a decoder that is scripted."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from common.errors import InvalidRequest
from common.messages import TokenLogprobs
from tests.gateway_svc.fake_backend import MODEL, TOKENIZER, FakeBackend, harness
from tests.gateway_svc.routes.test_chat import events_of, text_of
from tests.tiny_tokenizer import CHAT_TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
)
CALLS_TOKENS = TOKENIZER.encode(CALLS, add_special_tokens=False).ids
THINKING = CHAT_TEMPLATE.replace("'<|im_start|>assistant\\n' -", "'<|im_start|>assistant\\n<think>\\n' -")


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def joined(response: httpx.Response) -> dict[str, Any]:
    """The message that the deltas of a stream add up to, as OpenAI's clients join them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events_of(response)[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["finish_reason"] = choice["finish_reason"]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
                else:
                    assert call.keys() == {"index", "function"}
                    found = message["tool_calls"][call["index"]]["function"]
                    found["arguments"] += call["function"]["arguments"]
    return message


async def test_calls_become_tool_calls() -> None:
    response = await harness(FakeBackend(answers=[CALLS])).chat(tools=[TOOL])
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert calls_of(choice["message"]) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rom"})]
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(call["type"] == "function" for call in choice["message"]["tool_calls"])


async def test_a_stream_gives_the_arguments_in_deltas() -> None:
    response = await harness(FakeBackend(answers=[CALLS])).chat(tools=[TOOL], stream=True)
    message = joined(response)
    assert message["content"] == "Let me look."
    assert calls_of(message) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rom"})]
    assert message["finish_reason"] == "tool_calls"
    deltas = [c["delta"] for event in events_of(response)[:-1] for c in event["choices"]]
    assert sum("tool_calls" in delta for delta in deltas) > 6
    assert "tool_call>" not in response.text


async def test_a_call_alone_has_no_content() -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    message = (await harness(FakeBackend(answers=[answer])).chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_without_tools_or_with_none_a_call_is_text() -> None:
    setup = harness(FakeBackend(answers=[CALLS]))
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = (await setup.chat(**fields)).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALLS}
        assert choice["finish_reason"] == "stop"
    prompts = [request.prompt_token_ids for request in setup.backend.requests]
    assert prompts[0] == prompts[1]


async def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    backend = FakeBackend(answers=[CALLS])
    response = await harness(backend).chat(tools=[TOOL], parallel_tool_calls=False)
    choice = response.json()["choices"][0]
    assert calls_of(choice["message"]) == [("get_weather", {"city": "Paris"})]
    assert choice["finish_reason"] == "tool_calls"
    assert response.json()["usage"]["completion_tokens"] < len(CALLS_TOKENS)


async def test_a_named_function_and_required_are_constraints_for_the_decoder() -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    setup = harness(FakeBackend(answers=[answer]))
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, finish_reason in ((named, "stop"), ("required", "tool_calls")):
        response = await setup.chat(tools=[TOOL], tool_choice=choice)
        found = response.json()["choices"][0]
        assert calls_of(found["message"]) == [("get_weather", {"city": "Rom"})]
        assert found["finish_reason"] == finish_reason
        sampling = setup.backend.requests[-1].sampling
        assert sampling.grammar_kind == "grammar"
        assert "get_weather" in (sampling.grammar or "")


async def test_a_constraint_reaches_the_decoder_and_its_refusal_names_the_field() -> None:
    setup = harness(FakeBackend(answers=['{"a": 1}']))
    assert (await setup.chat(response_format={"type": "json_object"})).status_code == 200
    assert (await setup.chat(structured_outputs={"regex": "[0-9]+"})).status_code == 200
    sent = [(r.sampling.grammar_kind, r.sampling.grammar) for r in setup.backend.requests]
    assert sent == [("json_object", None), ("regex", "[0-9]+")]
    setup.backend.error = InvalidRequest("the regex cannot be used")
    error = (await setup.chat(structured_outputs={"regex": "["})).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "structured_outputs.regex")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_from_the_answer(stream: bool) -> None:
    backend = FakeBackend(answers=["I look at it.\n</think>\n\nA circle."])
    response = await harness(backend, template=THINKING).chat(stream=stream)
    message = joined(response) if stream else response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look at it.", "A circle.")
    if not stream:
        details = response.json()["usage"]["completion_tokens_details"]
        assert 5 < details["reasoning_tokens"] < response.json()["usage"]["completion_tokens"] - 4


async def test_reasoning_before_calls_and_before_a_constraint() -> None:
    setup = harness(FakeBackend(answers=[f"Hm.\n</think>\n\n{CALLS}"]), template=THINKING)
    message = (await setup.chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me look.")
    assert len(message["tool_calls"]) == 2
    await setup.chat(response_format={"type": "json_object"})
    sampling = setup.backend.requests[-1].sampling
    assert sampling.grammar_kind == "grammar"
    assert (sampling.grammar or "").startswith("start: thoughts </think>")


async def test_a_template_without_reasoning_leaves_the_mark_alone() -> None:
    message = (await harness(FakeBackend(answers=["<think>a</think>b"])).chat()).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"


async def test_logprobs_of_calls_are_all_there() -> None:
    setup = harness(FakeBackend(answers=[CALLS]))
    whole = (await setup.chat(tools=[TOOL], logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    chunks = events_of(await setup.chat(tools=[TOOL], logprobs=True, stream=True))[:-1]
    parts = [
        entry for c in chunks for choice in c["choices"] for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert parts == whole
    assert "".join(entry["token"] for entry in whole) == CALLS


async def test_the_other_fields_of_sampling_reach_the_decoder() -> None:
    setup = harness()
    response = await setup.chat(
        bad_words=["fox", " fox", "jump"], allowed_token_ids=[5, 6], priority=-3, structured_outputs={"choice": ["a"]}
    )
    assert response.status_code == 200
    request = setup.backend.requests[0]

    def ids(text: str) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=False).ids

    assert request.sampling.bad_words_ids == [ids("fox"), ids(" fox"), ids("jump"), ids(" jump")]
    assert request.sampling.allowed_token_ids == [5, 6]
    assert request.priority == -3
    assert (request.sampling.grammar_kind, request.sampling.grammar) == ("choice", '["a"]')


async def test_a_stop_string_may_be_part_of_the_answer_and_waits_for_min_tokens() -> None:
    setup = harness(FakeBackend(answers=["a stop b stop c"]))

    async def content(**fields: Any) -> str:
        text: str = (await setup.chat(stop="stop", **fields)).json()["choices"][0]["message"]["content"]
        return text

    assert await content() == "a "
    assert await content(include_stop_str_in_output=True) == "a stop"
    assert await content(min_tokens=len(TOKENIZER.encode("a stop b").ids)) == "a stop b "


async def test_special_tokens_are_shown_when_asked_for() -> None:
    setup = harness(FakeBackend(answers=["a<|vision_pad|>b"]))
    for skip, expected in ((True, "ab"), (False, "a<|vision_pad|>b"), (None, "ab")):
        body = (await setup.chat(skip_special_tokens=skip)).json()
        assert body["choices"][0]["message"]["content"] == expected


async def test_a_long_prompt_loses_its_beginning_when_asked_to() -> None:
    setup = harness(FakeBackend(max_model_len=64))
    message = [{"role": "user", "content": "the quick brown fox " * 30}]
    assert (await setup.chat(messages=message)).json()["error"]["code"] == "context_length_exceeded"
    assert (await setup.chat(messages=message, truncate_prompt_tokens=20)).status_code == 200
    assert (await setup.chat(messages=message, truncate_prompt_tokens=-1, max_tokens=5)).status_code == 200
    short, full = (request.prompt_token_ids for request in setup.backend.requests)
    assert (len(short), len(full)) == (20, 59)
    assert full[-20:] == short
    assert short[-3:] == TOKENIZER.encode("<|im_start|>assistant\n").ids[-3:]
    whole = await setup.chat(truncate_prompt_tokens=63)
    assert whole.json()["usage"]["prompt_tokens"] < 20


async def test_prompt_logprobs_have_vllm_s_shape() -> None:
    backend = FakeBackend()
    events = FakeBackend._events

    def with_prompt(request: Any) -> Any:
        first, *others = events(backend, request)
        entries = [
            TokenLogprobs(logprob=-3.0, top=[(5, -0.5), (6, float("-inf"))]) for _ in request.prompt_token_ids[1:]
        ]
        return [msgspec.structs.replace(first, prompt_logprobs=entries), *others]

    backend._events = with_prompt  # type: ignore[method-assign]
    setup = harness(backend)
    body = (await setup.chat(prompt_logprobs=2)).json()
    request = backend.requests[0]
    assert request.sampling.num_prompt_logprobs == 2
    assert len(body["prompt_logprobs"]) == len(request.prompt_token_ids)
    assert body["prompt_logprobs"][0] is None
    second = body["prompt_logprobs"][1]
    chosen = str(request.prompt_token_ids[1])
    assert second[chosen]["logprob"] == -3.0
    assert (second["5"]["rank"], second["6"]["logprob"]) == (1, -9999.0)


async def test_usage_may_come_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(await harness().chat(stream=True, stream_options=options))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] >= counts[1] > 0
    assert text_of(chunks) == "Hello there."


async def test_an_assistant_s_calls_and_reasoning_come_back_in_the_next_turn() -> None:
    setup = harness()
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny <|im_end|>"},
    ]
    response = await setup.client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": [TOOL]}
    )
    assert response.status_code == 200
    text = TOKENIZER.decode(setup.backend.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call><|im_end|>' in text
    assert setup.backend.requests[0].prompt_token_ids.count(TOKENIZER.token_to_id("<|im_end|>")) == 4
