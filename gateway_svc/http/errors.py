"""Every way that a request can fail, as OpenAI's error object with the right status and headers.

Owns the mapping from Tandem's errors and Starlette's HTTP exceptions to response bodies, including the error event of a
stream; `validation` puts failed validations into words. A text that goes out is valid Unicode and short; an unexpected
exception tells the client nothing but the request id. Knows nothing of chat completions.
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
    error_info,
)
from gateway_svc.http.validation import validation_error

MAX_MESSAGE_CHARACTERS = 2000
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


def _clean(text: str) -> str:
    """Valid Unicode of bounded length."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "…"
