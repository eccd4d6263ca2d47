"""Child processes: watched, restarted, stopped in time, and never left behind, however the parent ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import processes
from common.processes import Child, Command, share_cores
from tests.common.sockets import background, eventually
from tests.paths import REPOSITORY


def command(tmp_path: Path, program: str, cores: frozenset[int] = frozenset(), **environment: str) -> Command:
    return Command("child", [sys.executable, "-c", program], environment, tmp_path / "log", cores)


def logged(tmp_path: Path, text: str) -> Callable[[], bool]:
    return lambda: text in (tmp_path / "log").read_text()


SERVE = "import signal; print('up', flush=True); signal.pause()"
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


async def test_a_child_has_its_environment_its_core_and_its_log(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        "import os, sys; print(os.environ['X'], os.sched_getaffinity(0), flush=True); print('err', file=sys.stderr)"
    )
    child = Child(command(tmp_path, program, frozenset({core}), X="value"))
    assert child.pid is None
    await child.start()
    assert await child.wait() == 0
    assert child.pid is None
    assert child.last_lines() == f"value {{{core}}}\nerr"
    assert child.last_lines(1) == "err"


async def test_a_stop_ends_a_child_by_sigterm(tmp_path: Path) -> None:
    child = Child(command(tmp_path, SERVE))
    await child.start()
    await eventually(logged(tmp_path, "up"), 30)
    assert child.pid is not None
    await child.stop()
    assert child.pid is None
    assert await child.wait() == -signal.SIGTERM
    await child.stop()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_GRACE_S", 0.2)
    child = Child(command(tmp_path, DEAF))
    await child.start()
    await eventually(logged(tmp_path, "up"), 30)
    await child.stop()
    assert await child.wait() == -signal.SIGKILL


async def test_a_child_that_was_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_AFTER_S", 0.01)
    child = Child(command(tmp_path, SERVE))
    await child.start()
    async with background(child.keep_running()):
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: child.num_starts == 2 and child.pid not in (None, first))
    await child.stop()


async def test_a_child_that_ends_again_and_again_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(processes.asyncio, "sleep", sleep)
    child = Child(command(tmp_path, "raise SystemExit(1)"))
    await child.start()
    keeping = asyncio.create_task(child.keep_running())
    while child.num_starts < 8:
        await asyncio.wait({keeping}, timeout=0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await child.stop()
    assert pauses[:7] == [1, 2, 4, 8, 16, 30, 30]


async def test_output_without_a_log_file_goes_where_the_parent_s_goes(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child(Command("child", [sys.executable, "-c", "print('here')"], {}))
    await child.start()
    assert await child.wait() == 0
    assert capfd.readouterr().out == "here\n"
    assert child.last_lines() == ""


async def test_a_child_that_ends_at_once_is_no_error_of_the_start(tmp_path: Path) -> None:
    child = Child(Command("child", ["/bin/true"], {}, tmp_path / "log", frozenset(os.sched_getaffinity(0))))
    for _ in range(20):
        await child.start()
        assert await child.wait() == 0


PARENT = """
import asyncio, sys
from pathlib import Path
from common.processes import Child, Command

async def main():
    child = Child(Command("child", [sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2])))
    await child.start()
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


async def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, SERVE, str(tmp_path / "log")), stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    try:
        await eventually(logged(tmp_path, "up"), 30)
        assert psutil.pid_exists(child)
        parent.kill()
        await parent.wait()
        await eventually(lambda: not is_running(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@given(st.sets(st.integers(0, 63), min_size=1, max_size=16), st.integers(1, 20))
def test_cores_are_shared_out_without_overlap_while_there_are_enough(cores: set[int], num_processes: int) -> None:
    shares = share_cores(sorted(cores, reverse=True), num_processes)
    assert len(shares) == num_processes
    assert all(share and share <= cores for share in shares)
    if num_processes <= len(cores):
        assert sum(map(len, shares)) == len(set().union(*shares)) == len(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares)
        loads = [sum(core in share for share in shares) for core in cores]
        assert max(loads) - min(loads) <= 1
