"""Child processes of commands that start several: with cores of their own, watched, stopped in time, never left behind.

Owns starting, where the output of each goes, the restart of one that died, and the stop. A child also dies with its
parent, however that dies. Runs on the event loop of the parent; knows nothing of what the children do.
"""

import asyncio
import contextlib
import ctypes
import functools
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

logger = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
STOP_GRACE_S = 15.0
# A process that ends again and again is started less and less often, until one has run for a while.
RESTART_AFTER_S = 1.0
RESTART_AFTER_AT_MOST_S = 30.0
STEADY_AFTER_S = 60.0


@dataclass(frozen=True)
class Command:
    """What to run.

    `environment` adds to the parent's. Without a `log_file` the output goes where the parent's goes. `cores` restricts
    the process; empty leaves it free. `inherited` are file descriptors that it takes over under their own numbers.
    `on_orphaned` is the signal that it gets when its parent ends.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path | None = None
    cores: frozenset[int] = frozenset()
    inherited: tuple[int, ...] = ()
    on_orphaned: signal.Signals = signal.SIGTERM


class Child:
    """One running command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._process: asyncio.subprocess.Process | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process; its output goes to its log file."""
        self.num_starts += 1
        command = self.command
        with contextlib.ExitStack() as stack:
            log = None
            if command.log_file is not None:
                # A run's log starts empty, so that what is quoted of it is of this run; a restart goes on in it.
                log = stack.enter_context(command.log_file.open("wb" if self.num_starts == 1 else "ab"))
            self._process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **command.environment},
                pass_fds=command.inherited,
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's to pass on
                preexec_fn=functools.partial(prepare_child, os.getpid(), command.cores, command.on_orphaned),
            )

    async def wait(self) -> int:
        """The exit code, when it ends."""
        assert self._process is not None
        return await self._process.wait()

    async def keep_running(self) -> None:
        """Restart the process whenever it ends, until cancelled."""
        pause_s = RESTART_AFTER_S
        while True:
            began = time.monotonic()
            code = await self.wait()
            if time.monotonic() - began >= STEADY_AFTER_S:
                pause_s = RESTART_AFTER_S
            logger.warning(
                "a process ended and is started again",
                process=self.command.name,
                exit_code=code,
                after_s=pause_s,
                log=None if self.command.log_file is None else str(self.command.log_file),
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_AFTER_AT_MOST_S)
            await self.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM, and SIGKILL when that does not end it in time."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_GRACE_S if grace_s is None else grace_s):
                await self._process.wait()
        except TimeoutError:
            logger.warning("a process did not stop in time and is killed", process=self.command.name)
            self._process.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, now."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def last_lines(self, count: int = 15) -> str:
        """The end of the log, to show why a start failed."""
        if self.command.log_file is None:
            return ""
        lines = self.command.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


def share_cores(cores: Sequence[int], num_processes: int) -> list[frozenset[int]]:
    """Cores of each compute process: disjoint while there are enough, else one each in turn.

    Two OpenMP teams on the same cores stall each other badly, so a compute process never shares a core by choice.
    """
    ordered = sorted(cores)
    if num_processes >= len(ordered):
        return [frozenset({ordered[index % len(ordered)]}) for index in range(num_processes)]
    bounds = [index * len(ordered) // num_processes for index in range(num_processes + 1)]
    return [frozenset(ordered[start:end]) for start, end in itertools.pairwise(bounds)]


def prepare_child(parent: int, cores: frozenset[int], on_orphaned: signal.Signals) -> None:
    """Called in a child before its program: its cores, and its end when the parent ends, even if that was just now."""
    if cores:
        os.sched_setaffinity(0, cores)
    _LIBC.prctl(_PR_SET_PDEATHSIG, on_orphaned)
    if os.getppid() != parent:
        os._exit(1)
