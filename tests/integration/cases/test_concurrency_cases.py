"""Many requests at once: none lost, none mixed up, none harmed by another, and nothing left of those that leave."""

import asyncio
import base64
import contextlib
import random
import time
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.integration.cases.asking import ask, check_case, error_of, text_of, until, vision_tokens_of
from tests.integration.cases.manifest import Case, case, plain_cases
from tests.integration.cases.test_api_cases import load_of
from tests.integration.conftest import picture_message
from tests.media_samples import encoded
from tests.paths import needs_shared
from tests.stack import Stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("entry", plain_cases("SCH", "DIS"))
async def test_case_alone(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


async def test_two_hundred_pictures_at_once_are_all_answered_or_refused_with_a_time(
    client: httpx.AsyncClient,
) -> None:
    body = case("DIS-18").request()
    requests = [{**body, "messages": picture_message(1000 + i, width=64, height=64)} for i in range(200)]
    responses = await asyncio.gather(*(ask(client, request) for request in requests))
    for response in responses:
        assert response.status_code in (200, 429, 503), response.text
        if response.status_code != 200:
            error_of(response)
    assert sum(response.status_code == 200 for response in responses) > 0


async def test_one_broken_image_among_eight_clients_fails_alone(client: httpx.AsyncClient) -> None:
    good, broken = case("DIS-19").request(), case("DIS-19").request("more_0")
    bodies = [{**good, "cache_salt": str(index)} for index in range(7)]
    bodies.insert(3, broken)
    statuses = [response.status_code for response in await asyncio.gather(*(ask(client, body) for body in bodies))]
    assert statuses == [200, 200, 200, 400, 200, 200, 200, 200]


async def test_one_picture_for_sixteen_clients_is_encoded_once(client: httpx.AsyncClient, stack: Stack) -> None:
    body = {**case("DIS-21").request(), "cache_salt": "once"}
    encoded = 'tandem_encoder_items_total{modality="image",outcome="encoded"}'
    before = await stack.metric("encoder-0", encoded)
    responses = await asyncio.gather(*(ask(client, body) for _ in range(16)))
    assert len({text_of(response) for response in responses}) == 1
    assert await stack.metric("encoder-0", encoded) == before + 1


async def test_a_first_client_that_leaves_takes_the_picture_from_nobody(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    body = {**case("DIS-21").request(), "cache_salt": "left"}
    first = asyncio.create_task(ask(client, body))
    others = [asyncio.create_task(ask(client, body)) for _ in range(15)]

    async def is_begun() -> bool:
        return first.done() or await stack.metric("decoder-0", "tandem_decoder_active_requests") > 0

    await until(is_begun)
    first.cancel()
    assert len({text_of(response) for response in await asyncio.gather(*others)}) == 1


async def test_a_request_id_of_the_clients_choice_mixes_nothing_up(client: httpx.AsyncClient) -> None:
    entry = case("SCH-05")
    bodies = [entry.request(), entry.request("more_0")]
    alone = [text_of(await ask(client, body)) for body in bodies]
    assert alone[0] != alone[1]
    together = await asyncio.gather(*(ask(client, body, **{"x-request-id": "same"}) for body in bodies * 2))
    assert [text_of(response) for response in together] == alone * 2
    assert len({response.json()["id"] for response in together}) == 4
    assert {response.headers["x-request-id"] for response in together} == {"same"}


async def test_a_hundred_requests_that_leave_while_they_prefill_leave_nothing(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    base = await load_of(stack)
    moments = random.Random(7)
    body = case("SCH-07").request()
    text = body["messages"][0]["content"][:7000]

    async def leave(index: int) -> None:
        messages = [{"role": "user", "content": f"{index} {text}"}]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moments.uniform(0, 0.2)):
                await ask(client, {**body, "messages": messages})

    for begin in range(0, 100, 20):
        await asyncio.gather(*(leave(index) for index in range(begin, begin + 20)))

    async def is_back() -> bool:
        return await load_of(stack) == base

    await until(is_back, within_s=5)
    assert text_of(await ask(client, case("SCH-05").body()))


async def test_an_image_above_the_batch_of_the_encoder_is_encoded_alone(client: httpx.AsyncClient) -> None:
    response = await ask(client, case("SCH-10").body())
    assert response.status_code == 200
    assert vision_tokens_of(response) == 256


async def test_probes_are_answered_at_once_whatever_is_at_work(client: httpx.AsyncClient, stack: Stack) -> None:
    """K8S-06: large pictures and a long prompt."""
    parts: list[dict[str, Any]] = []
    for shade in range(8):
        picture = base64.b64encode(encoded(Image.new("RGB", (4096, 4096), (shade, 90, 9)), "JPEG")).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}})
    contents = [parts, "word " * 30_000]
    asked = [{"model": "tandem-demo", "messages": [{"role": "user", "content": c}], "max_tokens": 8} for c in contents]
    work = [asyncio.create_task(ask(client, body)) for body in asked]
    times: dict[str, list[float]] = {name: [] for name in stack.plan.ready_urls}
    late_s = asyncio.create_task(lateness(work))
    while not all(task.done() for task in work):
        for name, url in stack.plan.ready_urls.items():
            began = time.monotonic()
            assert (await client.get(url.replace("/ready", "/health"))).status_code == 200
            times[name].append(time.monotonic() - began)
    assert [task.result().status_code for task in work] == [200, 400]
    most_s = 1 + await late_s
    assert {name: max(seconds) < most_s for name, seconds in times.items()} == dict.fromkeys(times, True), times


async def lateness(work: list[asyncio.Task[Any]]) -> float:
    """The most seconds by which the machine woke this idle process too late while there was work."""
    most = 0.0
    while not all(task.done() for task in work):
        began = time.monotonic()
        await asyncio.sleep(0.01)
        most = max(most, time.monotonic() - began - 0.01)
    return most
