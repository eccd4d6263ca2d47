"""Connections that send no whole head, or read nothing, are ended; those at work are left alone."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.http_protocol import LimitedProtocol
from common.service import http_server
from deploy.local import free_port
from tests.common.sockets import eventually

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Impatient(LimitedProtocol):
    HEAD_S = 0.2
    STALL_S = 0.2
    MAX_CONNECTIONS = 2


class Application:
    """Answers after `wait`, with `num_bytes`, and tells when it could send no more."""

    def __init__(self, num_bytes: int = 2) -> None:
        self.num_bytes = num_bytes
        self.wait = asyncio.Event()
        self.wait.set()
        self.has_ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.wait.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(0, self.num_bytes, 1 << 16):
            await send({"type": "http.response.body", "body": b"x" * min(self.num_bytes, 1 << 16), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.has_ended.set()


@asynccontextmanager
async def connected(app: Application) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `app` behind an impatient server."""
    port = free_port()
    server = http_server(app, "127.0.0.1", port, protocol=Impatient)
    serving = asyncio.create_task(server.serve_until_cancelled())
    await eventually(lambda: server.started)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What is left to read before the server ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 3)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", HEAD[:-2]], ids=["nothing", "half a line", "half a head"])
async def test_a_connection_without_a_whole_head_is_ended(beginning: bytes) -> None:
    async with connected(Application()) as (reader, writer):
        writer.write(beginning)
        assert await ended(reader) == b""


async def test_half_a_head_after_an_answer_ends_the_connection_too() -> None:
    async with connected(Application()) as (reader, writer):
        writer.write(HEAD)
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD[:10])
        assert await ended(reader) == b""


async def test_a_request_that_is_at_work_for_longer_is_left_alone() -> None:
    app = Application()
    app.wait.clear()
    async with connected(app) as (reader, writer):
        writer.write(HEAD)
        asyncio.get_running_loop().call_later(3 * Impatient.HEAD_S, app.wait.set)
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_stops_reading_is_ended_and_the_application_goes_on() -> None:
    app = Application(num_bytes=64 << 20)
    async with connected(app) as (_, writer):
        writer.write(HEAD)
        await asyncio.wait_for(app.has_ended.wait(), 5)


async def test_a_client_that_reads_gets_everything() -> None:
    app = Application(num_bytes=16 << 20)
    async with connected(app) as (reader, writer):
        writer.write(HEAD)
        num_bytes = 0
        while num_bytes < app.num_bytes:
            num_bytes += len(await asyncio.wait_for(reader.read(1 << 20), 3))
        assert num_bytes >= app.num_bytes


async def test_one_connection_too_many_is_answered_in_openai_shape_and_the_others_go_on() -> None:
    app = Application()
    app.wait.clear()
    async with connected(app) as (reader, writer):
        port = writer.get_extra_info("peername")[1]
        second_reader, second = await asyncio.open_connection("127.0.0.1", port)
        for one in (writer, second):
            one.write(HEAD)
        await one.drain()
        third_reader, third = await asyncio.open_connection("127.0.0.1", port)
        third.write(HEAD)
        refusal = await ended(third_reader)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refusal
        assert b"x-request-id: " in refusal
        assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        app.wait.set()
        for answered in (reader, second_reader):
            assert (await asyncio.wait_for(answered.readline(), 3)).startswith(b"HTTP/1.1 200 ")
        for one in (second, third):
            one.close()


async def test_what_is_not_http_is_answered_in_openai_shape() -> None:
    async with connected(Application()) as (reader, writer):
        writer.write(b"SSH-2.0-x\r\n\r\n")
        answer = await ended(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"x-request-id: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
