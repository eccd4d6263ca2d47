"""Processes that are killed or told to stop while they work, in a system with two of each."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.integration.cases.asking import ask, client_of, error_of, joined, streamed, text_of, until
from tests.integration.cases.manifest import case
from tests.integration.conftest import picture_message
from tests.paths import needs_shared
from tests.stack import Stack, running_stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two encoders and two decoders behind one gateway that waits a second for an encoder."""
    folder, environment = tmp_path_factory.mktemp("pairs"), {"TANDEM_ENCODER_WAIT_S": "1"}
    settings = {"served_model_name": "tandem-demo", "encoders": 2, "decoders": 2}
    async with running_stack(folder, tiny_checkpoint, environment, **settings) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def asker(pairs: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the system, when all of it is there."""
    await pairs.restart(*(name for name, child in pairs.local.children.items() if child.pid is None))
    await pairs.wait_for(encoders=2, decoders=2)
    async with client_of(pairs.url) as client:
        yield client


def signal_to(stack: Stack, name: str, number: signal.Signals) -> None:
    """Send a signal to a process."""
    pid = stack.local.children[name].pid
    assert pid is not None
    os.kill(pid, number)


async def busy_decoder(stack: Stack) -> str:
    """The decoder that runs the only request there is."""
    found: list[str] = []

    async def is_found() -> bool:
        names = ("decoder-0", "decoder-1")
        found[:] = [name for name in names if await stack.metric(name, "tandem_decoder_active_requests")]
        return bool(found)

    await until(is_found)
    return found[0]


async def test_an_encoder_that_is_killed_at_work_costs_only_time(asker: httpx.AsyncClient, pairs: Stack) -> None:
    body = case("DIS-01").request()
    requests = [{**body, "messages": picture_message(i, width=128, height=128)} for i in range(16)]
    before = await pairs.metric("gateway-0", "tandem_gateway_encode_retries_total")
    for name in ("encoder-0", "encoder-1"):  # frozen, so that both have work when one of them dies
        signal_to(pairs, name, signal.SIGSTOP)
    answers = [asyncio.create_task(ask(asker, request)) for request in requests]

    async def are_begun() -> bool:
        names = ("decoder-0", "decoder-1")
        return sum([await pairs.metric(name, "tandem_decoder_active_requests") for name in names]) == len(requests)

    await until(are_begun)
    await pairs.kill("encoder-0")
    signal_to(pairs, "encoder-1", signal.SIGCONT)
    for response in await asyncio.gather(*answers):
        assert text_of(response)
    assert await pairs.metric("gateway-0", "tandem_gateway_encode_retries_total") > before


async def test_a_stream_goes_on_with_the_same_text_when_its_decoder_is_killed(
    asker: httpx.AsyncClient, pairs: Stack
) -> None:
    body = {**case("DIS-04").request(), "max_tokens": 256}
    undisturbed = text_of(await ask(asker, {**body, "stream": False}))
    before = await pairs.metric("gateway-0", "tandem_gateway_resumed_total")
    async with streamed(asker, body) as events:
        chunks = [await anext(events) for _ in range(10)]
        await pairs.kill(await busy_decoder(pairs))
        chunks += [event async for event in events]
    assert chunks.pop() == "[DONE]"
    assert joined([chunk for chunk in chunks if isinstance(chunk, dict)]) == undisturbed
    assert await pairs.metric("gateway-0", "tandem_gateway_resumed_total") == before + 1


async def ten_streams(asker: httpx.AsyncClient, opened: AsyncExitStack) -> list[AsyncIterator[dict[str, Any] | str]]:
    """Streams that have all begun."""
    body = {**case("K8S-03").request(), "max_tokens": 200}
    streams = [await opened.enter_async_context(streamed(asker, body)) for _ in range(10)]
    await asyncio.gather(*(anext(events) for events in streams))
    return streams


async def whole(events: AsyncIterator[dict[str, Any] | str]) -> str:
    """The rest of a stream that ends well."""
    found = [event async for event in events]
    assert found.pop() == "[DONE]"
    return joined([chunk for chunk in found if isinstance(chunk, dict)])


@pytest.mark.parametrize("name", ["decoder-0", "gateway-0"])
async def test_a_process_that_is_told_to_stop_finishes_its_streams_first(
    asker: httpx.AsyncClient, pairs: Stack, name: str
) -> None:
    async with AsyncExitStack() as opened:
        streams = await ten_streams(asker, opened)
        signal_to(pairs, name, signal.SIGTERM)
        texts = await asyncio.gather(*(whole(events) for events in streams))
        assert len(set(texts)) == 1
        assert texts[0]
    async with asyncio.timeout(15):
        assert await pairs.local.children[name].wait() == 0
    if name == "decoder-0":  # the other one is enough
        assert text_of(await ask(asker, case("SCH-05").body()))
    else:
        with pytest.raises(httpx.ConnectError):
            await ask(asker, case("SCH-05").body())


async def test_without_encoders_only_new_pictures_are_refused_with_a_time(
    asker: httpx.AsyncClient, pairs: Stack
) -> None:
    entry = case("DIS-03")
    cached = {**entry.request(), "cache_salt": "seen"}
    right = text_of(await ask(asker, cached))
    for name in ("encoder-0", "encoder-1"):
        await pairs.kill(name)
    await pairs.wait_for(encoders=0, decoders=2)
    assert text_of(await ask(asker, cached)) == right
    assert text_of(await ask(asker, entry.body("then")))
    response = await ask(asker, {**entry.request(), "cache_salt": "new"})
    assert response.status_code == 503
    error_of(response)
    assert (await asker.get("/ready")).status_code == 200
