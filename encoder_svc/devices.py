"""One encoder process for each of several devices: started together, watched, and stopped together.

Owns what each process is given (device, ports, cores) and what becomes of one that ends or hangs: it is started anew
while the others go on, since what they hold is theirs. Knows nothing of encoding. Runs on the event loop of a process
that computes nothing itself.
"""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence

import httpx
import structlog

from common.errors import ConfigError
from common.processes import Child, Command, share_cores
from common.settings import environment_of
from encoder_svc.config import EncoderSettings

logger = structlog.get_logger(__name__)

PORT_STEP = 10
STOP_GRACE_S = 5.0  # beyond the drain
ASK_EVERY_S = 10.0
HUNG_AFTER_S = 60.0  # without a good answer of /health, from a process that had answered before
CONFIG_ERROR_CODE = 2


def device_names(settings: EncoderSettings) -> list[str]:
    """The devices of `--devices`, in order; commas separate as well as repeating does."""
    return [name for value in settings.devices for name in value.split(",") if name]


def preprocess_threads(settings: EncoderSettings, num_processes: int = 1) -> int:
    """Threads that decode and resize images, of one of several processes that share the cores."""
    return settings.preprocess_threads or max(1, len(os.sched_getaffinity(0)) // 2 // num_processes)


def settings_of_each(settings: EncoderSettings) -> list[EncoderSettings]:
    """What the process of each device is given. Raises ConfigError."""
    devices = device_names(settings)
    if settings.device != "auto" or settings.instance_id:
        own = f"--instance-id {settings.instance_id}" if settings.instance_id else f"--device {settings.device}"
        raise ConfigError(f"{own} is of one process: leave it out with --devices")
    threads = preprocess_threads(settings, len(devices))
    return [
        dataclasses.replace(
            settings,
            device=device,
            devices=(),
            control_endpoint=_nth_endpoint(settings.control_endpoint, index),
            data_endpoint=_nth_endpoint(settings.data_endpoint, index),
            http_port=_nth_port(settings.http_port, index),
            preprocess_threads=threads,
        )
        for index, device in enumerate(devices)
    ]


def _nth_endpoint(endpoint: str, index: int) -> str:
    """The first process has the address that is given; the others' follow from it."""
    if index == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{index}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"{endpoint!r} has no port to count up from, which --devices needs")
    return f"{host}:{_nth_port(int(port), index)}"


def _nth_port(port: int, index: int) -> int:
    chosen = port + PORT_STEP * index
    if port == 0 or chosen > 65_535:
        raise ConfigError(f"process {index} of --devices would have port {chosen}: give ports from 1 to 65535")
    return chosen


def commands_of(settings: EncoderSettings) -> list[Command]:
    """What to run for each device. Processes on CPU get cores of their own; those on GPUs are left to the system."""
    each = settings_of_each(settings)
    cores = share_cores(sorted(os.sched_getaffinity(0)), len(each))
    return [
        Command(
            f"encoder-{index}",
            [sys.executable, "-m", "encoder_svc"],
            environment_of(own) | {"TANDEM_INSTANCE_ID": ""},
            cores=cores[index] if own.device == "cpu" else frozenset(),
        )
        for index, own in enumerate(each)
    ]


class DeviceProcesses:
    """The processes of all devices."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._settings = settings
        self._each = settings_of_each(settings)
        self._children = [Child(command) for command in commands_of(settings)]

    async def run(self) -> int:
        """Run all until SIGTERM or SIGINT; returns the exit code.

        Ends by itself only when nothing is left to keep: with 2 when a first start finds its settings wrong, with 1
        when no process runs any more.
        """
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, stop)
        for child in self._children:
            await child.start()
        logger.info("encoders are starting", addresses=self.addresses())
        stopping = asyncio.create_task(stop.wait())
        ends = [asyncio.create_task(self._keep(child)) for child in self._children]
        ends.append(asyncio.create_task(self._until_none_runs()))
        asking = [asyncio.create_task(self._ask(*pair)) for pair in zip(self._children, self._each, strict=True)]
        tasks = [stopping, *ends, *asking]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            code = 0 if stopping in done else max(task.result() for task in done if task in ends)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            codes = await self._stop()
        return code or int(any(codes))

    def addresses(self) -> list[str]:
        """What gateways and decoders are given as `--encoders`, one value for each process."""
        return [f"{own.control_endpoint},{own.data_endpoint}" for own in self._each]

    async def _keep(self, child: Child) -> int:
        """Start a process anew whenever it ends; returns only when its first start finds its settings wrong."""
        if await child.wait() == CONFIG_ERROR_CODE:
            return CONFIG_ERROR_CODE
        await child.keep_running()
        raise AssertionError("a process is kept running until this is cancelled")

    async def _until_none_runs(self) -> int:
        while any(child.pid is not None for child in self._children):
            await asyncio.gather(*(child.wait() for child in self._children))  # one that ended is at once waited for
        logger.error("no encoder runs any more")
        return 1

    async def _ask(self, child: Child, settings: EncoderSettings) -> int:
        """Kill a process that hangs, which `keep_running` then starts anew; until cancelled."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.http_host, settings.http_host)  # noqa: S104
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings.http_port}/health"
        good_at: float | None = None
        asked_pid = None
        async with httpx.AsyncClient(trust_env=False, timeout=ASK_EVERY_S) as client:
            while True:
                await asyncio.sleep(ASK_EVERY_S)
                now = time.monotonic()
                if child.pid != asked_pid:
                    asked_pid, good_at = child.pid, None
                if await _is_good(client, url):
                    good_at = now
                elif good_at is not None and now - good_at > HUNG_AFTER_S:
                    logger.error("a process hangs and is killed", process=child.command.name)
                    child.kill()

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            for child in self._children:
                child.kill()
        stop.set()

    async def _stop(self) -> Sequence[int]:
        grace_s = self._settings.drain_timeout_s + STOP_GRACE_S
        await asyncio.gather(*(child.stop(grace_s) for child in self._children))
        return [await child.wait() for child in self._children]


async def _is_good(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False
