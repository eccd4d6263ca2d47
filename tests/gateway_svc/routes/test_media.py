"""`/v1/media` with a scripted backend: warm, survey, forget."""

import base64
from typing import Any

import httpx
import pytest

from tests.gateway_svc.fake_backend import MODEL, FakeBackend, Harness, harness
from tests.media_samples import png


def part(seed: int = 0, size: int = 64) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(size, size, seed)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def warm(setup: Harness, *media: Any, **fields: Any) -> httpx.Response:
    return await setup.client.post("/v1/media", json={"model": MODEL, "media": list(media), **fields})


async def test_warming_tells_key_tokens_and_outcome_of_each_item() -> None:
    setup = harness()
    body = (await warm(setup, part(1), part(2, 256), part(1))).json()
    assert [item["outcome"] for item in body["data"]] == ["encoded"] * 3
    assert [item["tokens"] for item in body["data"]] == [16, 64, 16]
    keys = [item["key"] for item in body["data"]]
    assert keys[0] == keys[2] != keys[1]
    again = (await warm(setup, part(2, 256), part(3))).json()
    assert [item["outcome"] for item in again["data"]] == ["cache", "encoded"]


async def test_the_key_is_that_of_a_chat_with_the_same_options() -> None:
    setup = harness()
    options = {"mm_processor_kwargs": {"max_pixels": 20_000}, "cache_salt": "tenant"}
    keys = [(await warm(setup, part(1), **fields)).json()["data"][0]["key"] for fields in ({}, options)]
    await setup.chat(messages=[{"role": "user", "content": [part(1)]}], **options)
    assert setup.backend.requests[0].media[0].key == keys[1]
    assert (setup.backend.requests[0].fingerprint, setup.backend.requests[0].wire_dtype) == ("f" * 64, "float32")
    assert keys[0] != keys[1]


async def test_survey_and_purge() -> None:
    setup = harness()
    keys = [item["key"] for item in (await warm(setup, part(1), part(2))).json()["data"]]
    survey = (await setup.client.get("/v1/media")).json()
    assert survey == {"object": "media.cache", "model": MODEL, "items": 2, "bytes": 2000}
    assert (await setup.client.delete(f"/v1/media/{keys[0]}")).json() == {"object": "media.deleted", "key": keys[0]}
    gone = await setup.client.delete(f"/v1/media/{keys[0]}")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "key")
    assert (await setup.client.delete("/v1/media", params={"model": MODEL})).json()["items"] == 1
    assert setup.backend.cached == set()


async def test_without_a_shared_cache_warming_works_and_the_rest_says_so() -> None:
    setup = harness(FakeBackend(has_cache=False))
    assert (await warm(setup, part())).status_code == 200
    paths = [("GET", "/v1/media"), ("DELETE", f"/v1/media/{'a' * 64}"), ("DELETE", f"/v1/media?model={MODEL}")]
    for method, path in paths:
        response = await setup.client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")


@pytest.mark.parametrize(
    ("media", "fields", "param"),
    [
        ([], {}, "media"),
        ([part()] * 257, {}, "media"),
        ([{"type": "text", "text": "x"}], {}, "media[0]"),
        ([part(), {"type": "image_url", "image_url": {"url": "data:,x"}}], {}, "media[1]"),
        ([part()], {"mm_processor_kwargs": {"nope": 1}}, "mm_processor_kwargs.nope"),
        ([part()], {"model": "nope"}, "model"),
    ],
    ids=range(6),
)
async def test_refusals_name_their_field(media: list[Any], fields: dict[str, Any], param: str) -> None:
    response = await warm(harness(), *media, **fields)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/media/xyz", "/v1/media", "/v1/media?model=nope"])
async def test_what_is_to_be_forgotten_is_named_exactly(path: str) -> None:
    setup = harness()
    await warm(setup, part())
    response = await setup.client.delete(path)
    assert response.status_code == (404 if "nope" in path else 400), response.text
    assert response.json()["error"]["param"] in ("key", "model")
    assert len(setup.backend.cached) == 1
