"""The real system for tests: real processes, real ZMQ, a real Redis-protocol server, started as `tandem up` does."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich.console import Console

from deploy.local import LocalStack, Plan, UpSettings, free_port, plan
from tests.forked import ForkedChild

# A busy machine may keep Redis from answering for a while: a hit is a hit here all the same.
FOR_TESTS = {"TANDEM_CACHE_WAIT_S": "0.25", "TANDEM_WARM_UP_S": "0"}


@dataclass
class Stack:
    """A running system."""

    plan: Plan
    local: LocalStack
    settings: UpSettings

    @property
    def url(self) -> str:
        """The first gateway."""
        return self.plan.urls[0]

    def client(self, gateway: int = 0) -> AsyncOpenAI:
        """OpenAI's client for one gateway."""
        return AsyncOpenAI(base_url=f"{self.plan.urls[gateway]}/v1", api_key="none", max_retries=0, timeout=60.0)

    async def kill(self, name: str) -> None:
        """SIGKILL a process and wait until it is gone."""
        child = self.local.children[name]
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()

    async def restart(self, *names: str) -> None:
        """Start processes that have ended again, and wait until all are ready."""
        for name in names:
            await self.local.children[name].start()
        await self.local.wait_ready(Console(quiet=True))

    async def ready(self, gateway: int = 0) -> dict[str, Any]:
        """What the gateway says of the fleet."""
        async with httpx.AsyncClient(trust_env=False) as client:
            body: dict[str, Any] = (await client.get(f"{self.plan.urls[gateway]}/ready")).json()
            return body

    async def wait_for(self, *, encoders: int, decoders: int, gateway: int = 0) -> None:
        """Return when the gateway sees exactly so many ready services."""
        async with asyncio.timeout(90):
            while True:
                with contextlib.suppress(httpx.TransportError):  # a gateway that is being restarted
                    body = await self.ready(gateway)
                    if (body["encoders"]["ready"], body["decoders"]["ready"]) == (encoders, decoders):
                        return
                await asyncio.sleep(0.05)

    async def metric(self, name: str, metric: str) -> float:
        """A metric of one process, summed over its labels; `metric` may hold a label to filter by."""
        url = self.plan.ready_urls[name].replace("/ready", "/metrics")
        async with httpx.AsyncClient(trust_env=False) as client:
            lines = (await client.get(url)).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    def log(self, name: str) -> str:
        """What a process has logged."""
        return self.local.children[name].command.log_file.read_text(errors="replace")


@asynccontextmanager
async def running_stack(
    folder: Path,
    model: Path,
    environment: Mapping[str, str] | None = None,
    *,
    by_role: Mapping[str, Mapping[str, str]] | None = None,
    by_command: bool = False,
    is_pinned: bool = True,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start a system that serves `model`, and stop it at the end.

    `environment` sets any other setting of all services, `by_role` that of one role's. Services are forked, which
    spares them seconds of imports, or started `by_command`. Those that compute have cores of their own if `is_pinned`.
    """
    up = UpSettings(model=str(model), port=free_port(), data_dir=folder, log_level="debug", **settings)
    run_dir, log_dir = folder / "run", folder / "logs"
    run_dir.mkdir(parents=True)
    log_dir.mkdir()
    planned = plan(up, run_dir, log_dir)
    for index, command in enumerate(planned.services):
        own = (by_role or {}).get(command.name.partition("-")[0], {})
        merged = {**FOR_TESTS, **command.environment, **(environment or {}), **own}
        cores = command.cores if is_pinned else frozenset()
        planned.services[index] = dataclasses.replace(command, environment=merged, cores=cores)
    stack = Stack(planned, LocalStack(planned), up)
    if not by_command:
        stack.local.children.update({command.name: ForkedChild(command) for command in planned.services})
    try:
        await stack.local.start()
        await stack.local.wait_ready(Console(quiet=True))
        await stack.wait_for(encoders=up.encoders, decoders=up.decoders)
        yield stack
    finally:
        await stack.local.stop()
