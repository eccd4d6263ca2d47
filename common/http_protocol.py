"""HTTP/1.1 connections that cannot be held open for nothing.

Adds to uvicorn's protocol the two time limits that it has no setting for: for a request's head to arrive, counted from
the opening of the connection or from the first byte after the last answer, and for a client to take what waits to be
sent to it. A connection that exceeds one is aborted, which also tells the application that the client is gone. Knows
nothing of requests. Runs on the event loop.
"""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol


class LimitedProtocol(H11Protocol):
    """One connection. `HEAD_S` and `STALL_S` are in seconds."""

    HEAD_S = 30.0
    STALL_S = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        super().connection_made(transport)
        self._head_timer = _Timer(self.loop, self.HEAD_S, self._abort_without_request)
        self._stall_timer = _Timer(self.loop, self.STALL_S, transport.abort)
        self._head_timer.start()

    def data_received(self, data: bytes) -> None:
        """Go on, or stop, waiting for a head."""
        super().data_received(data)
        if self._has_no_request():
            self._head_timer.start()
        else:
            self._head_timer.stop()

    def pause_writing(self) -> None:
        """The client has to read before more is sent."""
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._head_timer.stop()
        self._stall_timer.stop()
        super().connection_lost(exc)

    def _abort_without_request(self) -> None:
        # A request that arrived together with the one before it starts without new data.
        if self._has_no_request():
            self.transport.abort()

    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


class _Timer:
    """Calls once, unless stopped; a start while it runs changes nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(self._delay_s, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
