"""Refusals: every status has OpenAI's error object, names the field, and leaves the server unharmed."""

import json
import re
from typing import Any

import httpx
import pytest

from common.errors import ERROR_TABLE
from gateway_svc.http.errors import error_response
from gateway_svc.routes.api import HttpLimits
from tests.gateway_svc.fake_backend import MODEL, FakeBackend, harness
from tests.paths import SHARED, needs_shared

CASES = SHARED / "cases"
# The cases that no model is needed for. (IMG-11, a cut JPEG, has a whole header: only an encoder can refuse it.)
STATUS_OF_CASE = {
    "TXT-06": 400,
    "TXT-13": 400,
    "TXT-15": 400,
    "TXT-23": 400,
    "TXT-24": 400,
    "API-07": 400,
    "API-15": 400,
    "API-16": 400,
    "API-20": 400,
    "API-21": 400,
    "API-24": 400,
    "API-25": 400,
    "API-29": 404,
    "API-31": 400,
    "API-36": 400,
    "IMG-16": 400,
    "IMG-18": 400,
    "IMG-20": 400,
    "IMG-21": 400,
    "IMG-22": 400,
    "IMG-31": 400,
    "IMG-32": 400,
    "API-34": 400,
    "SEC-01": 400,
    "SEC-05": 400,
    "SEC-12": 400,
    "SEC-15": 400,
    "TXT-01": 200,
    "TXT-02": 200,
    "TXT-07": 200,
    "TXT-08": 200,
    "TXT-09": 200,
    "TXT-11": 200,
    "TXT-20": 200,
    "API-04": 200,
    "API-05": 200,
    "API-08": 200,
    "API-09": 200,
    "API-10": 200,
    "API-12": 200,
    "API-13": 200,
    "API-18": 200,
    "API-28": 400,
    "IMG-01": 200,
    "IMG-14": 200,
    "IMG-15": 200,
    "IMG-24": 200,
    "IMG-25": 200,
    "IMG-27": 200,
    "IMG-29": 200,
    "IMG-38": 200,
    "IMG-39": 200,
}


@needs_shared
@pytest.mark.parametrize(("case", "status"), STATUS_OF_CASE.items())
async def test_cases_have_their_status(case: str, status: int) -> None:
    setup = harness()
    files = sorted((CASES / case).glob("*.json"))
    for file in [file for file in files if file.stem.startswith(("request", "raw_body", "more"))]:
        response = await setup.client.post(
            "/v1/chat/completions", content=file.read_bytes(), headers={"content-type": "application/json"}
        )
        assert response.status_code == status, (file.name, response.text)
        if status != 200:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert not any(word in response.text for word in ("0x", "BytesIO", "SECRET", "Traceback", "/work"))
    for file in [file for file in files if file.stem == "then"]:
        assert (await setup.client.post("/v1/chat/completions", json=json.loads(file.read_text()))).status_code == 200


@needs_shared
async def test_images_of_cases_have_the_stated_number_of_tokens() -> None:
    for case, expected in (("IMG-14", 16), ("IMG-15", 57), ("TXT-02", 20)):
        setup = harness()
        body = json.loads((CASES / case / "request.json").read_text())
        usage = (await setup.client.post("/v1/chat/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"]["encoded_media_tokens"] == expected


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 1_000_000}, "n"),
        ({"n": 0}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"9999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 500}}, "logit_bias.5"),
        ({"stop_token_ids": [512]}, "stop_token_ids[0]"),
        ({"min_tokens": 5000}, "min_tokens"),
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        ({"structured_outputs": {"json": {"properties": 5}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"xml": True}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "x" * 1_100_000}}, "structured_outputs.grammar"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"chat_template": "x"}, "chat_template"),
        ({"store": True}, "store"),
        ({"mm_processor_kwargs": {"min_pixel": 5}}, "mm_processor_kwargs.min_pixel"),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": 7}]}, "messages[0].tool_calls"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)
async def test_a_refusal_names_its_field(fields: dict[str, Any], param: str) -> None:
    setup = harness()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    response = await setup.client.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not re.search("[Ii]nput|valid (string|integer)|pydantic|not valid$", error["message"])
    assert setup.backend.requests == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "ten"}, "max_tokens must be an integer, not 'ten'"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, not 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be an integer, not true"),
        ({"seed": 10**4000}, "seed must be at most 9223372036854775807"),
        ({"temperature": "a" * 100}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": 101}, "temperature must be at most 100, not 101"),
        ({"top_p": 0}, "top_p must be above 0, not 0"),
        ({"top_k": 1 << 31}, "top_k must be below 2147483648, not 2147483648"),
        ({"stream": "true"}, "stream must be true or false, not 'true'"),
        ({"stop": 5}, "stop must be a list, not 5"),
        ({"stop": [""]}, "stop[0] must not be empty"),
        ({"stop": ["a"] * 17}, "stop must have at most 16 items"),
        ({"cache_salt": "a" * 257}, "cache_salt must have at most 256 characters"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"metadata": [1]}, "metadata must be an object"),
        ({"response_format": 5}, "response_format must be an object, not 5"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema', not 'xml'",
        ),
        ({"messages": [{"content": "a"}]}, "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0] must have a type that is one of "
            "'text', 'refusal', 'image_url', 'video_url', not 'hologram'",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0] needs a type"),
    ],
    ids=str,
)
async def test_a_refusal_says_what_a_field_must_be_in_words_of_ours(fields: dict[str, Any], message: str) -> None:
    assert (await harness().chat(**fields)).json()["error"]["message"] == message


async def test_a_refused_part_of_a_url_is_told_likewise() -> None:
    response = await harness().client.delete("/v1/media/abc")
    assert response.json()["error"]["message"] == "key must have the form ^[0-9a-f]{64}$, not 'abc'"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"model": "tandem-demo", "messages": [', "not valid JSON, at character"),
        (b"[]", "JSON object"),
        (b"5", "JSON object"),
        (b"", "body"),
        (b"\xff\xfe", ""),
        (b'{"model":"tandem-demo","messages":[{"role":"user","content":"x"}],"temperature":NaN}', "finite"),
        (
            b'{"model":"tandem-demo","messages":[{"role":"user","content":"x"}],"metadata":{"a":[-Infinity]}}',
            "metadata.a[0]",
        ),
        (b'{"model":"tandem-demo","messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5000 + b"}", ""),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"model":"tandem-demo","messages":[],"metadata":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 64"),
        (b'{"model":"tandem-demo","messages":[{"role":"user","content":"a\\ud800b"}]}', "at character 1"),
    ],
)
async def test_bodies_that_are_not_plain_json_are_refused(raw: bytes, message: str) -> None:
    response = await harness().client.post(
        "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_arguments_that_hide_a_surrogate_are_refused() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    response = await harness().chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments.x"


async def test_a_body_without_a_json_content_type_is_refused_plainly() -> None:
    response = await harness().client.post("/v1/chat/completions", content=b"{}")
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


async def test_unknown_routes_and_methods_have_the_error_object() -> None:
    client = harness().client
    for method, path, status, code in (
        ("GET", "/v1/nope", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ):
        response = await client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers["x-request-id"]


async def test_a_declared_body_beyond_the_limit_is_refused_unread() -> None:
    setup = harness(limits=HttpLimits(max_body_bytes=1000))
    response = await setup.chat(user="x" * 2000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"
    assert response.headers["connection"] == "close"


async def test_an_undeclared_body_beyond_the_limit_is_refused_while_it_arrives_and_its_rest_discarded() -> None:
    setup = harness(limits=HttpLimits(max_body_bytes=1000))
    num_read = 0
    num_read_when_refused = 0

    async def endless() -> Any:
        nonlocal num_read
        for _ in range(1000):
            num_read += 100
            yield b" " * 100

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def watch(message: Any) -> None:
            nonlocal num_read_when_refused
            if message["type"] == "http.response.start":
                num_read_when_refused = num_read
            await send(message)

        await setup.app(scope, receive, watch)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://test") as client:
        response = await client.post(
            "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"
    assert num_read_when_refused <= 1200
    assert num_read == 100_000


async def test_headers_beyond_the_limit_are_refused() -> None:
    client = harness().client
    assert (await client.get("/health", headers={"x-large": "a" * 30_000})).status_code == 200
    response = await client.get("/health", headers={"x-large": "a" * 40_000})
    assert response.status_code == 400
    assert "above the limit of 32768" in response.json()["error"]["message"]


def test_every_error_class_has_a_response() -> None:
    for cls, info in ERROR_TABLE.items():
        response = error_response(cls("why \ud800"))
        assert response.status_code == info.http_status
        assert json.loads(response.body)["error"]["message"] == "why ?"
        assert ("retry-after" in response.headers) == (info.http_status in (429, 503))


async def test_long_messages_are_cut() -> None:
    response = await harness().chat(model="n" * 100_000)
    assert len(response.text) < 3000


async def test_a_request_after_refusals_is_served() -> None:
    setup = harness(FakeBackend())
    assert (await setup.chat(temperature=-1)).status_code == 400
    assert (await setup.chat()).status_code == 200
