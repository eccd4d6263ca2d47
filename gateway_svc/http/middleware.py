"""What surrounds every request: its ids, its API key, whether there is room, its metrics, and the last catch of faults.

A client's `x-request-id` is a label for logs and comes back on the response; the id that the fleet uses is always
ours. A `traceparent` names the request in every log line. Plain ASGI, so that streams pass through untouched.
"""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import TandemError
from gateway_svc.drain import Drain
from gateway_svc.http.admission import Admission
from gateway_svc.http.api_keys import ApiKey, ApiKeys
from gateway_svc.http.body_gate import Body, BodyGate
from gateway_svc.http.errors import error_response, internal_error
from gateway_svc.http.metrics import HttpMetrics

DISCARD_S = 5.0
DISCARD_PAUSE_S = 0.5
MAX_REQUESTS = 2048
# What supervisors and monitoring ask without a key.
OPEN_PATHS = ("/health", "/ready", "/metrics")
_OPEN_PREFIX = "/autoscale/"
_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
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
class Access:
    """Who may use a gateway, and how much of it at once. `origins` are those of web pages that may, "*" for any."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    max_requests: int = MAX_REQUESTS
    origins: tuple[str, ...] = ()
    is_logged: bool = False
    drain: Drain = field(default_factory=Drain)


class RequestMiddleware:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, bodies: BodyGate, access: Access) -> None:
        self._app = app
        self._metrics = metrics
        self._bodies = bodies
        self._access = access
        self._admission = Admission(access.max_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, count it, and answer for any fault."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _traced(Headers(scope=scope).get("traceparent", "")):
            await self._serve_and_count(scope, receive, send)

    async def _serve_and_count(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        label = Headers(scope=scope).get("x-request-id", "")
        ids = RequestIds(uuid.uuid4().hex, label if _LABEL.fullmatch(label) else None)
        scope["tandem.request_ids"] = ids
        body = Body(self._bodies, scope, receive)
        response = _Response(send, ids.shown, body)
        try:
            await self._serve(scope, body, response)
        except Exception:
            logger.exception("a request failed", request_id=ids.internal)
            if response.status is None:
                await error_response(internal_error(ids.internal))(scope, receive, response.send)
        finally:
            body.close()
            self._count(scope, response, ids, time.monotonic() - started)

    async def _serve(self, scope: Scope, body: Body, response: "_Response") -> None:
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(_OPEN_PREFIX)
        key = None
        try:
            if not is_open:
                key = self._admitted(scope)
        except TandemError as refusal:
            body.skip()
            await error_response(refusal)(scope, body.receive, response.send)
            return
        try:
            response.key_name = key.name if key is not None else None
            refusal_of_body = self._bodies.refusal(scope)
            if refusal_of_body is not None:
                body.refuse()
                await error_response(refusal_of_body)(scope, body.receive, response.send)
            else:
                await self._app(scope, body.receive, response.send)
        finally:
            if not is_open:
                self._admission.leave(key)
                self._access.drain.leave()

    def _admitted(self, scope: Scope) -> ApiKey | None:
        """The request's key, where keys are required; the request counts from now on. Raises TandemError."""
        keys = self._access.keys
        key = keys.authenticate(Headers(scope=scope).get("authorization")) if keys.is_required else None
        self._access.drain.enter()
        try:
            self._admission.admit(key, time.monotonic())
        except TandemError:
            self._access.drain.leave()
            raise
        return key

    def _count(self, scope: Scope, response: "_Response", ids: RequestIds, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        status = str(response.status or 499)
        self._metrics.requests.labels(route, status).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        if self._access.is_logged:
            logger.info(
                "request",
                request_id=ids.internal,
                client_request_id=ids.label,
                method=scope["method"],
                route=route,
                status=status,
                key=response.key_name,
                sent_bytes=response.num_sent_bytes,
                total_s=round(seconds, 4),
            )


def add_cors(app: Starlette, origins: Sequence[str]) -> None:
    """Let web pages of these origins use the API. Outermost, so that refusals can be read there too."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        max_age=600,
    )


@contextlib.contextmanager
def _traced(traceparent: str) -> Iterator[None]:
    """Log lines of this request, and of the tasks that it starts, carry the trace's id (W3C Trace Context)."""
    trace = _TRACE.fullmatch(traceparent.strip())
    if trace is None:
        yield
        return
    with structlog.contextvars.bound_contextvars(trace_id=trace[1]):
        yield


class _Response:
    """What is known of one request, and its send side, which adds the id and remembers the status.

    The response to a body that was refused ends when the rest of it has been read: a connection that is closed with
    bytes unread is reset, and then a client that still sends never sees the refusal.
    """

    def __init__(self, send: Send, request_id: str, body: Body) -> None:
        self.status: int | None = None
        self.key_name: str | None = None
        self.num_sent_bytes = 0
        self._send = send
        self._request_id = request_id
        self._body = body

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if self._body.must_close:
                headers["connection"] = "close"
        else:
            self.num_sent_bytes += len(message.get("body", b""))
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and self._body.unread is not None:
            await self._send({**message, "more_body": True})
            await _discard(self._body.unread)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)


async def _discard(receive: Receive) -> None:
    """Read a body and forget it, for a short time and while it keeps coming."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await asyncio.wait_for(receive(), DISCARD_PAUSE_S)).get("more_body"):
                pass
