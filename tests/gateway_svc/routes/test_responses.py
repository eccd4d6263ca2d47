"""`/v1/responses` with a decoder that is scripted: items in, items out, typed events in their order."""

import base64
import json
from typing import Any

import httpx
import pytest

from common.errors import ModelFailure
from tests.gateway_svc.fake_backend import MODEL, TOKENIZER, FakeBackend, Harness, harness
from tests.gateway_svc.routes.test_chat_answers import CALLS, THINKING
from tests.media_samples import png
from tests.tiny_tokenizer import CHAT_TEMPLATE

PICTURE = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


async def respond(setup: Harness, **fields: Any) -> httpx.Response:
    return await setup.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(setup: Harness) -> str:
    return TOKENIZER.decode(setup.backend.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_response_has_openai_s_shape() -> None:
    setup = harness()
    body = (
        await respond(setup, instructions="the fox", max_output_tokens=50, temperature=0, metadata={"a": "b"})
    ).json()
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    (item,) = body["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []}]
    assert (item["role"], item["status"], item["type"]) == ("assistant", "completed", "message")
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert (body["instructions"], body["metadata"], body["error"]) == ("the fox", {"a": "b"}, None)
    assert "system\nthe fox<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in prompt_of(setup)
    assert setup.backend.requests[0].sampling.max_tokens == 50


async def test_the_same_prompt_as_a_chat_s() -> None:
    setup = harness()
    parts = [
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        {"type": "input_text", "text": "what?"},
    ]
    items = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A fox."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    assert (await respond(setup, input=items)).status_code == 200
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    content = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "what?"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "A fox."}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert (await setup.chat(messages=messages)).status_code == 200
    first, second = setup.backend.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert [item.key for item in first.media] == [item.key for item in second.media]


async def test_calls_and_reasoning_are_items() -> None:
    setup = harness(FakeBackend(answers=[f"Hm.\n</think>\n\n{CALLS}"]), template=THINKING)
    body = (await respond(setup, tools=[TOOL], tool_choice="auto")).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [json.loads(item["arguments"]) for item in body["output"][2:]] == [{"city": "Paris"}, {"city": "Rom"}]
    assert len({item["call_id"] for item in body["output"][2:]}) == 2
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_strict_function_is_a_constraint_for_the_decoder() -> None:
    setup = harness()
    for is_strict in (True, False):
        assert (await respond(setup, tools=[{**TOOL, "strict": is_strict}])).status_code == 200
    strict, free = [request.sampling.grammar_kind for request in setup.backend.requests]
    assert (strict, free) == ("grammar", None)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=str,
)
async def test_a_choice_of_tools_comes_back_as_it_was_asked_for(choice: Any) -> None:
    setup = harness(FakeBackend(answers=[CALLS]))
    response = await respond(setup, tools=[TOOL], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert response.json()["tool_choice"] == choice


@pytest.mark.parametrize("answer", ["Hello there.", f"Hm.\n</think>\n\n{CALLS}"])
async def test_a_stream_s_events_add_up_to_the_whole(answer: str) -> None:
    setup = harness(FakeBackend(answers=[answer]), template=THINKING if "think" in answer else CHAT_TEMPLATE)
    fields = {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
    whole = (await respond(setup, **fields)).json()
    events = events_of(await respond(setup, stream=True, **fields))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert [without_ids(item) for item in events[-1]["response"]["output"]] == [
        without_ids(item) for item in whole["output"]
    ]
    assert events[-1]["response"]["usage"] == whole["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    expected = {item["id"]: item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in done}
    assert texts == expected


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


async def test_an_answer_that_a_limit_cut_is_incomplete() -> None:
    setup = harness(FakeBackend(answers=["the quick brown fox jumps"]))
    body = (await respond(setup, max_output_tokens=2)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = events_of(await respond(setup, max_output_tokens=2, stream=True))
    assert events[-1]["type"] == "response.incomplete"


async def test_a_schema_reaches_the_decoder() -> None:
    setup = harness(FakeBackend(answers=['{"a": 1}']))
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    body = (await respond(setup, text=text)).json()
    assert setup.backend.requests[0].sampling.grammar == '{"type": "object"}'
    assert body["text"]["format"]["schema"] == {"type": "object"}


async def test_an_error_in_a_stream_is_an_event() -> None:
    setup = harness(FakeBackend(error=ModelFailure("not finite"), error_after_tokens=2))
    *_, last = events_of(await respond(setup, stream=True))
    assert (last["type"], last["code"], last["message"]) == ("error", "model_failure", "not finite")
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input[0].content[0]",
        ),
        (
            {
                "instructions": "x",
                "input": [
                    {"role": "user", "content": "x"},
                    {"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]},
                ],
            },
            "input[1].content[0]",
        ),
        ({"input": [{"type": "reasoning", "content": []}]}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice.tools",
        ),
        ({"tools": [{**TOOL, "parameters": {"type": 5}}], "tool_choice": "required"}, "tools[0].parameters"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format"),
        ({"seed": 1 << 70}, "seed"),
        ({"model": "nope"}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    response = await respond(harness(), **fields)
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert "messages" not in error["message"].replace("chat messages", "").replace("the messages", "")
