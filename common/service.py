"""The life of a process: start, run until told to stop, drain, leave; and its probes on a port of its own.

`run_service` owns signals, the HTTP server of `/health`, `/ready` and `/metrics`, and the exit code. SIGTERM or SIGINT
begins a drain; a second one ends the process at once. Any task that fails ends the process with exit code 1 and a
traceback in the log. Runs in the main thread.
"""

import asyncio
import contextlib
import os
import signal
import socket as socket_module
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Protocol

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.errors import ConfigError
from common.http_protocol import LimitedProtocol
from common.metrics import CONTENT_TYPE_LATEST, generate_latest

logger = structlog.get_logger(__name__)


class Server(Protocol):
    """What serves once a service has loaded."""

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the work at hand takes longer than any should."""
        ...

    async def run(self) -> None:
        """Serve until cancelled."""
        ...

    async def drain(self) -> None:
        """Refuse new work and finish what runs."""
        ...


class Service:
    """What loads for a while and is a server from then on: live all the time, ready once it serves."""

    def __init__(self, open_server: Callable[[], Awaitable[Server]], facts: dict[str, object]) -> None:
        """`open_server` loads and binds; `facts` are what `/ready` shows."""
        self._open_server = open_server
        self._facts = facts
        self._server: Server | None = None

    async def start(self) -> None:
        """Load and bind."""
        self._server = await self._open_server()

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._server is not None
        await self._server.run()

    async def drain(self) -> None:
        """Finish what runs; one that still loads has nothing to finish."""
        if self._server is not None:
            await self._server.drain()

    @property
    def is_loading(self) -> bool:
        """Whether it has not begun to serve."""
        return self._server is None

    def is_alive(self) -> bool:
        """False when the work at hand hangs."""
        return self._server is None or not self._server.is_stalled

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Ready when loaded and not draining."""
        return self._server is not None and not self._server.is_draining, self._facts


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server inside a process that owns its signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield

    async def serve_until_cancelled(self) -> None:
        """Serve; raises ConfigError when the address is taken."""
        config = self.config
        sockets = [_bind(config.host, config.port)]
        try:
            await self.serve(sockets=sockets)
        finally:
            for sock in sockets:
                sock.close()


def _bind(host: str, port: int) -> "socket_module.socket":
    family = socket_module.AF_INET6 if ":" in host else socket_module.AF_INET
    sock = socket_module.socket(family)
    sock.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror}; is another process using the port?"
        ) from exc
    return sock


def http_server(
    app: ASGIApp, host: str, port: int, *, drain_s: int = 5, protocol: type[LimitedProtocol] = LimitedProtocol
) -> EmbeddedServer:
    """A server for `app`; not started."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=protocol,
        ws="none",
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=64 << 10,
    )
    return EmbeddedServer(config)


def probe_routes(service: Service) -> list[Route]:
    """`/health` (live), `/ready` and `/metrics` for a service."""

    async def health(request: Request) -> Response:
        alive = service.is_alive()
        return JSONResponse({"status": "ok" if alive else "stalled"}, status_code=200 if alive else 503)

    async def ready(request: Request) -> Response:
        is_ready, details = service.readiness()
        return JSONResponse({"ready": is_ready, **details}, status_code=200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", metrics)]


async def run_service(service: Service, host: str, port: int, *, drain_timeout_s: float = 30.0) -> None:
    """Start a service with its probes, run it until a signal, drain it, and return.

    `/health` answers while the service still loads; `/ready` only says yes after `start` returned.
    """
    server = http_server(Starlette(routes=probe_routes(service)), host, port)

    async def drain() -> None:
        logger.info("draining", timeout_s=drain_timeout_s)
        await _drain(service, drain_timeout_s)

    await run_until_signal(server, _start_and_run(service), drain)
    if service.is_loading:
        # The thread that reads the weights cannot be stopped, and nothing that it does is of use any more.
        sys.stderr.flush()
        os._exit(0)


async def run_until_signal(
    server: EmbeddedServer, work: Coroutine[None, None, None], drain: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run an HTTP server and some work until SIGTERM, SIGINT or a failure; then drain, and stop both.

    The server finishes its running responses, within its own limit, while the work still goes on. Raises what
    either of them failed with.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    serving = asyncio.create_task(server.serve_until_cancelled(), name="http")
    working = asyncio.create_task(work, name="work")
    stopping = asyncio.create_task(stop.wait(), name="signal")
    try:
        await asyncio.wait({serving, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and drain is not None and not working.done():
            await drain()
    finally:
        stopping.cancel()
        server.should_exit = True
        if not working.done():
            await asyncio.wait({serving})
        working.cancel()
        results = await asyncio.gather(working, serving, stopping, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    logger.info("stopped")


async def _start_and_run(service: Service) -> None:
    await service.start()
    await service.run()


async def _drain(service: Service, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await service.drain()
    except TimeoutError:
        logger.warning("the drain did not finish in time; work that still runs is dropped", timeout_s=timeout_s)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise SystemExit(1)
    stop.set()
