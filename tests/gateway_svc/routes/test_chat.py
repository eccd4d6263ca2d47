"""Chat completions over HTTP, streamed and not, with a backend that is scripted."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from common.errors import DecoderUnavailable, MediaFetchFailed, ModelFailure
from gateway_svc.routes.api import HttpLimits
from gateway_svc.text.sampling import SamplingDefaults
from tests.gateway_svc.fake_backend import MODEL, TOKENIZER, FakeBackend, harness

USAGE_OPTION = {"stream": True, "stream_options": {"include_usage": True}}


def events_of(response: httpx.Response) -> list[Any]:
    """The data of all events, `[DONE]` as that string."""
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk.get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


async def test_an_answer_has_openai_s_shape() -> None:
    setup = harness()
    response = await setup.chat()
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    request = setup.backend.requests[0]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3, "cached_media_tokens": 0, "encoded_media_tokens": 0}


async def test_a_stream_is_role_deltas_finish_usage_done() -> None:
    setup = harness()
    response = await setup.chat(**USAGE_OPTION)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, usage, done = events_of(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 3
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert text_of(chunks) == "Hello there."
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_is_not_sent_unasked() -> None:
    chunks = events_of(await harness().chat(stream=True))[:-1]
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


async def test_stream_and_answer_have_the_same_text_with_split_characters() -> None:
    backend = FakeBackend(answers=["A \N{GRINNING FACE} or a 猫."])
    setup = harness(backend)
    whole = (await setup.chat()).json()["choices"][0]["message"]["content"]
    chunks = events_of(await setup.chat(stream=True))
    assert whole == text_of(chunks) == backend.answers[0]
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


async def test_several_choices_interleave_and_count_together() -> None:
    setup = harness(FakeBackend(answers=["One answer.", "Another, longer one."]))
    *chunks, usage, _ = events_of(await setup.chat(n=2, **USAGE_OPTION))
    assert [text_of(chunks, index) for index in range(2)] == ["One answer.", "Another, longer one."]
    whole = (await setup.chat(n=2)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["prompt_tokens"] == len(setup.backend.requests[0].prompt_token_ids)
    order = [chunk["choices"][0]["index"] for chunk in chunks[2:]]
    assert order != sorted(order)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it_and_closes_the_backend(stream: bool) -> None:
    backend = FakeBackend(answers=["The quick brown fox jumps over the lazy dog."])
    setup = harness(backend)
    response = await setup.chat(stop=["n fox ju"], stream=stream)
    if stream:
        chunks = events_of(response)
        assert text_of(chunks) == "The quick brow"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert choice["message"]["content"] == "The quick brow"
        assert choice["finish_reason"] == "stop"
    assert backend.num_closed == 1


async def test_a_choice_that_a_stop_string_ended_says_no_more_while_others_go_on() -> None:
    backend = FakeBackend(answers=["a stop b c d", "no end here at all"])
    setup = harness(backend)
    chunks = events_of(await setup.chat(n=2, stop="stop", stream=True))
    assert text_of(chunks, 0) == "a "
    assert text_of(chunks, 1) == "no end here at all"
    assert backend.ended_choices == [(backend.requests[0].request_id, 0)], "what is not wanted any more still runs"


async def test_logprobs_are_alike_streamed_and_not() -> None:
    setup = harness(FakeBackend(answers=["Hi \N{GRINNING FACE}"]))
    whole = (await setup.chat(logprobs=True, top_logprobs=3)).json()["choices"][0]["logprobs"]["content"]
    chunks = events_of(await setup.chat(logprobs=True, top_logprobs=3, stream=True))[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == "Hi \N{GRINNING FACE}"
    assert whole[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert whole[1]["logprob"] == -1.0
    assert whole[0]["top_logprobs"][2]["logprob"] == -9999.0


async def test_logprobs_never_show_tokens_of_a_stop_string() -> None:
    setup = harness(FakeBackend(answers=["The quick brown fox"]))
    choice = (await setup.chat(logprobs=True, stop=["brown"])).json()["choices"][0]
    assert choice["message"]["content"] == "The quick "
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "The quick"


async def test_an_error_before_the_first_token_is_a_plain_http_error() -> None:
    setup = harness(FakeBackend(error=DecoderUnavailable("no decoder is ready: try again", retry_after_s=1.5)))
    response = await setup.chat(stream=True)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1500"
    assert response.json()["error"] == {
        "message": "no decoder is ready: try again",
        "type": "server_error",
        "param": None,
        "code": "decoder_unavailable",
    }


async def test_an_error_after_the_first_token_is_an_event_without_done() -> None:
    setup = harness(FakeBackend(error=ModelFailure("the embedding is not finite"), error_after_tokens=2))
    response = await setup.chat(stream=True)
    assert response.status_code == 200
    events = events_of(response)
    assert events[-1]["error"]["code"] == "model_failure"
    assert "[DONE]" not in events


async def test_an_unexpected_fault_tells_the_request_id_only() -> None:
    setup = harness(FakeBackend(error=RuntimeError("secret /path")))
    response = await setup.chat()
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["message"] == f"internal error; request id {response.headers['x-request-id']}"
    assert error["code"] == "internal_error"


async def test_an_unexpected_fault_in_a_stream_is_an_event_without_its_text() -> None:
    setup = harness(FakeBackend(error=RuntimeError("secret /path"), error_after_tokens=1))
    response = await setup.chat(stream=True)
    assert events_of(response)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_backend_that_ends_too_early_is_a_failure() -> None:
    backend = FakeBackend()
    backend._events = lambda request: FakeBackend._events(backend, request)[:2]  # type: ignore[method-assign]
    response = await harness(backend).chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "model_failure"


async def test_a_stream_that_waits_opens_with_keep_alive_comments() -> None:
    release = asyncio.Event()

    async def hold(number: int) -> None:
        if number == 0:
            await asyncio.wait_for(release.wait(), 5)

    setup = harness(FakeBackend(before_token=hold), limits=HttpLimits(stream_open_s=0.02, keep_alive_s=0.01))
    asyncio.get_running_loop().call_later(0.2, release.set)
    response = await setup.chat(stream=True)
    assert response.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert text_of(events_of(response)) == "Hello there."


async def test_an_error_after_a_silent_opening_is_an_event() -> None:
    async def fail_late(number: int) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0.1)

    setup = harness(FakeBackend(before_token=fail_late), limits=HttpLimits(stream_open_s=0.01, keep_alive_s=1))
    response = await setup.chat(stream=True)
    assert response.status_code == 200
    assert events_of(response)[-1]["error"]["code"] == "internal_error"


async def test_max_tokens_is_what_the_context_leaves_unless_less_is_asked_for() -> None:
    setup = harness()
    for fields, expected in (
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 10**9}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 4}, 4),
    ):
        assert (await setup.chat(**fields)).status_code == 200
        request = setup.backend.requests[-1]
        assert request.sampling.max_tokens == (expected or 2048 - len(request.prompt_token_ids))


async def test_the_checkpoint_s_sampling_is_the_default_and_the_request_s_word_counts_more() -> None:
    setup = harness(defaults=SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, max_tokens=100))
    await setup.chat()
    await setup.chat(temperature=0, top_p=1, top_k=-1, seed=7, max_tokens=7)
    first, second = (request.sampling for request in setup.backend.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.7, 0.8, 20, 100)
    assert (second.temperature, second.top_p, second.top_k, second.max_tokens) == (0.0, 1.0, 0, 7)
    assert second.seed == 7


async def test_every_sampling_field_reaches_the_decoder() -> None:
    setup = harness()
    response = await setup.chat(
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.3,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        logit_bias={"9": -100},
        cache_salt="tenant",
        n=2,
    )
    assert response.status_code == 200
    request = setup.backend.requests[0]
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.ignore_eos) == (1.3, 2, True)
    assert (sampling.stop_token_ids, sampling.logit_bias, sampling.n) == ([5], {9: -100.0}, 2)
    assert request.cache_salt == "tenant"


async def test_client_ids_are_labels_and_internal_ids_are_ours() -> None:
    setup = harness()
    headers = {"x-request-id": "same"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    responses = [await setup.client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in responses] == ["same", "same"]
    ids = [request.request_id for request in setup.backend.requests]
    assert len(set(ids)) == 2
    assert "same" not in ids


@pytest.mark.parametrize("label", ["a b", "x" * 129, "ü", "", "a\tb"])
async def test_unsafe_request_ids_are_replaced(label: str) -> None:
    response = await harness().client.get("/health", headers={"x-request-id": label.encode()})
    assert response.headers["x-request-id"] != label
    assert len(response.headers["x-request-id"]) == 32


async def test_tools_reach_the_template_with_their_keys_in_order() -> None:
    setup = harness(template="{{ tools[0] | tojson }}")
    tool = {"function": {"parameters": {"type": "object"}, "name": "f", "strict": True}, "type": "function"}
    assert (await setup.chat(tools=[tool])).status_code == 200
    ids = setup.backend.requests[0].prompt_token_ids
    assert ids == TOKENIZER.encode(json.dumps(tool), add_special_tokens=False).ids


async def test_one_line_tells_the_story_of_a_request(logs: list[Any]) -> None:
    await harness().chat()
    (line,) = [line for line in logs if line["event"] == "chat completion"]
    assert line["log_level"] == "info"
    assert line["outcome"] == "ok"
    assert line.keys() >= {
        "request_id",
        "prompt_tokens",
        "completion_tokens",
        "media",
        "media_bytes",
        "ttft_s",
        "total_s",
    }


async def test_metrics_count_requests_tokens_and_routes() -> None:
    setup = harness()
    await setup.chat()
    await setup.client.get("/v1/nope")
    text = (await setup.client.get("/metrics")).text
    assert 'tandem_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'tandem_requests_total{route="other",status="404"} 1.0' in text
    assert "tandem_ttft_seconds_count 1.0" in text
    assert "tandem_tpot_seconds_count 1.0" in text
    assert "tandem_prompt_tokens_total" in text


async def test_models_probes_and_version_answer() -> None:
    setup = harness()
    get = setup.client.get
    models = (await get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [MODEL, "alias"]
    assert models["data"][0]["max_model_len"] == 2048
    assert (await get(f"/v1/models/{MODEL}")).json()["object"] == "model"
    assert (await get("/v1/models/nope")).json()["error"]["code"] == "model_not_found"
    assert (await get("/health")).status_code == 200
    assert (await get("/version")).json() == {"version": "1.2.3"}
    assert (await get("/ready")).json()["ready"] is True
    setup.backend.ready = False
    not_ready = await get("/ready")
    assert (not_ready.status_code, not_ready.json()["decoders"]) == (503, 0)


async def test_the_documentation_lists_the_request_s_fields() -> None:
    schema = (await harness().client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in operation["responses"]
    assert "mm_processor_kwargs" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]


async def test_an_error_of_a_url_names_its_item() -> None:
    setup = harness(FakeBackend(error=MediaFetchFailed("messages[0].content[0]: x", param="messages[0].content[0]")))
    assert (await setup.chat()).json()["error"]["param"] == "messages[0].content[0]"


async def test_before_any_decoder_was_seen_the_answer_is_503_and_not_that_the_prompt_is_too_long() -> None:
    setup = harness(FakeBackend(max_model_len=0, vocab_size=0, ready=False))
    response = await setup.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "decoder_unavailable"
    assert response.headers["retry-after"] == "5"
    assert setup.backend.requests == []
