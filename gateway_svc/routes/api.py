"""What every route of the API shares: reading a body, answering with JSON or a stream, and documenting both.

Owns the threads of large bodies and the schemas that the documentation adds for bodies that are read by hand. Knows
nothing of what any route does. Runs in the request's task.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway_svc.http.middleware import RequestIds, request_ids
from gateway_svc.http.request_body import read_body
from gateway_svc.http.sse import DATA_ALONE, EventFormat, EventWriter, Puller, open_stream
from gateway_svc.routes.text_run import TextService
from gateway_svc.schemas.strict_model import RequestBody

M = TypeVar("M", bound=RequestBody)
T = TypeVar("T")
_SCHEMAS = "#/components/schemas/"
# Stands in the documentation for the framework's own 422, which never leaves this server.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": meaning,
        "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}},
    }
    for status, meaning in (
        ("4XX", "OpenAI's error object: the request cannot be served as it is."),
        ("5XX", "OpenAI's error object: a fault, or no capacity (then with Retry-After)."),
    )
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the HTTP side.

    `max_inflight_body_bytes` bounds the bodies of all requests that run, `body_idle_s` the wait for the next piece of
    a body, `stream_open_s` the wait for a stream's first event before it opens.
    """

    max_body_bytes: int = 128 << 20
    max_inflight_body_bytes: int = 1 << 30
    body_idle_s: float = 30.0
    request_timeout_s: float = 600.0
    stream_open_s: float = 15.0
    keep_alive_s: float = 10.0


@dataclass(frozen=True)
class Api:
    """What routes are made with. With `ignores_unknown`, bodies may have fields that their models do not know."""

    app: FastAPI
    service: TextService
    limits: HttpLimits
    body_threads: Executor
    ignores_unknown: bool = False

    async def read(self, request: Request, model: type[M]) -> tuple[M, RequestIds]:
        """The validated body of a request, and its ids. Raises InvalidRequest."""
        body = await read_body(request, model, self.body_threads, ignores_unknown=self.ignores_unknown)
        return body, request_ids(request.scope)

    async def stream(
        self, puller: Puller[T], writer: EventWriter[T], ids: RequestIds, form: EventFormat = DATA_ALONE
    ) -> Response:
        """A stream of server-sent events, once the first is there. Raises TandemError before that."""
        return await open_stream(
            puller,
            writer,
            open_s=self.limits.stream_open_s,
            keep_alive_s=self.limits.keep_alive_s,
            request_id=ids.internal,
            form=form,
        )


def json_response(value: object, status_code: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status_code=status_code, media_type="application/json")


def documented(body: type[BaseModel], description: str, *, has_stream: bool = False) -> dict[str, Any]:
    """Arguments of a route whose body is read by hand."""
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if has_stream:
        answers["text/event-stream"] = {}
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + body.__name__}}}
    return {
        "response_model": None,
        "responses": {200: {"description": description, "content": answers}, **ERROR_RESPONSES},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


class DocumentedApp(FastAPI):
    """Adds to the documentation the schemas of `bodies`, with the names that `model` may have, and of errors."""

    bodies: Sequence[type[BaseModel]] = ()
    model_names: Sequence[str] = ()

    def openapi(self) -> dict[str, Any]:
        """The API as OpenAPI."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = _ERROR_SCHEMA
            for body in self.bodies:
                schema = body.model_json_schema(ref_template=_SCHEMAS + "{model}")
                schema["properties"]["model"]["enum"] = list(self.model_names)
                schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
        return super().openapi()
