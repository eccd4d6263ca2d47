"""HTTP/1.1 connections that cannot be held open for nothing.

Adds to uvicorn's protocol the two time limits that it has no setting for: for a request's head to arrive, counted from
the opening of the connection or from the first byte after the last answer, and for a client to take what waits to be
sent to it. A connection that exceeds one is aborted, which also tells the application that the client is gone. One
connection too many, or what is not HTTP, is answered in OpenAI's shape. Knows nothing of requests. Runs on the event
loop.
"""

import asyncio
import uuid
from collections.abc import Callable

import h11
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidRequest, Overloaded, TandemError, error_info

MAX_CONNECTIONS = 4096  # each is a file descriptor


class LimitedProtocol(H11Protocol):
    """One connection. `HEAD_S` and `STALL_S` are in seconds; `MAX_CONNECTIONS` is how many a process answers."""

    HEAD_S = 30.0
    STALL_S = 60.0
    MAX_CONNECTIONS = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        super().connection_made(transport)
        if len(self.connections) > self.MAX_CONNECTIONS:
            self.app = _refuse_connection
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

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large a head, and end the connection."""
        message = "this is not a valid HTTP/1.1 request, or its head is too large"
        status, headers, body = _refusal(InvalidRequest, message)
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """What a connection beyond the limit gets, as an application."""
    message = f"this process has {MAX_CONNECTIONS} connections, which is its limit: try again, or another one"
    status, headers, body = _refusal(Overloaded, message)
    headers += [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refusal(cls: type[TandemError], message: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the last answer on a connection."""
    info = error_info(cls)
    error = {"message": message, "type": info.openai_type, "param": None, "code": info.code}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-request-id", uuid.uuid4().hex.encode()),
    ]
    return info.http_status, headers, body


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
