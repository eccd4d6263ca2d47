"""Fields that a request may have: OpenAI's and vLLM's names are known, others refused where OpenAI refuses them."""

import base64
import time
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat import (
    completion_create_params as chat,
)
from openai.types.responses import response_create_params

from gateway_svc.routes.completions import CompletionRequest
from gateway_svc.routes.embeddings import EmbeddingRequest
from gateway_svc.routes.media import WarmRequest
from gateway_svc.routes.tokenize import DetokenizeRequest, TokenizeRequest
from gateway_svc.schemas.chat_request import ChatCompletionRequest, FunctionDefinition, Tool
from gateway_svc.schemas.responses_request import ResponsesRequest
from gateway_svc.schemas.strict_model import ClosedModel, NotServed
from tests.gateway_svc.fake_backend import MODEL, VectorBackend, harness
from tests.media_samples import png

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PICTURE = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()
TURN = {"role": "user", "content": "hi"}
# The default of each field that vLLM 0.32 added to a chat: a client may write them all out.
VLLM_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "allowed_token_ids": None,
    "bad_words": [],
    "cache_salt": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "echo": False,
    "ec_transfer_params": None,
    "ignore_eos": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "length_penalty": 1.0,
    "logprobs": False,
    "min_p": None,
    "min_tokens": 0,
    "mm_processor_kwargs": None,
    "parallel_tool_calls": True,
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": None,
    "request_id": "9f",
    "return_token_ids": None,
    "return_tokens_as_token_ids": None,
    "session_id": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream_interval": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "tool_choice": "none",
    "top_k": None,
    "top_logprobs": 0,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
    "vllm_xargs": None,
    "watermarking": None,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [TURN]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/media": {"model": MODEL, "media": [{"type": "image_url", "image_url": PICTURE}]},
}


def every(model: type[ClosedModel]) -> set[str]:
    """All names that a model knows, those that it refuses by name included."""
    return {field.alias or name for name, field in model.model_fields.items()} | set(model.not_served)


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (ChatCompletionRequest, chat.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openai_s_is_known(model: type[ClosedModel], theirs: Any) -> None:
    # These concern accounts and tools of OpenAI's alone.
    hosted = {"access_programs", "background_options", "image"}
    assert set(theirs.__annotations__) - hosted <= every(model)


def closed_models(base: type[ClosedModel] = ClosedModel) -> list[type[ClosedModel]]:
    return [model for child in base.__subclasses__() for model in (child, *closed_models(child))]


def test_no_field_is_both_read_and_refused() -> None:
    assert {WarmRequest, DetokenizeRequest, TokenizeRequest, Tool, FunctionDefinition} <= set(closed_models())
    for model in closed_models():
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert not names & set(model.not_served), model


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_field_is_refused_by_name_on_every_route(path: str) -> None:
    setup = harness(VectorBackend(), is_embedding_model=path == "/v1/embeddings")
    response = await setup.client.post(path, json={**BODIES[path], "zzz": {"a": [1]}})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "Unknown parameter: 'zzz'. Leave it out, or see /docs for those there are.",
        "type": "invalid_request_error",
        "param": "zzz",
        "code": "unknown_parameter",
    }
    assert setup.backend.requests == []
    assert (await setup.client.post(path, json={**BODIES[path], "zzz": None})).status_code == 200


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("toolChoice", "tool_choice"),
        ("stream_option", "stream_options"),
    ],
)
async def test_a_name_that_is_close_is_suggested(given: str, meant: str) -> None:
    response = await harness().chat(**{given: 1})
    assert response.json()["error"]["message"] == f"Unknown parameter: '{given}'. Did you mean '{meant}'?"


async def test_a_name_of_any_length_is_refused_at_once() -> None:
    started = time.process_time()
    response = await harness().chat(**{"max_tokens" * 5000: 1})
    assert time.process_time() - started < 0.5
    assert response.status_code == 400
    assert len(response.content) < 3000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format.json_schema.shema",
        ),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"tools": [{**TOOL, "name": "f"}]}, "tools[0].name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "g", "schema": {}}}]}, "tools[1].function.schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "args": "{}"}}},
            "tool_choice.function.args",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL], "n": 1}},
            },
            "tool_choice.allowed_tools.n",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"mm_processor_kwargs": {"min_pixel": 5}}, "mm_processor_kwargs.min_pixel"),
    ],
    ids=str,
)
async def test_an_unknown_field_inside_what_asks_for_something_is_refused(fields: dict[str, Any], param: str) -> None:
    setup = harness()
    response = await setup.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", param)
    assert error["message"].startswith(f"Unknown parameter: '{param}'.")
    assert setup.backend.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**TURN, "id": 5, "timestamp": 1.5}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
            ]
        },
        {"metadata": {"anything": {"at": ["all"]}}},
        {"chat_template_kwargs": {"some_variable": True}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "return": {"type": "string"}}}]},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        VLLM_DEFAULTS,
        {"service_tier": "flex", "safety_identifier": "u", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"logit_bias": None, "zzz": None, "response_format": {"type": "text", "strict": None}},
    ],
    ids=str,
)
async def test_what_clients_send_is_accepted(fields: dict[str, Any]) -> None:
    response = await harness().chat(**fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [TURN], "max_completion_tokens": 4}),
        ("/v1/completions", {"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None}),
    ],
)
async def test_what_vllm_s_bench_serve_sends_is_accepted(path: str, fields: dict[str, Any]) -> None:
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    response = await harness().client.post(path, json={"model": MODEL, **fields, **common})
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_an_answer_of_openai_s_can_be_sent_back_as_its_client_writes_it() -> None:
    call = ChatCompletionMessageFunctionToolCall.model_validate(
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    )
    answer = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [call],
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "parsed": None,
        }
    )
    messages = [TURN, answer.model_dump(), {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "5"}]
    assert (await harness().chat(messages=messages, tools=[TOOL])).status_code == 200


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "Nor will I."}]}, "Nor will I."),
    ],
)
async def test_a_refusal_is_what_the_assistant_said(message: dict[str, Any], text: str) -> None:
    said = {"messages": [TURN, {"role": "assistant", "content": text}, TURN]}
    sent = {"messages": [TURN, message, TURN]}
    client = harness().client
    first, second = [(await client.post("/tokenize", json=body)).json()["tokens"] for body in (said, sent)]
    assert first == second


@pytest.mark.parametrize("name", ["audio", "function_call"])
async def test_what_the_model_would_not_see_of_a_turn_is_refused(name: str) -> None:
    response = await harness().chat(messages=[TURN, {"role": "assistant", "content": "a", name: {"id": "x"}}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[1].{name}"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"best_of": 1}, None, 200),
        ({"best_of": True}, "best_of", 400),
        ({"best_of": 2}, "best_of", 400),
        ({"length_penalty": 1}, None, 200),
        ({"length_penalty": True}, "length_penalty", 400),
        ({"use_beam_search": 0}, "use_beam_search", 400),
        ({"store": True}, "store", 400),
        ({"verbosity": "medium"}, None, 200),
        ({"verbosity": "low"}, "verbosity", 400),
        ({"enable_thinking": False}, "enable_thinking", 400),
        ({"extra_body": {"top_k": 1}}, "extra_body", 400),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            400,
        ),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, None, 200),
    ],
    ids=str,
)
async def test_a_field_that_is_not_served_is_refused_where_it_asks_for_something(
    fields: dict[str, Any], param: str | None, status: int
) -> None:
    response = await harness().chat(**fields)
    assert response.status_code == status, response.text
    if param is not None:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", param)
        assert error["message"].startswith(f"{param} is not supported: ")


def test_the_documentation_has_the_values_that_ask_for_nothing() -> None:
    document = harness().app.openapi()["components"]["schemas"]
    chat_fields = document["ChatCompletionRequest"]
    assert chat_fields["additionalProperties"] is False
    assert chat_fields["properties"]["store"]["enum"] == [False, None]
    assert "guided_json" not in chat_fields["properties"]
    assert document["StructuredOutputs"]["properties"]["disable_any_whitespace"]["enum"] == [False, None]
    assert "additionalProperties" not in document["Message"]


def test_numbers_and_truths_are_told_apart() -> None:
    assert not NotServed((1,)).asks(1.0)
    assert NotServed((1,)).asks(True)
    assert NotServed((False,)).asks(0)
    assert not NotServed(([],)).asks([])
    assert not NotServed().asks(None)


async def test_unknown_fields_of_a_body_are_ignored_where_the_operator_says_so() -> None:
    setup = harness(unknown_fields="ignore")
    assert (await setup.chat(zzz=1, min_p=0.5)).status_code == 200
    assert setup.backend.requests[0].sampling.min_p == 0.5
    for fields in ({"response_format": {"type": "json_object", "strict": True}}, {"best_of": 2}):
        assert (await setup.chat(**fields)).status_code == 400


TEMPLATE = "{{ enable_thinking }} {{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reasoning_effort": "low"}, "True lowhi"),
        ({"reasoning_effort": "none"}, "False nonehi"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "False highhi"),
    ],
)
async def test_the_effort_of_reasoning_reaches_the_template(fields: dict[str, Any], text: str) -> None:
    setup = harness(template=TEMPLATE)
    assert (await setup.chat(**fields)).status_code == 200
    expected = (await setup.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert setup.backend.requests[0].prompt_token_ids == expected


ANSWERED = [
    {"id": "rs_1", "type": "reasoning", "summary": [], "content": None, "encrypted_content": "x", "status": None},
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "phase": None,
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    },
    {
        "id": "fc_1",
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
        "namespace": None,
    },
    {"type": "function_call_output", "call_id": "c", "output": "5"},
]


async def test_a_response_can_be_sent_back_as_it_came() -> None:
    body = {
        "model": MODEL,
        "input": [{"role": "user", "content": "hi"}, *ANSWERED],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
        "service_tier": "auto",
    }
    response = await harness().client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "hi", "metadata": {}}]}, "input[0].metadata"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.json_schema"),
        ({"tools": [{"type": "function", "name": "f", "function": {}}]}, "tools[0].function"),
        ({"messages": []}, "messages"),
    ],
)
async def test_the_items_of_a_response_are_closed_as_openai_s_are(fields: dict[str, Any], param: str) -> None:
    response = await harness().client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", param)


async def test_vllm_s_request_for_an_embedding_says_the_same_as_ours() -> None:
    """Its recipe for Qwen3-VL-Embedding continues an assistant's empty message."""
    setup = harness(VectorBackend(), is_embedding_model=True)
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Represent."}, {"role": "user", "content": "a cat"}]
    opened = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    recipe = {"messages": [*turns, opened], "continue_final_message": True, "add_special_tokens": True}
    for fields in ({"messages": turns}, recipe):
        response = await setup.client.post("/v1/embeddings", json={"model": MODEL, **fields})
        assert response.status_code == 200, response.text
    first, second = [request.prompt_token_ids for request in setup.backend.requests]
    assert first == second
