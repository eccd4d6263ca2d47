"""A whole encoder process beside its own forward: JPEG bytes in, payload on the socket out.

    python -m benchmarks.bench_pipeline [--model FOLDER] [--rounds 5] [--side 448]

The peer of each round is the tower alone, in this process, on the same pictures, two at a time, with one thread. The
encoder, with one compute thread, gets them four at a time, on one core and on two. What is missing to 1.0 is what
decoding, batching, sockets and copies cost beyond what they can do beside the forward. Asserts that the payloads are
the tower's. Last line: one JSON object; exit code 1 when a target is missed.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch
import zmq.asyncio

from benchmarks.bench_vl import checkpoint, jpeg
from benchmarks.side_by_side import Times, affinity, seconds, verdict
from common.embedding import check_payload
from common.link import Link
from common.messages import (
    AnyMessage,
    EncodeReply,
    EncodeRequest,
    Fetch,
    FetchChunk,
    FetchCredit,
    FetchReply,
    Hello,
)
from common.processor_config import ProcessorConfig
from common.tensors import tensor_of
from common.transport import Dealer
from deploy.local import free_port
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.preprocess import PreparedMedia, read_image

PICTURES, IN_FLIGHT, PER_FORWARD, CREDIT = 8, 4, 2, 8
TARGET = 0.9
PATIENCE_S = 120.0


class Client:
    """Gateway and decoder in one: asks for an encode, then fetches it. Leases are left to end with the process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[str, asyncio.Queue[tuple[AnyMessage, bytes]]] = {}

    def take(self, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        """What the encoder sent goes to whoever asked."""
        if isinstance(message, EncodeReply):
            name = message.request_id
        elif isinstance(message, FetchReply | FetchChunk):
            name = message.fetch_id
        else:
            return
        self._waiting[name].put_nowait((message, bytes(payload[0]) if payload else b""))

    async def embed(self, data: bytes, prepared: PreparedMedia) -> torch.Tensor:
        """A new picture's embedding, as [rows, width]."""
        name, key = secrets.token_hex(8), secrets.token_hex(32)
        peer = self._link.peer
        assert peer is not None
        fingerprint = peer.fingerprint
        assert fingerprint is not None
        answers = self._waiting[name] = asyncio.Queue()
        request = EncodeRequest(
            request_id=name,
            key=key,
            modality="image",
            expected_grid=prepared.grid_thw,
            fingerprint=fingerprint,
            time_left_s=PATIENCE_S,
        )
        self._link.send(request, data)
        reply, _ = await answers.get()
        assert isinstance(reply, EncodeReply), reply
        assert reply.error is None, reply
        fetch = Fetch(fetch_id=name, key=key, fingerprint=fingerprint, credit=CREDIT, time_left_s=PATIENCE_S)
        self._link.send(fetch)
        head, _ = await answers.get()
        assert isinstance(head, FetchReply), head
        assert head.header is not None, head
        payload = bytearray()
        for _ in range(head.header.num_chunks):
            _, chunk = await answers.get()
            payload += chunk
            self._link.send(FetchCredit(fetch_id=name, chunks=1))
        del self._waiting[name]
        check_payload(head.header, payload)
        return tensor_of(head.header, payload)


@contextlib.asynccontextmanager
async def encoder(model: Path) -> AsyncIterator[Client]:
    """An encoder process on the cores of this one, ready."""
    with tempfile.TemporaryDirectory(prefix="tdm") as folder:
        control, data = (f"ipc://{folder}/{name}" for name in ("control", "data"))
        options = ["--model", str(model), "--served-model-name", "bench", "--device", "cpu", "--threads", "1"]
        options += ["--control-endpoint", control, "--data-endpoint", data, "--http-port", str(free_port())]
        options += ["--preprocess-threads", "1", "--dtype", "bfloat16", "--log-level", "warning"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "encoder_svc", *options, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        context = zmq.asyncio.Context()
        hello = Hello(role="gateway", instance_id="bench", model="bench", version="0", is_ready=True)
        link = Link(
            Dealer(context, data, name="bench"),
            lambda: hello,
            role="encoder",
            on_message=lambda _, message, payload: client.take(message, payload),
        )
        client = Client(link)
        running = asyncio.create_task(link.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not link.is_ready:
                    assert process.returncode is None, "the encoder ended"
                    await asyncio.sleep(0.05)
            yield client
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            link.close()
            context.destroy(linger=0)
            process.kill()
            await process.wait()


async def embed_all(client: Client, sources: list[bytes], prepared: list[PreparedMedia]) -> list[torch.Tensor]:
    """All pictures, `IN_FLIGHT` at a time."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(data: bytes, item: PreparedMedia) -> torch.Tensor:
        async with gate:
            return await client.embed(data, item)

    return list(await asyncio.gather(*(one(data, item) for data, item in zip(sources, prepared, strict=True))))


async def measure(model: Path, cores: list[int], rounds: int, side: int) -> Times:
    """Seconds for all pictures, by the process and by the tower alone."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    processor = ProcessorConfig.load(model)
    tower = load_vision_tower(model, dtype=torch.bfloat16, device="cpu", processor=processor)
    sources = [jpeg(side, side, seed) for seed in range(PICTURES)]
    prepared = [read_image(data, processor) for data in sources]

    def forward() -> torch.Tensor:
        parts = [
            tower([torch.from_numpy(p.pixel_values) for p in some], [p.grid_thw for p in some])
            for some in (prepared[i : i + PER_FORWARD] for i in range(0, PICTURES, PER_FORWARD))
        ]
        return torch.cat(parts)

    times = Times([], [])
    async with encoder(model) as client:
        got = torch.cat(await embed_all(client, sources, prepared)).float()
        expected = forward().float()
        error = (got - expected).abs().mean() / expected.abs().mean()
        assert error < 0.02, f"the payloads differ from the tower's by {error:.3f}"
        for _ in range(rounds):
            began = time.perf_counter()
            await embed_all(client, sources, prepared)
            times.ours.append(time.perf_counter() - began)
            times.peer.append(seconds(forward))
    return times


def bench(model: Path, rounds: int, side: int = 448) -> dict[str, float]:
    """Ratios on one core, and on two where there are two."""
    cores = affinity()
    print(f"\nbfloat16, {PICTURES} JPEGs of {side}x{side}, {IN_FLIGHT} in flight, one compute thread")
    ratios = {}
    try:
        for some in [cores[:1], cores[:2]] if len(cores) > 1 else [cores[:1]]:
            times = asyncio.run(measure(model, some, rounds, side))
            print(times.row(f"encoder process on cores {some}, against its forward alone"))
            ratios[f"pipeline_{len(some)}_cores"] = times.ratio
    finally:
        os.sched_setaffinity(0, cores)
    return ratios


def main() -> int:
    """Run; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=448)
    options = parser.parse_args()
    with checkpoint(options.model) as model:
        ratios = bench(model, options.rounds, options.side)
    return verdict(ratios, dict.fromkeys(ratios, TARGET))


if __name__ == "__main__":
    sys.exit(main())
