"""A gateway that was told to stop: it takes nothing new, says so with what a client may retry, and ends when idle.

Owns whether the gateway drains and how many requests it still answers. The socket stays open meanwhile, so that who
asks for `/ready`, or comes late, gets an answer. Runs on the event loop.
"""

import asyncio

import structlog

from common.errors import Overloaded

logger = structlog.get_logger(__name__)


class Drain:
    """Every `enter` that returns is followed by one `leave`."""

    def __init__(self) -> None:
        self.is_draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in. Raises Overloaded when the gateway is about to end."""
        if self.is_draining:
            raise Overloaded("this gateway is shutting down: ask again, and another will answer", retry_after_s=1.0)
        self._num_running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out, once its answer is sent."""
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()

    async def run(self, timeout_s: float) -> None:
        """Take nothing new from now on, and return when all answers are sent, or when they took too long."""
        self.is_draining = True
        logger.info("draining", timeout_s=timeout_s, requests=self._num_running)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning(
                "the drain did not finish in time; answers that still run are cut off", requests=self._num_running
            )
