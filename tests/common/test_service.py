"""The life of a service in a real process: probes, signals, exit codes, and a port that is taken."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from deploy.local import free_port
from tests.paths import REPOSITORY

PROGRAM = """
import asyncio, sys, threading
from common.errors import ConfigError
from common.logs import configure_logs
from common.service import Service, run_service
from common.settings import command_line

class Server:
    def __init__(self, mode):
        self.mode, self.is_draining, self.is_stalled = mode, False, mode == "stalled"
    async def run(self):
        if self.mode == "breaks":
            raise RuntimeError("a bug")
        await asyncio.Event().wait()
    async def drain(self):
        self.is_draining = True
        print("drain began", flush=True)
        if self.mode == "never drains":
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        print("drain ended", flush=True)

async def open_server(mode):
    if mode == "loads in a thread":
        await asyncio.to_thread(threading.Event().wait)
    if mode == "cannot start":
        raise ConfigError("the weights are not there: fetch them")
    if mode == "loads":
        await asyncio.Event().wait()
    return Server(mode)

def serve(mode: str, port: int):
    \"\"\"Serve.\"\"\"
    configure_logs("test", "info", "json")
    async def main():
        service = Service(lambda: open_server(mode), {"role": "test"})
        await run_service(service, "127.0.0.1", port, drain_timeout_s=0.3 if mode == "never drains" else 30.0)
    asyncio.run(main())

command_line("test", serve).meta(sys.argv[1:])
"""


@dataclass
class Running:
    """A service in a process of its own."""

    process: asyncio.subprocess.Process
    port: int

    async def get(self, path: str) -> httpx.Response:
        """An answer of its HTTP port, once it listens."""
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    return await client.get(f"http://127.0.0.1:{self.port}{path}")
                await asyncio.sleep(0.02)

    async def wait_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                if (await self.get("/ready")).status_code == 200:
                    return
                await asyncio.sleep(0.02)

    async def end(self) -> tuple[int, str, str]:
        """Exit code and output."""
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def running(mode: str, port: int | None = None) -> AsyncIterator[Running]:
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, mode, str(port)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        yield Running(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_0(number: signal.Signals) -> None:
    async with running("serves") as service:
        await service.wait_ready()
        assert (await service.get("/health")).json() == {"status": "ok"}
        assert (await service.get("/ready")).json() == {"ready": True, "role": "test"}
        metrics = await service.get("/metrics")
        assert "python_info" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain")
        service.process.send_signal(number)
        code, out, err = await service.end()
        assert (code, out) == (0, "drain began\ndrain ended\n")
        assert "Traceback" not in err


async def test_a_service_that_still_loads_ends_at_once() -> None:
    """Its loading thread cannot be stopped, and would keep the process until it is killed."""
    async with running("loads in a thread") as service:
        assert (await service.get("/health")).status_code == 200
        service.process.send_signal(signal.SIGTERM)
        code, _, err = await service.end()
        assert code == 0
        assert "stopped" in err


async def test_health_answers_while_the_service_loads_and_ready_says_no() -> None:
    """K8S-01."""
    async with running("loads") as service:
        assert (await service.get("/health")).status_code == 200
        ready = await service.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        service.process.send_signal(signal.SIGTERM)
        assert (await service.end())[0] == 0


async def test_a_drain_that_hangs_is_bounded() -> None:
    async with running("never drains") as service:
        await service.wait_ready()
        service.process.send_signal(signal.SIGTERM)
        code, out, err = await service.end()
        assert (code, out) == (0, "drain began\n")
        assert "did not finish in time" in err


async def test_a_second_signal_ends_the_process_at_once() -> None:
    async with running("serves") as service:
        await service.wait_ready()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.stdout is not None
        await service.process.stdout.readline()
        service.process.send_signal(signal.SIGTERM)
        code, _, _ = await service.end()
        assert code in (0, 1)  # 0 when the drain had just ended


async def test_a_stalled_service_asks_for_a_restart() -> None:
    async with running("stalled") as service:
        assert (await service.get("/health")).status_code == 503


async def test_a_start_that_can_never_work_is_one_line_and_exit_code_2() -> None:
    async with running("cannot start") as service:
        code, _, err = await service.end()
        assert code == 2
        assert err.splitlines()[-1] == "tandem test: the weights are not there: fetch them"
        assert "Traceback" not in err


async def test_a_bug_ends_the_process_with_a_traceback() -> None:
    async with running("breaks") as service:
        code, _, err = await service.end()
        assert code == 1
        assert "RuntimeError: a bug" in err


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        async with running("serves", other.getsockname()[1]) as service:
            code, _, err = await service.end()
            assert code == 2
            assert f"cannot listen on 127.0.0.1:{service.port}: Address already in use" in err
            assert "Traceback" not in err
