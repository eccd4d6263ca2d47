"""A ZMQ socket on the event loop: sends at once, and wakes whoever waits for a message.

Does the little that our sockets need of what `zmq.asyncio` does, in half of its time for each message that is waited
for, which a fetch pays for each chunk. Knows nothing of what is in the frames. Runs on the event loop; a socket belongs
to the loop in which it is first waited for.
"""

import asyncio
from typing import Any, cast

import zmq
import zmq.asyncio

YIELD_EVERY = 64  # messages taken in a row before other tasks have a turn


class LoopSocket(zmq.Socket[bytes]):
    """One task at a time may wait for a message."""

    # pyzmq takes an attribute that the class does not have for a socket option.
    _loop: asyncio.AbstractEventLoop | None = None
    _watched_fd = -1
    _waiter: "asyncio.Future[None] | None" = None
    _num_in_a_row = 0

    @classmethod
    def of(cls, context: zmq.asyncio.Context, kind: int) -> "LoopSocket":
        """A new socket of a kind such as `zmq.ROUTER`, closed at the latest when its context is destroyed."""
        return cast("LoopSocket", context.socket(kind, cast("Any", cls)))

    def send_at_once(self, frames: list[Any]) -> None:
        """Hand a message to ZMQ's own thread, large frames without a copy, or raise ZMQError."""
        try:
            self.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # For a millisecond after it last looked, sending does not see that a connection stands or has room again.
            self._wake_if_readable()  # looks
            self.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        finally:
            if self._waiter is not None:
                self._wake_if_readable()  # sending may have taken the signal that a message is there

    async def receive(self) -> list[zmq.Frame]:
        """The frames of the next message, not copied. Gives way to other tasks while messages come and come."""
        self._num_in_a_row += 1
        if self._num_in_a_row >= YIELD_EVERY:
            self._num_in_a_row = 0
            await asyncio.sleep(0)
        while True:
            try:
                return self.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._wait()

    def close(self, linger: int | None = None) -> None:
        """Close the socket; whoever waits is cancelled."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._watched_fd)
        self._loop = None
        if self._waiter is not None:
            self._waiter.cancel()
        super().close(linger)

    async def _wait(self) -> None:
        """Until a message is there: after `zmq.Again` the descriptor tells of each that comes later."""
        assert self._waiter is None, "a message belongs to one task"
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._watched_fd = cast("int", self.getsockopt(zmq.FD))
            self._loop.add_reader(self._watched_fd, self._wake_if_readable)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake_if_readable(self) -> None:
        """Asking for the events also resets the descriptor, which else stays readable."""
        is_readable = bool(cast("int", self.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if is_readable and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
