"""Reading values in place: whatever comes instead of them is noticed, and no reply is left for the next call."""

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from redis.exceptions import RedisError

from common.redis_read import READ_AHEAD, BlockingReader, Reading
from tests.valkey import Valkey, running_valkey

SIZE = 1000
TIME_S = 5.0
ANONYMOUS = "AECDH@SECLEVEL=0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Valkey]:
    async with running_valkey() as server:
        for index in range(3 * READ_AHEAD):
            await server.client.set(f"v{index}", bytes([index]) * SIZE)
        await server.client.set("tail", b"t" * 7)
        yield server


pytestmark = pytest.mark.asyncio(loop_scope="module")


def names(count: int) -> list[tuple[str | int, ...]]:
    return [("GET", f"v{index}") for index in range(count)]


@pytest.mark.parametrize("count", [1, READ_AHEAD - 1, READ_AHEAD, READ_AHEAD + 1, 3 * READ_AHEAD])
async def test_values_land_in_the_buffer_in_order_with_their_checksum(server: Valkey, count: int) -> None:
    reader = BlockingReader(server.url)
    buffer = bytearray(count * SIZE + 7)
    commands = [*names(count), ("GET", "tail")]
    found = await reader.run(lambda reading: reading.values_into(memoryview(buffer), commands, SIZE), 5.0)
    assert buffer == b"".join(bytes([index]) * SIZE for index in range(count)) + b"t" * 7
    assert found == zlib.crc32(buffer)
    assert await reader.run(lambda reading: reading.command("GET", "tail"), 5.0) == b"t" * 7
    reader.close()


@pytest.mark.parametrize("wrong", ["missing", "v0", "a set"])
async def test_a_value_that_is_missing_or_of_another_kind_or_length_is_none(server: Valkey, wrong: str) -> None:
    await server.client.sadd("a set", "x")
    reader = BlockingReader(server.url)

    def call(reading: Reading) -> int | None:
        checksum = reading.values_into(memoryview(bytearray(SIZE * 2 + 9)), [*names(2), ("GET", wrong)], SIZE)
        reading.give_up()
        return checksum

    assert await reader.run(call, 5.0) is None
    assert await reader.run(lambda reading: reading.command("GET", "tail"), 5.0) == b"t" * 7
    reader.close()


async def test_a_call_that_fails_or_is_cancelled_leaves_no_reply_behind(server: Valkey) -> None:
    reader = BlockingReader(server.url)

    def fails(reading: Reading) -> None:
        reading.connection.send_command("GET", "v1")
        raise RuntimeError("while a reply is on its way")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            await reader.run(fails, 5.0)
        assert await reader.run(lambda reading: reading.command("GET", "tail"), 5.0) == b"t" * 7
    tasks = [
        asyncio.create_task(
            reader.run(lambda reading: reading.values_into(memoryview(bytearray(9 * SIZE)), names(9), SIZE), 5.0)
        )
        for _ in range(20)
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    expected = zlib.crc32(b"".join(bytes([index]) * SIZE for index in range(9)))
    assert all(result == expected for result in results[1::2])
    reader.close()


def without_certificates() -> ssl.SSLContext:
    """A server's TLS with a key agreement that needs no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(ANONYMOUS)
    return context


@contextlib.asynccontextmanager
async def answering(parts: Sequence[bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[BlockingReader]:
    """A reader of a server that answers a GET with these parts, one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if b"GET" not in data:
                writer.write(b"+OK\r\n" * data.count(b"CLIENT"))
                continue
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.close()

    stub = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    where = f"127.0.0.1:{stub.sockets[0].getsockname()[1]}/0"
    url = f"redis://{where}" if tls is None else f"rediss://{where}?ssl_cert_reqs=none&ssl_ciphers={ANONYMOUS}"
    reader = BlockingReader(url)
    try:
        yield reader
    finally:
        reader.close()
        stub.close()


VALUE = bytes(range(250)) * 4
PARTS = [b"$10", b"00\r\n", *(VALUE[start : start + 100] for start in range(0, SIZE, 100)), b"\r", b"\n"]


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_value_that_comes_in_pieces_is_whole(is_tls: bool) -> None:
    buffer = bytearray(SIZE)
    async with answering(PARTS, without_certificates() if is_tls else None) as reader:
        for _ in range(2):
            found = await reader.run(
                lambda reading: reading.values_into(memoryview(buffer), [("GET", "v")], SIZE), TIME_S
            )
            assert found == zlib.crc32(VALUE)
            assert buffer == VALUE
            buffer[:] = bytes(SIZE)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("answer", [b"", b"$1000\r\n" + b"x" * 10, b"$10", b"-ERR no\r\n"])
async def test_a_server_that_stops_in_the_middle_costs_the_time_and_no_more(answer: bytes, is_tls: bool) -> None:
    async with answering([answer], without_certificates() if is_tls else None) as reader:
        began = asyncio.get_running_loop().time()
        try:
            found = await reader.run(
                lambda reading: reading.values_into(memoryview(bytearray(SIZE)), [("GET", "v")], SIZE), 0.3
            )
        except (OSError, RedisError):
            found = None
        assert found is None
        assert asyncio.get_running_loop().time() - began < 2.0
