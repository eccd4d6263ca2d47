"""What surrounds every request: its ids, the limit of its body, its metrics, and the last catch of faults.

A client's `x-request-id` is a label for logs and comes back on the response; the id that the fleet uses is always
ours. A body beyond the limit is refused by its declared length, or as soon as it has grown too long. Plain ASGI, so
that streams pass through untouched.
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
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InvalidRequest, PayloadTooLarge, TandemError
from gateway_svc.http_errors import error_response, internal_error
from gateway_svc.http_metrics import HttpMetrics

MAX_HEADER_BYTES = 32 << 10
DISCARD_S = 5.0
DISCARD_PAUSE_S = 0.5
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


class RequestMiddleware:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

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
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(response.status or 499)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started)

    async def _serve(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            response.unread = receive
            await error_response(refusal, {"connection": "close"})(scope, receive, response.send)
            return
        await self._app(scope, self._limited(receive, response), response.send)

    def _refusal(self, scope: Scope) -> TandemError | None:
        """What is wrong with a request by its headers alone."""
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > MAX_HEADER_BYTES:
            return InvalidRequest(f"the headers have {num_bytes} bytes, above the limit of {MAX_HEADER_BYTES}")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and (len(declared) > 19 or int(declared) > self._max_body_bytes):
            return PayloadTooLarge(self._too_large())
        return None

    def _limited(self, receive: Receive, response: "_Response") -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                response.unread = receive if message.get("more_body") else None
                # The framework passes this one on, whoever reads the body.
                raise HTTPException(413, self._too_large(), {"connection": "close"})
            return message

        return limited

    def _too_large(self) -> str:
        return f"the body is larger than the limit of {self._max_body_bytes} bytes: send media by URL, or less of it"


class _Response:
    """The send side of one request: adds the id and remembers the status.

    With `unread`, the rest of a refused body, the response ends when that has been read: a connection that is closed
    with bytes unread is reset, and then a client that still sends never sees the refusal.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self.status: int | None = None
        self.unread: Receive | None = None
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
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
