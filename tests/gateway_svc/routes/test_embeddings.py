"""`/v1/embeddings` with a decoder that answers with vectors."""

import base64
import math
from typing import Any

import httpx
import numpy as np
import pytest

from tests.gateway_svc.fake_backend import MODEL, TOKENIZER, Harness, VectorBackend, harness
from tests.media_samples import png

PICTURE = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()


def setup_of() -> Harness:
    return harness(VectorBackend(), is_embedding_model=True)


async def embed(setup: Harness, **fields: Any) -> httpx.Response:
    return await setup.client.post("/v1/embeddings", json={"model": MODEL, **fields})


async def test_each_input_has_a_vector_in_order() -> None:
    setup = setup_of()
    body = (await embed(setup, input=["a", "the quick brown fox"])).json()
    assert [item["index"] for item in body["data"]] == [0, 1]
    sizes = [item["embedding"][0] for item in body["data"]]
    assert sizes[0] < sizes[1]
    assert sum(sizes) == body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    assert {request.pooling for request in setup.backend.requests} == {"last"}
    text = TOKENIZER.decode(setup.backend.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "system\nRepresent the user's input.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


async def test_token_ids_go_as_they_are_and_an_instruction_replaces_the_default() -> None:
    setup = setup_of()
    await embed(setup, input=[5, 6, 7])
    await embed(setup, input=[[5, 6], [7]])
    await embed(setup, input="a", instruction="the fox")
    prompts = [request.prompt_token_ids for request in setup.backend.requests]
    assert prompts[0] == [5, 6, 7]
    assert sorted(prompts[1:3]) == [[5, 6], [7]]
    assert "system\nthe fox" in TOKENIZER.decode(prompts[3])


async def test_a_conversation_may_hold_a_picture() -> None:
    setup = setup_of()
    parts = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "a"}]
    body = (await embed(setup, messages=[{"role": "user", "content": parts}])).json()
    assert len(body["data"]) == 1
    assert len(setup.backend.requests[0].media) == 1
    assert body["usage"]["prompt_tokens_details"]["encoded_media_tokens"] == 16


async def test_a_vector_may_be_shorter_and_packed() -> None:
    setup = setup_of()
    whole = (await embed(setup, input=[5])).json()["data"][0]["embedding"]
    assert whole == [1.0, 3.0, 4.0, 0.5]
    cut = (await embed(setup, input=[5], dimensions=2)).json()["data"][0]["embedding"]
    assert math.hypot(*cut) == pytest.approx(1)
    assert cut[1] / cut[0] == pytest.approx(3)
    packed = (await embed(setup, input=[5], encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5, 999]]}, "input[1]"),
        ({"input": [5], "dimensions": 5}, "dimensions"),
        ({"input": [5], "dimensions": 0}, "dimensions"),
        ({"input": [5], "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x " * 5000}, "input"),
        ({"messages": [{"role": "user", "content": "x"}], "instruction": "y"}, "instruction"),
        ({"input": "a", "model": "nope"}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    response = await embed(setup_of(), **fields)
    assert response.status_code == (404 if fields.get("model") else 400), response.text
    assert response.json()["error"]["param"] == param


async def test_a_model_does_what_it_is_for() -> None:
    refused = await embed(harness(), input="a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    setup = setup_of()
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        response = await setup.client.post(path, json={"model": MODEL, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert setup.backend.requests == []
