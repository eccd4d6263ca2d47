"""vLLM as a peer: its server, started from its own environment, and what its streams tell of a decode step.

Owns how it is started on CPU (docs/benchmarking.md says how it is installed) and the client that times it. Knows
nothing of what it is compared with. Its times hold HTTP, which those of our engine without sockets do not.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.side_by_side import affinity
from deploy.local import free_port

START_S, STOP_S = 600.0, 30.0
MAX_SEQUENCES, MAX_MODEL_LEN = 16, 4096


@contextmanager
def vllm_server(command: Path, folder: Path, threads: int) -> Iterator[str]:
    """The URL of a vLLM that serves a checkpoint in bfloat16, on the first of this process's cores."""
    port = free_port()
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in affinity()[:threads]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = ["serve", str(folder), "--served-model-name", "bench-vl", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES)]
    arguments += ["--limit-mm-per-prompt", '{"image":4,"video":0}', "--skip-mm-profiling", "--no-enable-prefix-caching"]
    process = subprocess.Popen([str(command), *arguments], env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode} before it was ready; its own log says why")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(1.0)
    raise RuntimeError(f"vLLM was not ready after {START_S:.0f} s")


@dataclass(frozen=True)
class Streams:
    """A server of OpenAI's completions that takes token ids and sends each token as one chunk."""

    url: str
    model: str = "bench-vl"

    def decode_step(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Mean seconds in which every stream grows by a token, while all of them run."""
        arrivals = asyncio.run(self._arrivals(prompts, num_tokens + 2))
        began, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        num_chunks = sum(began < time <= ended for times in arrivals for time in times)
        if not num_chunks:
            raise RuntimeError("the streams did not run together: ask for more tokens")
        return (ended - began) * len(prompts) / num_chunks

    def first_token(self, ids: list[int]) -> float:
        """Seconds from a request to its first token."""
        began = time.perf_counter()
        [[first, *_]] = asyncio.run(self._arrivals([ids], 1))
        return first - began

    async def _arrivals(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[float]]:
        """When each chunk of each stream came."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300.0, limits=limits, trust_env=False) as client:
            return list(await asyncio.gather(*(self._stream(client, ids, max_tokens) for ids in prompts)))

    async def _stream(self, client: httpx.AsyncClient, ids: list[int], max_tokens: int) -> list[float]:
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        arrivals = []
        async with client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter())
                    if "error" in (event := json.loads(line.removeprefix("data: "))):
                        raise RuntimeError(f"a stream failed: {event['error']}")
        if not arrivals:
            raise RuntimeError("a stream ended without a token")
        return arrivals
