"""The error tree of all services, and the one table from class to wire code, HTTP status and retryability.

Every error that can reach a client is one of these. A message names the value, the limit and the remedy; it never
holds a library's text, a path or an address. Errors cross the wire as `(code, message, param)` and are rebuilt on
the other side by `from_code`. Knows nothing of HTTP frameworks or sockets.
"""

from dataclasses import dataclass


class TandemError(Exception):
    """Base of all errors. `param` names the offending request field in OpenAI's notation, if there is one."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(TandemError):
    """The request can never be served as it is."""


class UnknownParameter(InvalidRequest):
    """The request has a field that there is not."""


class MediaTooLarge(InvalidRequest):
    """A media item exceeds a byte, pixel, frame or duration limit."""


class UnsupportedMedia(InvalidRequest):
    """A media item is not in a format that can be decoded, or is damaged."""


class MediaFetchFailed(InvalidRequest):
    """A media URL could not be fetched within its limits."""


class ContextTooLong(InvalidRequest):
    """Prompt and requested tokens exceed the context length or the whole KV cache."""


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""


class NotFound(InvalidRequest):
    """No such route."""


class MethodNotAllowed(InvalidRequest):
    """The route exists, the method does not."""


class PayloadTooLarge(InvalidRequest):
    """The request body exceeds its limit."""


class BodyTimeout(InvalidRequest):
    """The request body did not arrive in time."""


class Unauthorized(InvalidRequest):
    """The request has no API key, or one that is not known here."""


class RateLimited(InvalidRequest):
    """An API key has used what it may use for now; the same request may succeed after `retry_after_s`."""


class Overloaded(TandemError):
    """No capacity now; the same request may succeed after `retry_after_s`."""


class EncoderUnavailable(Overloaded):
    """No encoder could encode an item before the deadline."""


class DecoderUnavailable(Overloaded):
    """No decoder could run the request."""


class DeadlineExceeded(TandemError):
    """The request's time ran out."""


class Cancelled(TandemError):
    """The client left, or the request was cancelled by its gateway."""


class PeerUnreachable(TandemError):
    """A peer has no connection, or does not read what it is sent. Mapped by whoever needed the peer."""


class ProtocolError(TandemError):
    """A peer sent something that is not a valid message of this protocol."""


class ModelFailure(TandemError):
    """A forward pass or an embedding was unusable: wrong shape, not finite, or an internal fault."""


class ConfigError(TandemError):
    """The service cannot start with this configuration."""


class CheckpointError(ConfigError):
    """The checkpoint cannot be served: tensors missing, unknown or of a wrong shape, or an unsupported format."""


@dataclass(frozen=True)
class ErrorInfo:
    """How a class appears outside: wire code, HTTP status, OpenAI `type`, and whether another try may succeed."""

    code: str
    http_status: int
    openai_type: str
    is_retryable: bool


ERROR_TABLE: dict[type[TandemError], ErrorInfo] = {
    TandemError: ErrorInfo("internal_error", 500, "server_error", False),
    InvalidRequest: ErrorInfo("invalid_request", 400, "invalid_request_error", False),
    UnknownParameter: ErrorInfo("unknown_parameter", 400, "invalid_request_error", False),
    MediaTooLarge: ErrorInfo("media_too_large", 400, "invalid_request_error", False),
    UnsupportedMedia: ErrorInfo("unsupported_media", 400, "invalid_request_error", False),
    MediaFetchFailed: ErrorInfo("media_fetch_failed", 400, "invalid_request_error", False),
    ContextTooLong: ErrorInfo("context_length_exceeded", 400, "invalid_request_error", False),
    ModelNotFound: ErrorInfo("model_not_found", 404, "invalid_request_error", False),
    NotFound: ErrorInfo("not_found", 404, "invalid_request_error", False),
    MethodNotAllowed: ErrorInfo("method_not_allowed", 405, "invalid_request_error", False),
    PayloadTooLarge: ErrorInfo("payload_too_large", 413, "invalid_request_error", False),
    BodyTimeout: ErrorInfo("body_timeout", 408, "invalid_request_error", False),
    Unauthorized: ErrorInfo("invalid_api_key", 401, "invalid_request_error", False),
    RateLimited: ErrorInfo("rate_limit_exceeded", 429, "invalid_request_error", False),
    Overloaded: ErrorInfo("overloaded", 503, "server_error", True),
    EncoderUnavailable: ErrorInfo("encoder_unavailable", 503, "server_error", True),
    DecoderUnavailable: ErrorInfo("decoder_unavailable", 503, "server_error", True),
    DeadlineExceeded: ErrorInfo("deadline_exceeded", 504, "server_error", True),
    Cancelled: ErrorInfo("cancelled", 499, "server_error", False),
    PeerUnreachable: ErrorInfo("peer_unreachable", 503, "server_error", True),
    ProtocolError: ErrorInfo("protocol_error", 502, "server_error", True),
    ModelFailure: ErrorInfo("model_failure", 500, "server_error", False),
    ConfigError: ErrorInfo("config_error", 500, "server_error", False),
    CheckpointError: ErrorInfo("checkpoint_error", 500, "server_error", False),
}

_BY_CODE = {info.code: cls for cls, info in ERROR_TABLE.items()}


def error_info(error: TandemError | type[TandemError]) -> ErrorInfo:
    """The table row of an error or an error class."""
    return ERROR_TABLE[error if isinstance(error, type) else type(error)]


def from_code(code: str, message: str, param: str | None = None) -> TandemError:
    """Rebuild an error that crossed the wire. An unknown code becomes a plain `TandemError`."""
    return _BY_CODE.get(code, TandemError)(message, param=param)
