"""Waiting for peers to change: for one to come, to be ready, to go. Runs on the event loop."""

import asyncio
import time

from common.errors import TandemError


class Changes:
    """Changes of one tier. Who waits for the next takes `next` before looking at how things are, and misses none."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next change."""
        return self._next

    def tell(self) -> None:
        """Something has changed: those who waited go on, and those who wait from now on wait for the next time."""
        self._next.set()
        self._next = asyncio.Event()


async def wait_for_change(changed: asyncio.Event, deadline: float, error: TandemError) -> None:
    """Return when peers have changed; raise `error` at the deadline."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await changed.wait()
    except TimeoutError:
        raise error from None
