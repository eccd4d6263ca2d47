"""Do text streams suffer when new pictures come? Four streams, undisturbed and beside a picture every few seconds.

    python -m benchmarks.bench_interference [--model FOLDER] [--seconds 60] [--url http://host:port/v1] [--vllm COMMAND]

The two take turns of a quarter of the seconds each, since a machine that is not ours alone may change its speed between
one minute and the next. The pictures are made beforehand: what a client spends on them is not the server's doing.

Without a URL it starts the processes of `tandem up` in bfloat16 over the checkpoint of `bench_vl`: the encoder pinned
to one core, the decoder to another, gateway and client wherever they fit. With one, the same load goes to that server,
whatever it is. With vLLM's command its server gets the load first, in rows that no target judges. The last line is one
JSON object of ratios with their targets; the exit status is 1 when one falls short.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.bench_vl import checkpoint, jpeg
from benchmarks.side_by_side import affinity, verdict
from benchmarks.vllm_server import vllm_server
from deploy.local import LocalStack, UpSettings, free_port, plan

STREAMS, STREAM_TOKENS = 4, 512
SIDE, PICTURE_EVERY_S, PICTURE_TOKENS = 1024, 3.0, 8
LONG_GAP_S = 0.2
PATIENCE_S = 30.0
TURNS = 4  # of seconds that are a multiple of the pause between pictures
# Throughput that stays, twice the undisturbed p99 gap by the disturbed, 200 ms by the largest, 3.3 s by the TTFT.
TARGETS = {"throughput": 0.85, "p99_gap": 1.0, "largest_gap": 1.0, "picture_ttft": 1.0}


@dataclass
class Window:
    """What was seen in all turns of one kind: when each stream's chunks came, and the first tokens of pictures."""

    gaps: list[float] = field(default_factory=list)
    picture_ttfts: list[float] = field(default_factory=list)
    num_chunks: int = 0
    began: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Chunks a second, of all streams: one chunk is one token unless a server joins them."""
        return self.num_chunks / self.seconds

    def gap(self, share: float) -> float:
        """The gap that a share of the gaps is at most as long as."""
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(share * len(self.gaps)))]

    @property
    def picture_ttft(self) -> float:
        """Median of the pictures' first tokens; none came in time when it is infinite."""
        return statistics.median(self.picture_ttfts) if self.picture_ttfts else math.inf

    def row(self, name: str) -> str:
        """One line of the table."""
        ttft = (
            f", TTFT p50 {self.picture_ttft:.2f} s of {len(self.picture_ttfts)} pictures" if self.picture_ttfts else ""
        )
        return (
            f"{name}: {self.rate:.0f} tok/s, gaps p50 {self.gap(0.5) * 1e3:.1f} ms, p99 {self.gap(0.99) * 1e3:.1f} ms, "
            f"largest {max(self.gaps) * 1e3:.0f} ms, {sum(gap > LONG_GAP_S for gap in self.gaps)} over "
            f"{LONG_GAP_S * 1e3:.0f} ms{ttft}"
        )


class Load:
    """Streams and pictures against one server."""

    def __init__(self, client: httpx.AsyncClient, model: str, num_pictures: int) -> None:
        self._client = client
        self._model = model
        self._numbers = itertools.count(int(time.time()) % 100_000 * 1000)
        self._pictures = [jpeg(SIDE, SIDE, seed=next(self._numbers)) for _ in range(num_pictures)]
        self.window = Window()

    async def _chunks(self, content: Any, max_tokens: int) -> AsyncIterator[float]:
        """Send a chat; yields the moment of each chunk with text."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"a stream failed: {event['error']}")
                if any(choice.get("delta", {}).get("content") for choice in event["choices"]):
                    yield now

    async def stream(self) -> None:
        """Answers, one after the other, until cancelled. The pause between two is no gap."""
        while True:
            last: float | None = None
            async for now in self._chunks(f"Tell me about number {next(self._numbers)}.", STREAM_TOKENS):
                if last is not None and last >= self.window.began:
                    self.window.gaps.append(now - last)
                self.window.num_chunks += 1
                last = now

    async def picture(self) -> None:
        """Ask about a picture that was never sent before."""
        url = f"data:image/jpeg;base64,{base64.b64encode(self._pictures.pop()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        window, began, first = self.window, time.perf_counter(), None
        async for now in self._chunks(content, PICTURE_TOKENS):
            first = first or now
        if first is None:
            raise RuntimeError("a picture was answered without a token")
        window.picture_ttfts.append(first - began)

    async def pictures(self, tasks: asyncio.TaskGroup, sent: list[asyncio.Task[None]]) -> None:
        """A new picture at even intervals, whether or not the last was answered."""
        while True:
            sent.append(tasks.create_task(self.picture()))
            await asyncio.sleep(PICTURE_EVERY_S)

    async def measure(self, window: Window, seconds: float, warm_up_s: float, *, with_pictures: bool) -> None:
        """Run the load and add what is seen to the window; what the warm-up sees is dropped."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.stream()) for _ in range(STREAMS)]
            sent: list[asyncio.Task[None]] = []
            if with_pictures:
                sending = tasks.create_task(self.pictures(tasks, sent))
            await asyncio.sleep(warm_up_s)
            window.began, self.window = time.perf_counter(), window
            await asyncio.sleep(seconds)
            window.seconds += time.perf_counter() - window.began
            self.window = Window()
            if with_pictures:  # the last ones count when they are answered, or as never answered
                sending.cancel()
                _, late = await asyncio.wait(sent, timeout=PATIENCE_S)
                window.picture_ttfts += [math.inf] * len(late)
                running += late
            for task in running:
                task.cancel()


@asynccontextmanager
async def server(url: str | None, model: Path | None) -> AsyncIterator[str]:
    """The given server, or a stack of our own."""
    if url is not None:
        yield url
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        run_dir, log_dir = folder / "run", folder / "logs"
        run_dir.mkdir()
        log_dir.mkdir()
        settings = UpSettings(
            model=str(stack.enter_context(checkpoint(model))), port=free_port(), data_dir=folder, dtype="bfloat16"
        )
        planned = plan(settings, run_dir, log_dir)
        for command in planned.services:
            print(f"{command.name}: cores {sorted(command.cores) or 'any'}")
        processes = LocalStack(planned)
        try:
            await processes.start()
            await processes.wait_ready(Console(stderr=True))
            yield f"{planned.urls[0]}/v1"
        finally:
            await processes.stop()


async def measure_both(url: str, name: str, options: argparse.Namespace) -> tuple[Window, Window]:
    """The streams of one server, undisturbed and beside pictures, in turns."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits, trust_env=False) as client:
        model = (await client.get("models")).json()["data"][0]["id"]
        seconds = options.seconds / TURNS
        print(f"{model} at {url}; client on cores {affinity()}; {TURNS} turns of {seconds:.0f} s each")
        load = Load(client, model, TURNS * math.ceil((seconds + options.warm_up) / PICTURE_EVERY_S + 1))
        alone, beside = Window(), Window()
        for _ in range(TURNS):
            await load.measure(alone, seconds, options.warm_up, with_pictures=False)
            await load.measure(beside, seconds, options.warm_up, with_pictures=True)
        print(alone.row(f"{name}{STREAMS} streams"))
        print(beside.row(f"{name}{STREAMS} streams and a new {SIDE}x{SIDE} picture every {PICTURE_EVERY_S:.0f} s"))
    return alone, beside


async def run(options: argparse.Namespace) -> int:
    """Measure both phases and judge."""
    if options.vllm is not None:
        # Starting and stopping block the loop, in which nothing else runs then.
        with checkpoint(options.model) as folder, vllm_server(options.vllm, folder, len(affinity())) as url:
            await measure_both(url, "vLLM: ", options)
    async with server(options.url, options.model) as url:
        alone, beside = await measure_both(url, "", options)
    ratios = {
        "throughput": beside.rate / alone.rate,
        "p99_gap": 2 * alone.gap(0.99) / beside.gap(0.99),
        "largest_gap": LONG_GAP_S / max(beside.gaps),
        "picture_ttft": 3.3 / beside.picture_ttft,
    }
    return verdict(ratios, TARGETS)


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default that of bench_vl is written")
    parser.add_argument("--url", help="the API of a server that runs already, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--vllm", type=Path, help="vLLM's command, such as vl/bin/vllm: its server gets the load too")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind, in all turns")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before each turn")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
