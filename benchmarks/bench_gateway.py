"""How light the gateway is: throughput beside a bare server, time to first token, memory of a stream, start.

    python -m benchmarks.bench_gateway [--model demo/model] [--rounds 5]

The gateway is the real process between stubs that cost nothing. Server and gateway run on one core, client and stubs
on the other; where there is one core only, all share it, and the wall-clock row says nothing. Rounds alternate between
the two sides. Prints the raw figures of each side and, as the last line, one JSON object; exit code 1 when a target is
missed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import zmq.asyncio

from benchmarks.gateway_stubs import LETTERS, MODEL, letter_after, stub_hello
from benchmarks.stream_client import Burst, Streams, request_bytes
from common.link import Link
from common.messages import AnyMessage, GenerateRequest, SamplingParams, TokenBatch
from common.transport import Dealer, Payload
from deploy.local import free_port

STREAMS, TOKENS = 64, 64
MANY = 1000
PACED_STEP_S = 0.03
PROMPT_TOKENS = 100
TARGETS: dict[str, tuple[str, float]] = {
    "chunks_per_s_of_bare": (">=", 0.60),
    "chunks_per_cpu_s_of_bare": (">=", 0.60),
    "ttft_added_p50_ms": ("<", 3.0),
    "cancel_p50_ms": ("<", 100.0),
    "gap_by_uploads_ms": ("<", 50.0),
    "memory_per_stream_kb": ("<", 200.0),
    "ready_s": ("<", 3.0),
    "lost_or_reordered": ("<", 1.0),
    "torch_modules": ("<", 1.0),
}


@dataclass(frozen=True)
class Cores:
    """Where servers and clients run."""

    server: int
    client: int

    @classmethod
    def choose(cls) -> "Cores":
        """The last core for servers, the first for everything else."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[-1], allowed[0])


@dataclass(frozen=True)
class Process:
    """A process that is measured."""

    port: int
    pid: int
    ready_s: float

    def cpu_s(self) -> float:
        """Seconds of a core that all its threads have used."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Memory that it holds."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def has_mapped(self, library: str) -> bool:
        """Whether a shared library of this name is loaded."""
        return library in Path(f"/proc/{self.pid}/maps").read_text()


@contextlib.contextmanager
def process(core: int, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process on one core, ended afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


@contextlib.asynccontextmanager
async def server(core: int, port: int, path: str, *command: str) -> AsyncIterator[Process]:
    """A server process, from its start until it says that it is ready, and then until the end of the block."""
    began = time.perf_counter()
    with process(core, *command) as child:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
            while not await _answers(client, f"http://127.0.0.1:{port}{path}"):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
        yield Process(port, child.pid, time.perf_counter() - began)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.asynccontextmanager
async def gateway_and_bare(
    model: Path, cores: Cores
) -> AsyncIterator[tuple[Process, Process, str, "subprocess.Popen[bytes]"]]:
    """Both servers, the stub decoder's endpoint, and the stubs' process."""
    gateway_port, bare_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        control, encoder_control, encoder_data = (f"ipc://{folder}/{name}" for name in ("d", "ec", "ed"))
        stubs = ("services", control, encoder_control, encoder_data, str(model / "tokenizer.json"))
        arguments = (f"--model={model}", f"--served-model-name={MODEL}", f"--decoders={control}")
        encoders = f"--encoders={encoder_control},{encoder_data}"
        gateway_command = ("gateway_svc", *arguments, encoders, f"--port={gateway_port}", "--log-level=warning")
        with process(cores.client, "benchmarks.gateway_stubs", *stubs) as stub:
            bare_command = ("benchmarks.gateway_stubs", "bare", str(bare_port))
            async with (
                server(cores.server, bare_port, "/openapi.json", *bare_command) as bare,
                server(cores.server, gateway_port, "/ready", *gateway_command) as gateway,
            ):
                yield gateway, bare, control, stub


@dataclass(frozen=True)
class Speed:
    """Chunks a second of the clock, and of the server's core."""

    per_s: float
    per_cpu_s: float


async def burst(target: Process, count: int, tokens: int, step_s: float) -> tuple[Burst, Speed]:
    """`count` streams at once; every stream must be complete."""
    requests = [
        request_bytes(f"stream {number}", max_tokens=tokens, barrier=count, step_s=step_s) for number in range(count)
    ]
    streams = await Streams.open(target.port, count)
    cpu_s = target.cpu_s()
    result = await streams.run(requests)
    cpu_s = target.cpu_s() - cpu_s
    assert result.num_chunks == count * tokens, (result.num_chunks, count * tokens)
    return result, Speed(result.num_chunks / result.wall_s, result.num_chunks / cpu_s)


async def throughput(gateway: Process, bare: Process, rounds: int) -> dict[str, float]:
    """Chunks a second through the gateway, as a share of what the bare server gives.

    By the clock, both send as fast as they can. By the server's own core, tokens come in steps, as a decoder gives
    them, so that each is a chunk of its own on its way through the gateway.
    """
    for target in (gateway, bare):
        await burst(target, STREAMS, TOKENS, 0.0)
    free: dict[str, list[Speed]] = {"gateway": [], "bare": []}
    paced: dict[str, list[Speed]] = {"gateway": [], "bare": []}
    for _ in range(rounds):
        for name, target in (("gateway", gateway), ("bare", bare)):
            free[name].append((await burst(target, STREAMS, TOKENS, 0.0))[1])
            paced[name].append((await burst(target, STREAMS, TOKENS, PACED_STEP_S))[1])
    for name in free:
        print(f"{name}: chunks/s, unpaced            ", [round(speed.per_s) for speed in free[name]])
        print(f"{name}: chunks/s of its core, unpaced", [round(speed.per_cpu_s) for speed in free[name]])
        print(f"{name}: chunks/s of its core, paced  ", [round(speed.per_cpu_s) for speed in paced[name]])
    return {
        "chunks_per_s_of_bare": _ratio(free, lambda speed: speed.per_s),
        "chunks_per_cpu_s_of_bare": _ratio(paced, lambda speed: speed.per_cpu_s),
    }


def _ratio(speeds: dict[str, list[Speed]], of: Callable[[Speed], float]) -> float:
    return statistics.median(map(of, speeds["gateway"])) / statistics.median(map(of, speeds["bare"]))


async def first_token(gateway: Process, control: str, tries: int) -> dict[str, float]:
    """What the gateway adds to the stub's own time to first token; one request at a time."""
    prompt = "a" * (PROMPT_TOKENS - 10)
    request = request_bytes(prompt, max_tokens=1, barrier=1, step_s=0.0)
    through, alone = [], []
    async with direct(control) as ask:
        for _ in range(tries):
            through.append((await (await Streams.open(gateway.port, 1)).run([request])).answers[0].ttft_s)
            alone.append(await ask())
    print("ttft through the gateway, ms:", _quantiles(through), " of the stub alone:", _quantiles(alone))
    return {"ttft_added_p50_ms": (statistics.median(through) - statistics.median(alone)) * 1000}


@contextlib.asynccontextmanager
async def direct(control: str) -> AsyncIterator[Callable[[], "asyncio.Future[float]"]]:
    """Asks the stub decoder without a gateway; gives seconds to its first token."""
    context = zmq.asyncio.Context()
    answered: asyncio.Queue[float] = asyncio.Queue()

    def on_message(link: Link, message: AnyMessage, payload: "list[Payload] | tuple[Payload, ...]") -> None:
        if isinstance(message, TokenBatch):
            answered.put_nowait(time.perf_counter())

    link = Link(
        Dealer(context, control, name="bench"),
        lambda: stub_hello("gateway"),
        role="decoder",
        on_message=on_message,  # type: ignore[arg-type]
        on_up=lambda link: None,
        on_down=lambda link, instance_id: None,
    )
    running = asyncio.create_task(link.run())
    number = 0

    async def ask() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        link.send(
            GenerateRequest(
                request_id=f"direct-{number}",
                model=MODEL,
                prompt_token_ids=list(range(PROMPT_TOKENS)),
                sampling=SamplingParams(seed=1, max_tokens=1, temperature=0.0),
                time_left_s=10.0,
            )
        )
        return await answered.get() - began

    try:
        async with asyncio.timeout(10):
            while not link.is_ready:  # noqa: ASYNC110 (a link has no event for it)
                await asyncio.sleep(0.01)
        yield ask  # type: ignore[misc]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.close()
        context.destroy(linger=0)


def _quantiles(seconds: list[float]) -> str:
    ordered = sorted(second * 1000 for second in seconds)
    return " ".join(f"p{q}={ordered[min(len(ordered) - 1, len(ordered) * q // 100)]:.2f}" for q in (10, 50, 90, 99))


async def cancellation(gateway: Process, stub: "subprocess.Popen[bytes]") -> dict[str, float]:
    """From a client that leaves to the decoder's hearing of it."""
    assert stub.stdout is not None
    waits = []
    for _ in range(20):
        streams = await Streams.open(gateway.port, 1)
        streams.start([request_bytes("leaving", max_tokens=TOKENS, barrier=1, step_s=0.1)])
        await streams.all_begun()
        left = time.monotonic()
        streams.leave()
        waits.append(float(await asyncio.to_thread(stub.stdout.readline)) - left)
    print("client gone to Cancel at the decoder, ms:", _quantiles(waits))
    return {"cancel_p50_ms": statistics.median(waits) * 1000}


async def uploads(gateway: Process, cores: Cores, rounds: int) -> dict[str, float]:
    """The longest gap in running streams while others upload 20 MB, less what it is without."""
    quiet, loud = [], []
    for _ in range(rounds):
        quiet.append(await longest_gap(gateway, cores, 0))
        loud.append(await longest_gap(gateway, cores, 3))
    print("longest gap in 8 streams of a step each 20 ms, ms: without uploads", [round(gap * 1000) for gap in quiet])
    print("longest gap in 8 streams of a step each 20 ms, ms: with 3 uploads ", [round(gap * 1000) for gap in loud])
    return {"gap_by_uploads_ms": (statistics.median(loud) - statistics.median(quiet)) * 1000}


async def longest_gap(gateway: Process, cores: Cores, num_uploads: int) -> float:
    """Seconds, over 8 streams that run for two seconds."""
    with process(cores.client, "benchmarks.gateway_stubs", "uploads", str(gateway.port), str(num_uploads)) as uploader:
        assert uploader.stdin is not None
        await asyncio.sleep(1.5)  # until its bodies are made
        streams = await Streams.open(gateway.port, 8)
        requests = [request_bytes(f"stream {n}", max_tokens=100, barrier=8, step_s=0.02) for n in range(8)]
        began = streams.start(requests)
        await streams.all_begun()
        uploader.stdin.write(b"\n")
        uploader.stdin.flush()
        result = await streams.finish(began)
        assert await asyncio.to_thread(uploader.wait) == 0
    return max(answer.longest_gap_s for answer in result.answers)


async def many_streams(gateway: Process, count: int) -> dict[str, float]:
    """Memory of `count` streams that run at once, and whether each got all its tokens in order."""
    await burst(gateway, STREAMS, TOKENS, 0.0)  # what is allocated once is not a stream's
    requests = [
        request_bytes(f"stream {number}", max_tokens=TOKENS, barrier=count, step_s=0.25) for number in range(count)
    ]
    base = gateway.rss_bytes()
    streams = await Streams.open(gateway.port, count)
    began = streams.start(requests)
    await streams.all_begun()
    peak = gateway.rss_bytes()
    result = await streams.finish(began)
    peak = max(peak, gateway.rss_bytes())
    lost = sum(not is_complete("".join(answer.texts), TOKENS) for answer in result.answers)
    print(f"{count} streams: {base >> 20} MiB before, {peak >> 20} MiB at most, {result.wall_s:.1f} s, {lost} damaged")
    return {"memory_per_stream_kb": (peak - base) / count / 1024, "lost_or_reordered": float(lost)}


def is_complete(text: str, tokens: int) -> bool:
    """Whether each letter is the one after the letter before, and none is missing."""
    in_order = all(letter_after(before) == after for before, after in itertools.pairwise(text))
    return len(text) == tokens and set(text) <= set(LETTERS) and in_order


def verdict(figures: dict[str, float]) -> int:
    """Print the figures with their targets; 1 when one falls short."""
    rows = {}
    for name, (relation, target) in TARGETS.items():
        value = figures[name]
        is_met = value >= target if relation == ">=" else value < target
        rows[name] = {"value": round(value, 3), "target": f"{relation} {target:g}", "met": is_met}
    print(json.dumps(rows))
    return 0 if all(row["met"] for row in rows.values()) else 1


async def run(model: Path, rounds: int, tries: int, many: int) -> int:
    """All rows."""
    cores = Cores.choose()
    os.sched_setaffinity(0, {cores.client})
    print(
        f"server on core {cores.server}, client and stubs on core {cores.client}, {STREAMS} streams of {TOKENS} tokens"
    )
    async with gateway_and_bare(model, cores) as (gateway, bare, control, stub):
        figures = {"ready_s": gateway.ready_s, "torch_modules": float(gateway.has_mapped("libtorch"))}
        figures |= await throughput(gateway, bare, rounds)
        figures |= await first_token(gateway, control, tries)
        figures |= await cancellation(gateway, stub)
        figures |= await uploads(gateway, cores, rounds)
        figures |= await many_streams(gateway, many)
    return verdict(figures)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=200, help="requests for the time to first token")
    parser.add_argument("--many", type=int, default=MANY, help="streams for the memory row")
    given = parser.parse_args()
    raise SystemExit(asyncio.run(run(given.model, given.rounds, given.tries, given.many)))


if __name__ == "__main__":
    main()
