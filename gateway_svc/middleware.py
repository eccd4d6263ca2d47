"""What surrounds every request: its ids, the limits of its body, its metrics, and the last catch of faults.

A client's `x-request-id` is a label for logs and comes back on the response; the id that the fleet uses is always
ours. A body beyond its own limit, or that of all bodies together, is refused by its declared length, or as soon as it
has grown too long; one that stops arriving is refused too. Plain ASGI, so that streams pass through untouched.
"""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BodyTimeout, InvalidRequest, Overloaded, PayloadTooLarge, TandemError
from gateway_svc.http_errors import error_response, internal_error
from gateway_svc.http_metrics import HttpMetrics

MAX_HEADER_BYTES = 32 << 10
DISCARD_S = 5.0
DISCARD_PAUSE_S = 0.5
RETRY_AFTER_S = 5.0
_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class RequestIds:
    """`internal` names the request inside the fleet; `label` is what the client called it, if that was usable."""

    internal: str
    label: str | None

    @property
    def shown(self) -> str:
        """What the response's `x-request-id` says."""
        return self.label or self.internal


def request_ids(scope: MutableMapping[str, Any]) -> RequestIds:
    """The ids that the middleware gave a request."""
    ids: RequestIds = scope["tandem.request_ids"]
    return ids


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of one body, of all bodies of requests that run, of a pause in a body and of its whole arrival."""

    max_bytes: int
    max_inflight_bytes: int
    idle_s: float
    total_s: float


class RequestMiddleware:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, bodies: BodyLimits) -> None:
        self._app = app
        self._metrics = metrics
        self._bodies = bodies
        self._num_inflight_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, count it, and answer for any fault."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        label = Headers(scope=scope).get("x-request-id", "")
        ids = RequestIds(uuid.uuid4().hex, label if _LABEL.fullmatch(label) else None)
        scope["tandem.request_ids"] = ids
        response = _Response(send, ids.shown)
        try:
            await self._serve(scope, receive, response)
        except Exception:
            logger.exception("a request failed", request_id=ids.internal)
            if response.status is None:
                await error_response(internal_error(ids.internal))(scope, receive, response.send)
        finally:
            self._num_inflight_bytes -= response.num_body_bytes
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(response.status or 499)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started)

    async def _serve(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            response.must_close, response.unread = True, receive
            await error_response(refusal)(scope, receive, response.send)
            return
        await self._app(scope, self._limited(receive, response), response.send)

    def _refusal(self, scope: Scope) -> TandemError | None:
        """What is wrong with a request by its headers alone."""
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > MAX_HEADER_BYTES:
            return InvalidRequest(f"the headers have {num_bytes} bytes, above the limit of {MAX_HEADER_BYTES}")
        declared = Headers(scope=scope).get("content-length", "")
        if not declared.isdecimal():
            return None
        return self._excess(0, int(declared) if len(declared) < 20 else 1 << 63)

    def _excess(self, num_bytes: int, num_more: int) -> TandemError | None:
        """What is wrong with a body of `num_bytes` that has been counted in, and `num_more` to come.

        Only bytes that have arrived are counted, so that nobody takes room with a promise.
        """
        bodies = self._bodies
        if num_bytes + num_more > bodies.max_bytes:
            return PayloadTooLarge(
                f"the body is larger than the limit of {bodies.max_bytes} bytes: send media by URL, or less of it"
            )
        if num_more and self._num_inflight_bytes + num_more > bodies.max_inflight_bytes:
            return Overloaded(
                f"the bodies of all requests together would exceed {bodies.max_inflight_bytes} bytes: try again later, "
                "or send media by URL",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def _limited(self, receive: Receive, response: "_Response") -> Receive:
        deadline = time.monotonic() + self._bodies.total_s
        is_complete = False

        async def limited() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()  # waits for the client to leave
            message = await self._received(receive, response, deadline)
            is_complete = not message.get("more_body")
            num_more = len(message.get("body", b""))
            refusal = self._excess(response.num_body_bytes, num_more)
            if refusal is not None:
                response.must_close, response.unread = True, None if is_complete else receive
                is_complete = True
                raise refusal
            response.num_body_bytes += num_more
            self._num_inflight_bytes += num_more
            return message

        return limited

    async def _received(self, receive: Receive, response: "_Response", deadline: float) -> Message:
        wait_s = max(0.0, min(self._bodies.idle_s, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(wait_s):
                return await receive()
        except TimeoutError as exc:
            response.must_close = True
            raise BodyTimeout(
                f"the body did not arrive: a pause may last {self._bodies.idle_s:g} s, and the whole body may take "
                f"{self._bodies.total_s:g} s"
            ) from exc


class _Response:
    """What is known of one request, and its send side, which adds the id and remembers the status.

    With `unread`, the rest of a refused body, the response ends when that has been read: a connection that is closed
    with bytes unread is reset, and then a client that still sends never sees the refusal.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self.status: int | None = None
        self.must_close = False
        self.unread: Receive | None = None
        self.num_body_bytes = 0
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if self.must_close:
                headers["connection"] = "close"
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and self.unread is not None:
            await self._send({**message, "more_body": True})
            await _discard(self.unread)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)


async def _discard(receive: Receive) -> None:
    """Read a body and forget it, for a short time and while it keeps coming."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await asyncio.wait_for(receive(), DISCARD_PAUSE_S)).get("more_body"):
                pass
