"""Real sockets for tests: a context that closes everything, addresses of both kinds, and a service to talk to."""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import zmq.asyncio

from common.errors import PeerUnreachable
from common.messages import AnyMessage, Hello
from common.transport import Dealer, Received, Router

_names = itertools.count()


@contextlib.contextmanager
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    """A context whose sockets are all closed at the end."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def ipc_address() -> Iterator[str]:
    """An address in a folder with a short name, since a unix socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="tdm") as folder:
        yield f"ipc://{Path(folder) / str(next(_names))}"


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The condition's value once it is true."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.002)
        return value


async def received(socket: Router | Dealer, timeout_s: float = 10.0) -> Received:
    """The next message."""
    async with asyncio.timeout(timeout_s):
        return await socket.receive()


def can_send(dealer: Dealer, message: AnyMessage) -> bool:
    """Whether a message was handed over."""
    try:
        dealer.send(message)
    except PeerUnreachable:
        return False
    return True


async def connected(dealer: Dealer, router: Router, message: AnyMessage | None = None) -> bytes:
    """The dealer's name at the router, once the first message has arrived."""
    message = message or hello("gateway", "g")
    await eventually(lambda: can_send(dealer, message))
    return (await received(router)).peer


def hello(role: Any = "encoder", instance_id: str = "e-1", model: str = "tiny", **fields: Any) -> Hello:
    """A Hello."""
    return Hello(role=role, instance_id=instance_id, model=model, version="0", **{"is_ready": True, **fields})


class Greeter:
    """A service that answers each Hello with its own, until it falls silent, and keeps what else it hears."""

    def __init__(self, router: Router, answer: Hello) -> None:
        self.router = router
        self.answer = answer
        self.is_silent = False
        self.peers: list[bytes] = []
        self.heard: list[Received] = []

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            message = await self.router.receive()
            if not isinstance(message.message, Hello):
                self.heard.append(message)
                continue
            if message.peer not in self.peers:
                self.peers.append(message.peer)
            if not self.is_silent:
                self.router.try_send(message.peer, self.answer)


@contextlib.asynccontextmanager
async def background(*works: Any) -> AsyncIterator[None]:
    """Coroutines that run beside the test; what they fail with fails the test."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
