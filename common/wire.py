"""The wire format without sockets: messages to header frames and back, payloads to chunks.

A header frame is `b"TDM"`, one byte of major protocol version, one byte of minor version, then the message as
msgpack. Payload frames are raw bytes. A frame with another major version is refused with both versions named; a
minor version may add fields, which older peers ignore. Nothing here ever raises anything but `ProtocolError`.
"""

from collections.abc import Iterator

import msgspec

from common.errors import ProtocolError, TandemError, error_info, from_code
from common.messages import AnyMessage, ErrorDetail, Id

MAGIC = b"TDM"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
PREFIX_BYTES = len(MAGIC) + 2
MAX_HEADER_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
MAX_REASON_CHARS = 200  # msgspec quotes unknown words, which may be as long as the frame

_PREFIX = MAGIC + bytes((PROTOCOL_MAJOR, PROTOCOL_MINOR))


class _Named(msgspec.Struct):
    """Any message, of which only the request id is read."""

    request_id: Id | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_named_decoder = msgspec.msgpack.Decoder(_Named)


def pack(message: AnyMessage) -> bytes:
    """The header frame of a message."""
    return _PREFIX + _encoder.encode(message)


def unpack(frame: bytes | memoryview) -> AnyMessage:
    """The message of a header frame, fully validated.

    Raises ProtocolError when the frame is too long, is not ours, has another major version, or holds a value out of
    bounds. The error's text names the reason, and holds no more than a few words of the content.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header frame of {len(frame)} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    if len(frame) < PREFIX_BYTES or bytes(frame[: len(MAGIC)]) != MAGIC:
        raise ProtocolError("the frame is not a Tandem header: its first bytes are not the protocol's")
    if frame[len(MAGIC)] != PROTOCOL_MAJOR:
        raise ProtocolError(
            f"the peer speaks protocol version {frame[len(MAGIC)]} and this process {PROTOCOL_MAJOR}: "
            "run the same major version of Tandem on both sides"
        )
    try:
        return _decoder.decode(frame[PREFIX_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the header is not a valid message: {str(exc)[:MAX_REASON_CHARS]}") from exc


def request_id_of(frame: bytes | memoryview) -> str | None:
    """The request id in a header frame that `unpack` refused, as far as there is one that can be read."""
    is_readable = PREFIX_BYTES <= len(frame) <= MAX_HEADER_BYTES and bytes(frame[: len(MAGIC)]) == MAGIC
    if not is_readable or frame[len(MAGIC)] != PROTOCOL_MAJOR:
        return None
    try:
        return _named_decoder.decode(frame[PREFIX_BYTES:]).request_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def chunks(payload: memoryview, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Consecutive slices of a payload, none copied."""
    for start in range(0, len(payload), chunk_bytes):
        yield payload[start : start + chunk_bytes]


def error_detail(error: TandemError) -> ErrorDetail:
    """An error as it travels."""
    return ErrorDetail(code=error_info(error).code, message=error.message[:4096], param=error.param)


def error_from_detail(detail: ErrorDetail) -> TandemError:
    """The error that a peer reported."""
    return from_code(detail.code, detail.message, detail.param)
