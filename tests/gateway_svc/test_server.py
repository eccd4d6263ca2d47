"""The application behind a real uvicorn: the OpenAI client, clients that leave, slow media, stops in mid-stream."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import uvicorn

from common.errors import DecoderUnavailable
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.routes.api import HttpLimits
from tests.gateway_svc.fake_backend import MODEL, FakeBackend, Harness, harness
from tests.gateway_svc.media_host import media_host

HELLO = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def running(setup: Harness, drain_s: int = 5) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """The base URL of the application on a free port, and its server."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    config = uvicorn.Config(setup.app, log_config=None, lifespan="off", timeout_graceful_shutdown=drain_s)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))  # without its signal handlers
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        await task


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_the_openai_client_reads_both_kinds_of_answers() -> None:
    async with (
        running(harness(FakeBackend(answers=["Hello \N{GRINNING FACE}."]))) as (url, _),
        client_of(url) as client,
    ):
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == "Hello \N{GRINNING FACE}."
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}, n=2
        )
        texts, usage = ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["Hello \N{GRINNING FACE}."] * 2
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert [model.id for model in (await client.models.list()).data] == [MODEL, "alias"]


async def test_the_openai_client_reads_errors() -> None:
    backend = FakeBackend(error=DecoderUnavailable("no decoder", retry_after_s=0.2))
    async with running(harness(backend)) as (url, _), client_of(url) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert caught.value.status_code == 503
        assert caught.value.code == "decoder_unavailable"
        assert caught.value.response.headers["retry-after-ms"] == "200"


async def test_a_client_that_leaves_a_stream_ends_the_generation_at_once() -> None:
    asked = asyncio.Event()

    async def endless(number: int) -> None:
        if number == 3:
            asked.set()
            await asyncio.Event().wait()

    backend = FakeBackend(before_token=endless)
    async with running(harness(backend)) as (url, _):
        async with (
            httpx.AsyncClient() as client,
            client.stream(
                "POST", f"{url}/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "stream": True}
            ) as response,
        ):
            assert response.status_code == 200
            await asyncio.wait_for(asked.wait(), 5)
            assert backend.num_closed == 0
        await asyncio.wait_for(backend.closed.wait(), 1)


async def test_a_client_that_leaves_before_its_answer_ends_the_generation_at_once() -> None:
    asked = asyncio.Event()

    async def endless(number: int) -> None:
        asked.set()
        await asyncio.Event().wait()

    for stream in (False, True):
        backend = FakeBackend(before_token=endless)
        async with running(harness(backend)) as (url, _), httpx.AsyncClient() as client:
            body = {"model": MODEL, "messages": HELLO, "stream": stream}
            request = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body))
            await asyncio.wait_for(asked.wait(), 5)
            request.cancel()
            await asyncio.wait_for(backend.closed.wait(), 1)
        asked.clear()


async def test_a_stream_survives_a_graceful_stop_of_the_server() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def pause(number: int) -> None:
        if number == 2:
            asked.set()
            await asyncio.wait_for(go_on.wait(), 5)

    async with running(harness(FakeBackend(before_token=pause))) as (url, server), client_of(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        await asyncio.wait_for(asked.wait(), 5)
        server.should_exit = True
        asyncio.get_running_loop().call_later(0.3, go_on.set)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello there."


async def test_a_stream_that_is_cut_by_a_stopping_server_says_so() -> None:
    asked = asyncio.Event()

    async def hang(number: int) -> None:
        if number == 2:
            asked.set()
            await asyncio.Event().wait()

    body = {"model": MODEL, "messages": HELLO, "stream": True}
    async with (
        running(harness(FakeBackend(before_token=hang)), drain_s=1) as (url, server),
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        await asyncio.wait_for(asked.wait(), 5)
        server.should_exit = True
        lines = [line async for line in response.aiter_lines() if line]
    assert "shutting down" in lines[-1]
    assert '"error"' in lines[-1]
    assert "data: [DONE]" not in lines


async def test_a_slow_media_host_delays_nobody_else() -> None:
    fetcher = MediaFetcher(FetchLimits(total_s=1.0, private_hosts=frozenset({"127.0.0.1"})))
    setup = harness(FakeBackend(), fetcher=fetcher)
    async with media_host() as host, running(setup) as (url, _), httpx.AsyncClient(base_url=url) as client:
        part = {"type": "image_url", "image_url": {"url": host.url("/drip")}}
        slow_body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        slow = asyncio.create_task(client.post("/v1/chat/completions", json=slow_body))
        for _ in range(5):
            assert (await asyncio.wait_for(client.get("/health"), 1)).status_code == 200
            quick = client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
            assert (await asyncio.wait_for(quick, 1)).status_code == 200
        assert not slow.done()
        assert (await slow).status_code == 400
        await fetcher.aclose()


async def test_a_body_that_is_declared_too_large_is_answered_and_the_connection_closed() -> None:
    async with running(harness(limits=HttpLimits(max_body_bytes=1000))) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 200000000\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 2)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"payload_too_large" in answer
        writer.close()


async def test_a_body_of_two_lengths_is_refused_and_the_connection_closed() -> None:
    """A proxy and this server could take different ends of it for the beginning of the next request."""
    async with running(harness()) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 2)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in answer
        writer.close()


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_client_that_sends_a_refused_body_to_its_end_sees_the_refusal(is_declared: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(32):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"} | ({"content-length": str(32 << 20)} if is_declared else {})
    async with (
        running(harness(limits=HttpLimits(max_body_bytes=1000))) as (url, _),
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        response = await client.post("/v1/chat/completions", content=body(), headers=headers)
    assert response.status_code == 413


@pytest.mark.parametrize(
    "framing", [b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{"], ids=["body", "chunk"]
)
async def test_half_a_body_is_answered_and_the_connection_closed(framing: bytes) -> None:
    async with running(harness(limits=HttpLimits(body_idle_s=0.05))) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + framing)
        answer = await asyncio.wait_for(reader.read(), 2)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in answer
        writer.close()
