"""Addresses, files and secrets that requests try to reach, and garbage at the sockets of running processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
import zmq.asyncio

from tests.gateway_svc.media_host import media_host
from tests.integration.cases.asking import ask, check_case, error_of, text_of
from tests.integration.cases.manifest import FOLDER, Case, case, plain_cases
from tests.paths import needs_shared
from tests.stack import Stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROCESSES = ("gateway-0", "encoder-0", "decoder-0", "valkey")


@pytest.mark.parametrize("entry", plain_cases("SEC"))
async def test_security_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


async def test_a_private_address_is_not_contacted_under_any_spelling(client: httpx.AsyncClient) -> None:
    entry = case("SEC-01")
    async with media_host() as listener:
        spellings = ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"]
        for spelling in spellings:
            body = entry.request()
            body["messages"][0]["content"][0]["image_url"]["url"] = f"http://{spelling}:{listener.port}/ok"
            response = await ask(client, body)
            assert response.status_code == 400
            error_of(response)
        assert listener.requests == []


async def test_credentials_of_a_media_url_are_nowhere_afterwards(client: httpx.AsyncClient, stack: Stack) -> None:
    response = await ask(client, case("SEC-12").body())
    assert response.status_code == 400
    said = [response.text, *(stack.log(name) for name in PROCESSES)]
    said += [(await client.get(url.replace("/ready", "/metrics"))).text for url in stack.plan.ready_urls.values()]
    for text in said:
        assert text
        assert "SECRET" not in text


async def test_internal_sockets_listen_on_loopback_or_files_only(stack: Stack) -> None:
    listening = [
        connection.laddr.ip
        for name in PROCESSES
        for connection in psutil.Process(stack.local.children[name].pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def sockets_of(stack: Stack) -> list[tuple[str, str]]:
    """Every ZMQ socket that is bound: process and address."""
    found = []
    for command in stack.plan.services:
        words = list(command.arguments)
        found += [
            (command.name, words[words.index(option) + 1])
            for option in ("--control-endpoint", "--data-endpoint")
            if option in words
        ]
    return found


@contextlib.asynccontextmanager
async def stranger(endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A peer that keeps to no protocol."""
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        try:
            yield socket
        finally:
            socket.close()


def garbage() -> list[list[bytes]]:
    """The messages of DIS-14 and SEC-08: as a header alone, and with payload frames behind."""
    headers = [path.read_bytes() for path in sorted((FOLDER / "DIS-14" / "wire").glob("*.bin"))]
    canary = (FOLDER / "SEC-08" / "canary.pkl").read_bytes()
    messages = [[header, *[b"x"] * extra] for header in [*headers, canary] for extra in (0, 1, 10)]
    return [*messages, [headers[0], canary], [canary, canary]]


async def test_garbage_at_every_socket_is_refused_and_counted_and_harms_nobody(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    body = case("DIS-19").request()
    before = text_of(await ask(client, body))
    sockets = sockets_of(stack)
    assert len(sockets) == 3
    for name, endpoint in sockets:
        refused = await stack.metric(name, "tandem_malformed_frames_total")
        messages = garbage()
        async with stranger(endpoint) as socket:
            for message in messages:
                await socket.send_multipart(message)
            async with asyncio.timeout(10):
                for _ in messages:
                    assert b"efused" in b"".join(await socket.recv_multipart())
        assert await stack.metric(name, "tandem_malformed_frames_total") == refused + len(messages)
        fresh = {**body, "cache_salt": name + endpoint[-1]}
        assert text_of(await ask(client, fresh)) == before
    assert not any("CANARY" in stack.log(name) for name in PROCESSES)


async def test_a_large_header_and_a_large_body_are_refused_before_they_are_held(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    """SEC-10."""
    response = await ask(client, case("API-12").body(), **{"x-large": "a" * (64 << 10)})
    assert response.status_code in (400, 431)
    resident = psutil.Process(stack.local.children["gateway-0"].pid).memory_info
    before = resident().rss

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json", "content-length": str(200 << 20)}
    response = await client.post("/v1/chat/completions", content=endless(), headers=headers)
    assert response.status_code == 413
    error_of(response)
    assert resident().rss - before < 50 << 20
