"""Services of tests as processes that are forked from one that has imported what they import, which takes seconds.

They are real processes with their own sockets, signals, cores and logs. What they lack of a start by command is the
import alone: tests of commands, and of what a service imports, start theirs with `exec`.
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess

from common.processes import Child, Command, prepare_child

ROLES = ("encoder", "decoder", "gateway")
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([*(f"{role}_svc.__main__" for role in ROLES), __name__])


def forked(command: Command) -> ForkServerProcess:
    """The process of a service's command, not started yet; it dies with the tests."""
    return _processes.Process(target=_serve, args=(command,), daemon=True)


def _serve(command: Command) -> None:
    os.setsid()
    prepare_child(os.getppid(), command.cores, command.on_orphaned)
    assert command.log_file is not None, "a test reads what its services log"
    log = os.open(command.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(command.environment)
    module, arguments = _module_of(command.arguments)
    importlib.import_module(f"{module}.__main__").app.meta(arguments)


def _module_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """`python -m MODULE ARGUMENTS...` -> the module and its arguments."""
    _, minus_m, module, *arguments = words
    assert minus_m == "-m", words
    return module, arguments


class _Started:
    """A forked process as asyncio offers one that it started."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        """The exit code; minus the number of the signal that ended it."""
        if self._process.exitcode is None:
            await _readable(self._process.sentinel)
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


async def _readable(descriptor: int) -> None:
    """Return when a descriptor has something to read, or its end; others may wait for it too."""
    own = os.dup(descriptor)
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(own, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(own)
        os.close(own)


class ForkedChild(Child):
    """A child of `LocalStack` whose process is forked instead of started by command."""

    async def start(self) -> None:
        """Fork the process; its log goes on when it was started before."""
        self.num_starts += 1
        assert self.command.log_file is not None
        if self.num_starts == 1:
            self.command.log_file.write_bytes(b"")
        process = forked(self.command)
        await asyncio.to_thread(process.start)
        self._process = _Started(process)
