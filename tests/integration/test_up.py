"""`tandem up` as a person uses it: it starts, answers, names what is wrong, and leaves nothing behind."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.local import free_port
from tests.common.sockets import eventually
from tests.media_samples import png
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.asynccontextmanager
async def tandem_up(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, in a session of its own as in a terminal."""
    command = [sys.executable, "-m", "deploy.cli", "up", "--data-dir", str(folder), *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def output_until(process: asyncio.subprocess.Process, text: str) -> str:
    """What the command printed, up to a line with `text`."""
    assert process.stdout is not None
    printed = ""
    async with asyncio.timeout(200):
        while text not in printed:
            line = await process.stdout.readline()
            assert line, f"the command ended:\n{printed}"
            printed += line.decode()
    return printed


async def test_up_answers_a_picture_restarts_what_dies_and_leaves_no_process_behind(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with tandem_up(tmp_path, "--model", str(tiny_checkpoint), "--port", str(port)) as process:
        printed = await output_until(process, "Ctrl-C")
        assert f"{url}/v1" in printed
        picture = tmp_path / "a picture.png"
        picture.write_bytes(png(120, 90))
        question = ("ask", str(picture), "What?", "--url", f"{url}/v1", "--max-tokens", "5")
        assert (await run_tandem(*question)).strip()

        before = psutil.Process(process.pid).children(recursive=True)
        assert len(before) == 4
        decoder = next(p for p in before if "decoder_svc" in " ".join(p.cmdline()))
        decoder.kill()
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(100):
            seen = [200]
            while seen[-1] != 200 or 503 not in seen:
                seen.append((await client.get(f"{url}/ready")).status_code)
                await asyncio.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 4
        assert len({*before} & {*children}) == 3
        assert (await run_tandem(*question)).strip()

        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith("run-")]


async def test_however_up_ends_its_processes_do_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    async with tandem_up(tmp_path, "--model", str(tiny_checkpoint), "--port", str(free_port())) as process:
        children = await eventually(lambda: all_children(process.pid), 60)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=40)
        assert alive == []


def all_children(pid: int) -> list[psutil.Process]:
    """The four processes of `tandem up`, once all are started."""
    children = psutil.Process(pid).children()
    return children if len(children) == 4 else []


async def test_a_port_in_use_is_named_and_not_traced(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with tandem_up(tmp_path, "--port", str(port)) as process:
            assert process.stdout is not None
            printed = (await process.stdout.read()).decode()
            assert await process.wait() == 2
    assert str(port) in printed
    assert "TANDEM_PORT" in printed
    assert "Traceback" not in printed


async def test_a_model_that_cannot_load_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    async with tandem_up(tmp_path / "data", "--model", str(empty), "--port", str(free_port())) as process:
        assert process.stdout is not None
        printed = (await process.stdout.read()).decode()
        assert await process.wait() == 2
    assert "config.json" in printed
    assert "Traceback" not in printed


async def run_tandem(*arguments: str) -> str:
    """Run a `tandem` command; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", *arguments, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()
