"""A scripted tour of the API with OpenAI's own clients, through real processes: what they send and understand.

The model's weights are random, so texts mean nothing; what a grammar enforces does.
"""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.integration.cases.asking import until
from tests.integration.conftest import picture_message, text_message
from tests.media_samples import png
from tests.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MODEL = "tiny"
NODE_TOUR = Path(__file__).with_name("tour.cjs")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rom"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Seen(BaseModel):
    """What a picture shows."""

    shape: Literal["circle", "square"]
    is_red: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path_factory.mktemp("clients"), tiny_checkpoint) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with stack.client() as client:
        yield client


async def test_chat_and_its_stream_say_the_same(client: AsyncOpenAI) -> None:
    create = client.chat.completions.create
    whole = await create(model=MODEL, messages=text_message("hi"), max_tokens=12, seed=1)
    stream = await create(
        model=MODEL,
        messages=text_message("hi"),
        max_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"


async def test_vision_over_several_turns(client: AsyncOpenAI) -> None:
    messages = picture_message(1)
    first = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, *picture_message(2)]
    second = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    details = second.usage.prompt_tokens_details
    assert details.encoded_media_tokens > 0
    assert details.cached_media_tokens == details.encoded_media_tokens
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + details.encoded_media_tokens


async def test_a_schema_is_parsed_into_a_pydantic_model(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.parse(
        model=MODEL,
        messages=picture_message(3),
        response_format=Seen,
        max_tokens=600,
    )
    parsed = completion.choices[0].message.parsed
    assert isinstance(parsed, Seen)
    assert completion.choices[0].finish_reason == "stop"


async def test_constraints_by_vllm_s_name(client: AsyncOpenAI) -> None:
    for structured, check in (
        ({"choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"regex": "[a-c]{3}[0-9]"}, lambda text: len(text) == 4 and text[3].isdigit()),
        ({"grammar": 'start: "<" ("x" | "y") ">"'}, lambda text: text in ("<x>", "<y>")),
        ({"json": {"enum": [1, 2]}}, lambda text: json.loads(text) in (1, 2)),
    ):
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=text_message("hi"),
            max_tokens=60,
            extra_body={"structured_outputs": structured},
        )
        text = completion.choices[0].message.content
        assert text is not None
        assert check(text), text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_tool_round(client: AsyncOpenAI, choice: Any) -> None:
    messages: list[Any] = text_message("weather?")
    fields: dict[str, Any] = {
        "model": MODEL,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    completion = await client.chat.completions.create(messages=messages, **fields)
    message = completion.choices[0].message
    (call,) = message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rom")
    assert 1 <= arguments["days"] <= 9
    stream = await client.chat.completions.create(messages=messages, stream=True, **fields)
    pieces = [
        c.choices[0].delta.tool_calls[0].function.arguments async for c in stream if c.choices[0].delta.tool_calls
    ]
    assert json.loads("".join(pieces)) == arguments
    assert len(pieces) > 3
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=4)
    assert after.usage is not None
    assert completion.usage is not None
    assert after.usage.prompt_tokens > completion.usage.prompt_tokens


async def test_logprobs_and_several_choices(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=text_message("hi"),
        max_tokens=5,
        n=2,
        temperature=1.0,
        seed=3,
        logprobs=True,
        top_logprobs=4,
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        assert all(len(entry.top_logprobs) == 4 for entry in choice.logprobs.content)


async def test_completions_score_a_prompt(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model=MODEL, prompt=["the quick brown", "fox"], echo=True, logprobs=2, max_tokens=0
    )
    for choice, text in zip(completion.choices, ("the quick brown", "fox"), strict=True):
        assert choice.text == text
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        assert values[0] is None
        assert all(value is not None and value < 0 for value in values[1:])
    again = await client.completions.create(model=MODEL, prompt="the quick brown", max_tokens=3)
    assert again.choices[0].finish_reason == "length"


async def test_prompt_logprobs_are_those_of_the_completions_route(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=text_message("the quick brown"),
        max_tokens=1,
        extra_body={"prompt_logprobs": 1},
    )
    assert completion.usage is not None
    entries = completion.model_extra["prompt_logprobs"]
    assert len(entries) == completion.usage.prompt_tokens
    assert entries[0] is None


async def test_responses_with_a_picture_and_their_stream(client: AsyncOpenAI) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(64, 64, 5)).decode()}"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What?"}]
    items: Any = [{"role": "user", "content": parts}]
    whole = await client.responses.create(model=MODEL, input=items, max_output_tokens=10)
    assert whole.status == "incomplete"
    assert whole.output_text
    stream = await client.responses.create(model=MODEL, input=items, max_output_tokens=10, stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.incomplete"


async def test_a_response_is_parsed_into_a_pydantic_model(client: AsyncOpenAI) -> None:
    response = await client.responses.parse(model=MODEL, input="hi", text_format=Seen, max_output_tokens=600)
    assert isinstance(response.output_parsed, Seen)


async def test_answers_go_back_as_the_client_writes_them(client: AsyncOpenAI) -> None:
    messages: list[Any] = text_message("weather?")
    completion = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=200
    )
    message = completion.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls or []]
    messages += [message.model_dump(), *results]
    assert (await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)).choices
    response = await client.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    items: Any = [
        {"role": "user", "content": "hi"},
        *(item.model_dump() for item in response.output),
        {"role": "user", "content": "and?"},
    ]
    assert (await client.responses.create(model=MODEL, input=items, max_output_tokens=5, store=False)).output


async def test_media_are_encoded_before_anyone_asks(stack: Stack, client: AsyncOpenAI) -> None:
    message = picture_message(77)
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as http:
        body = {"model": MODEL, "media": [message[0]["content"][0]]}
        (item,) = (await http.post("/v1/media", json=body)).json()["data"]
        assert item["outcome"] == "encoded"
        (again,) = (await http.post("/v1/media", json=body)).json()["data"]
        assert again == {**item, "outcome": "cache"}
        completion = await client.chat.completions.create(model=MODEL, messages=message, max_tokens=1)
        assert completion.usage is not None
        details = completion.usage.prompt_tokens_details
        assert (details.encoded_media_tokens, details.cached_media_tokens) == (0, item["tokens"])

        async def is_removed() -> bool:
            return (await http.delete(f"/v1/media/{item['key']}")).status_code == 200

        await until(is_removed, within_s=20)  # an encoder writes to Redis off its hot path
        left = (await http.get("/v1/media")).json()
        purged = (await http.delete("/v1/media", params={"model": MODEL})).json()
        assert purged["items"] == left["items"]
        assert (await http.get("/v1/media")).json()["items"] == 0


async def test_models(client: AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_client_s_own_classes(client: AsyncOpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        await create(model="nope", messages=text_message("hi"))
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=text_message("hi"), temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as regex:
        await create(
            model=MODEL,
            messages=text_message("hi"),
            extra_body={"structured_outputs": {"regex": "(["}},
        )
    assert regex.value.param == "structured_outputs.regex"
    with pytest.raises(openai.BadRequestError) as unknown:
        await create(model=MODEL, messages=text_message("hi"), extra_body={"max_token": 5})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "max_token")
    with pytest.raises(openai.BadRequestError) as picture:
        await create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        )
    assert picture.value.param == "messages[0].content[0]"


async def test_the_node_client_s_tour(stack: Stack) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    process = await asyncio.create_subprocess_exec(
        node,
        str(NODE_TOUR),
        f"{stack.url}/v1",
        MODEL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode == 77:
        pytest.skip("npm's openai package is not installed where node looks for it (NODE_PATH)")
    assert process.returncode == 0, output.decode()
    assert output.decode().splitlines()[-1] == "tour done"
