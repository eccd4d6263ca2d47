"""Every way that a request can fail, as OpenAI's error object with the right status and headers.

Owns the mapping from Tandem's errors, Starlette's HTTP exceptions and validation errors to response bodies, including
the error event of a stream. A text that goes out is valid Unicode and short; an unexpected exception tells the client
nothing but the request id. Knows nothing of chat completions.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    TandemError,
    UnknownParameter,
    error_info,
)
from gateway_svc.schemas.strict_model import REFUSED_FIELD

MAX_MESSAGE_CHARACTERS = 2000
_SHOWN_CHARACTERS = 200  # of a name that a client made up
_BY_STATUS: dict[int, type[TandemError]] = {
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
}
logger = structlog.get_logger(__name__)


def error_body(error: TandemError) -> dict[str, Any]:
    """OpenAI's error object."""
    info = error_info(error)
    return {
        "error": {
            "message": _clean(error.message),
            "type": info.openai_type,
            "param": None if error.param is None else _clean(error.param),
            "code": info.code,
        }
    }


def error_response(error: TandemError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP response of an error, with the two Retry-After headers where another try may succeed at once."""
    status = error_info(error).http_status
    all_headers = dict(headers or {})
    if status == 401:
        all_headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        wait_s = 1.0 if error.retry_after_s is None else max(0.0, error.retry_after_s)
        all_headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        all_headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    return Response(
        msgspec.json.encode(error_body(error)), status_code=status, headers=all_headers, media_type="application/json"
    )


def internal_error(request_id: str) -> TandemError:
    """What a client learns of a fault of ours."""
    return TandemError(f"internal error; request id {request_id}")


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of `app` an OpenAI error object."""

    @app.exception_handler(TandemError)
    async def on_tandem_error(request: Request, error: TandemError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        return error_response(_from_http(request, error), error.headers)


def _from_http(request: Request, error: HTTPException) -> TandemError:
    cls = _BY_STATUS.get(error.status_code)
    if cls is NotFound:
        return NotFound(f"there is no route {request.method} {request.url.path}: see /docs for those there are")
    if cls is MethodNotAllowed:
        return MethodNotAllowed(f"{request.url.path} does not answer {request.method}: see /docs for what it answers")
    if cls is not None:
        return cls(str(error.detail))
    if 400 <= error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return TandemError("internal error")


def validation_error(errors: Any, body: object) -> InvalidRequest:
    """The first error of a validation, with the field named as OpenAI's `param` names it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON, at character {first['loc'][-1]}")
    if first["type"] == REFUSED_FIELD:
        return _refused_field(first["loc"][1:], body, first["ctx"])
    is_in_url = first["loc"][0] in ("path", "query")
    path = str(first["loc"][1]) if is_in_url else field_path(first["loc"][1:], body)
    if not path:
        message = "the body must be a JSON object, sent with content-type application/json"
    elif first["type"] == "missing":
        message = f"{path} is missing"
    else:
        message = f"{path}: {first['msg']}{_given(first.get('input'))}"
    return InvalidRequest(message, param=path or None)


def _refused_field(location: tuple[int | str, ...], body: object, context: Mapping[str, Any]) -> InvalidRequest:
    """In OpenAI's words where the field is not known at all: clients look for them."""
    path = field_path((*location, context["field"]), body)
    if "remedy" in context:
        return InvalidRequest(f"{path} is not supported: {context['remedy']}", param=path)
    hint = (
        f"Did you mean '{context['near']}'?" if context["near"] else "Leave it out, or see /docs for those there are."
    )
    return UnknownParameter(f"Unknown parameter: '{path[:_SHOWN_CHARACTERS]}'. {hint}", param=path)


def _given(value: object) -> str:
    """The refused value, where it is short enough to be read."""
    is_scalar = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40)
    return f", not {value!r}" if is_scalar else ""


def field_path(location: tuple[int | str, ...], body: object) -> str:
    """`messages[0].content[1].type` from a validation's location, which also names the branches of unions.

    A step that does not exist in the body is a branch's name, unless it is the last one: then a field is missing.
    """
    path = ""
    value = body
    for position, step in enumerate(location):
        if isinstance(step, int) and isinstance(value, list):
            path += f"[{step}]"
            value = value[step] if step < len(value) else None
        elif location[max(0, position - 2)] == "parts" and isinstance(location[position - 1], int):
            continue  # the branch of a content part
        elif isinstance(value, dict) and (step in value or position == len(location) - 1):
            path += f".{step}" if path else str(step)
            value = value.get(step)
    return path


def _clean(text: str) -> str:
    """Valid Unicode of bounded length."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "…"
