"""What may arrive as a request's body: how much, how fast, and how much of all bodies together. Unpacks gzip.

A body beyond its own limit, or that of all bodies together, is refused by its declared length, or as soon as it has
grown too long, compressed or not; one that stops arriving is refused too. Counts the bytes of the requests that run.
Knows nothing of what the bytes mean. Runs in the requests' tasks.
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope

from common.errors import BodyTimeout, InvalidRequest, Overloaded, PayloadTooLarge, TandemError
from gateway_svc.http.gzip_body import GzipBody

MAX_HEADER_BYTES = 32 << 10
RETRY_AFTER_S = 5.0
SMALL_BYTES = 64 << 10
_UNKNOWN = 1 << 63


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of one body, of all bodies of requests that run, of a pause in a body and of its whole arrival."""

    max_bytes: int
    max_inflight_bytes: int
    idle_s: float
    total_s: float


class BodyGate:
    """All bodies of one gateway."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.num_inflight_bytes = 0

    def refusal(self, scope: Scope) -> TandemError | None:
        """What is wrong with a request by its headers alone."""
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > MAX_HEADER_BYTES:
            return InvalidRequest(f"the headers have {num_bytes} bytes, above the limit of {MAX_HEADER_BYTES}")
        headers = Headers(scope=scope)
        encoding = _encoding(headers)
        if encoding not in ("", "identity", "gzip"):
            return InvalidRequest(f"the body's content-encoding is {encoding[:40]!r}: send gzip, or none")
        if "content-length" in headers and "transfer-encoding" in headers:
            return InvalidRequest("the body has both content-length and transfer-encoding, which differ: send one")
        return self.excess(0, _declared(headers)) if "content-length" in headers else None

    def excess(self, num_bytes: int, num_more: int) -> TandemError | None:
        """What is wrong with a body of `num_bytes` that has been counted in, and `num_more` to come.

        Only bytes that have arrived are counted, so that nobody takes room with a promise.
        """
        limits = self.limits
        if num_bytes + num_more > limits.max_bytes:
            return PayloadTooLarge(
                f"the body is larger than the limit of {limits.max_bytes} bytes: send media by URL, or less of it"
            )
        if num_more and self.num_inflight_bytes + num_more > limits.max_inflight_bytes:
            return Overloaded(
                f"the bodies of all requests together would exceed {limits.max_inflight_bytes} bytes: try again later, "
                "or send media by URL",
                retry_after_s=RETRY_AFTER_S,
            )
        return None


class Body:
    """One request's body. `receive` is what the application reads from; `close` it when the request has ended."""

    def __init__(self, gate: BodyGate, scope: Scope, receive: Receive) -> None:
        self.must_close = False
        """Whether the connection cannot be used again, since some of the body may still come."""
        self.unread: Receive | None = None
        """Where the rest of a refused body comes from."""
        self._gate = gate
        self._receive = receive
        self._deadline = time.monotonic() + gate.limits.total_s
        self._num_bytes = 0
        self._num_packed_bytes = 0
        self._is_complete = False
        self._has_all_arrived = False
        headers = Headers(scope=scope)
        self._declared = _declared(headers)
        self._packed = GzipBody() if _encoding(headers) == "gzip" else None
        if self._packed is not None:
            # The application gets the unpacked body.
            unpacked = MutableHeaders(raw=list(scope["headers"]))
            del unpacked["content-encoding"], unpacked["content-length"]
            scope["headers"] = unpacked.raw

    def close(self) -> None:
        """Its bytes are not held any more."""
        self._gate.num_inflight_bytes -= self._num_bytes
        self._num_bytes = 0

    async def receive(self) -> Message:
        """The next piece. Raises PayloadTooLarge, Overloaded, BodyTimeout or InvalidRequest."""
        if self._is_complete:
            return await self._receive()  # waits for the client to leave
        message = await self._next() if self._packed is None else await self._next_unpacked(self._packed)
        num_more = len(message.get("body", b""))
        refusal = self._gate.excess(self._num_bytes, num_more)
        if refusal is not None:
            self.refuse()
            raise refusal
        self._is_complete = not message.get("more_body")
        self._num_bytes += num_more
        self._gate.num_inflight_bytes += num_more
        return message

    def refuse(self) -> None:
        """The application reads nothing more of it; the connection ends with the response."""
        self.must_close, self.unread = True, None if self._has_all_arrived else self._receive
        self._is_complete = True

    def skip(self) -> None:
        """Nobody reads it; the connection goes on where so little is to come that the server can read it away."""
        if self._declared > SMALL_BYTES:
            self.refuse()

    async def _next_unpacked(self, packed: GzipBody) -> Message:
        if not packed.has_more and not self._has_all_arrived:
            message = await self._next()
            if message["type"] == "http.disconnect":
                return message
            packed.feed(message.get("body", b""))
            self._num_packed_bytes += len(message.get("body", b""))
        refusal = self._gate.excess(self._num_packed_bytes, 0)  # what unpacks to nothing is not endless either
        if refusal is not None:
            self.refuse()
            raise refusal
        try:
            piece = packed.next_piece()
            is_last = self._has_all_arrived and not packed.has_more and len(piece) == 0
            if is_last and not packed.is_complete:
                raise InvalidRequest("the body ends before the end of its gzip data: send all of it")
        except InvalidRequest:
            self.refuse()
            raise
        return {"type": "http.request", "body": piece, "more_body": not is_last}

    async def _next(self) -> Message:
        limits = self._gate.limits
        wait_s = max(0.0, min(limits.idle_s, self._deadline - time.monotonic()))
        try:
            async with asyncio.timeout(wait_s):
                message = await self._receive()
        except TimeoutError as exc:
            self.must_close = True
            raise BodyTimeout(
                f"the body did not arrive: a pause may last {limits.idle_s:g} s, and the whole body may take "
                f"{limits.total_s:g} s"
            ) from exc
        self._has_all_arrived = not message.get("more_body")
        return message


def _encoding(headers: Headers) -> str:
    return headers.get("content-encoding", "").strip().lower()


def _declared(headers: Headers) -> int:
    """Bytes that the body will have by its headers; more than any limit when they do not say it."""
    length = headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20:
        return int(length)
    return _UNKNOWN if length or "transfer-encoding" in headers else 0
