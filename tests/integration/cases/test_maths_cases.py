"""What the running system must tell apart: pictures of one size, sizes of the same bytes, company in a batch."""

import asyncio

import httpx
import pytest

from tests.integration.cases.asking import ask, assert_different, assert_same, check_case
from tests.integration.cases.manifest import Case, case, plain_cases
from tests.integration.conftest import picture_message
from tests.paths import needs_shared
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("entry", plain_cases("MTH"))
async def test_maths_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


async def test_the_prefix_cache_never_answers_about_another_picture(client: httpx.AsyncClient) -> None:
    entry = case("MTH-14")

    async def answer(name: str, salt: str) -> httpx.Response:
        return await ask(client, {**entry.request(name), "logprobs": True, "cache_salt": salt})

    first, other, again = [await answer(name, "one") for name in ("request", "other_0", "request")]
    assert_same(first, again)
    assert_different(first, other)
    assert_same(other, await answer("other_0", "two"))  # a salt of its own: nothing is cached for it
    cached = other.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached <= len(tiny_tokenizer().encode("<|im_start|>user\n<|vision_start|>").ids)


async def test_company_in_a_batch_does_not_change_an_image(client: httpx.AsyncClient) -> None:
    body = {**case("MTH-19").request(), "logprobs": True}
    large = {**body, "messages": picture_message(19, width=512, height=512)}
    alone = await ask(client, {**body, "cache_salt": "alone"})
    packed = [{**asked, "cache_salt": "packed"} for asked in (large, body, large)]
    _, together, _ = await asyncio.gather(*(ask(client, asked) for asked in packed))
    assert together.json()["usage"]["prompt_tokens_details"]["encoded_media_tokens"] > 0
    assert_same(together, alone)
