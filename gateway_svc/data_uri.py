"""Data URIs to bytes, by explicit rules: what is not clearly right is refused, never half decoded.

Base64 may be wrapped in white space and may lack its padding; anything outside of the standard alphabet is refused,
because a lenient decoder drops such characters and answers with other bytes. The declared media type is ignored: the
bytes tell what they are. Pure; may run in a thread.
"""

import binascii
import re
import urllib.parse

from common.errors import InvalidRequest, MediaTooLarge

_HEAD = re.compile(r"data:([^,]*),", re.IGNORECASE)
_MAX_HEAD_CHARACTERS = 1024
_WHITE_SPACE = b" \t\r\n"
_FOREIGN = re.compile(rb"[^A-Za-z0-9+/]")


def decode_data_uri(uri: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:` URI. Raises InvalidRequest or MediaTooLarge, naming `param`."""
    head = _HEAD.match(uri, 0, _MAX_HEAD_CHARACTERS)
    if head is None:
        raise InvalidRequest(
            f"{param} is a data URI without a comma between its media type and its data: "
            "write data:<type>;base64,<data>",
            param=param,
        )
    is_base64 = head[1].replace(" ", "").lower().endswith(";base64") or head[1].strip().lower() == "base64"
    payload = uri[head.end() :]
    data = _decode_base64(payload, max_bytes, param) if is_base64 else _decode_percent(payload, param)
    if not data:
        raise InvalidRequest(f"{param} is a data URI without data: send the bytes of a file", param=param)
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes, param)
    return data


def _decode_base64(payload: str, max_bytes: int, param: str) -> bytes:
    if "%" in payload:
        payload = urllib.parse.unquote(payload)
    digits = payload.encode("utf-8").translate(None, _WHITE_SPACE)
    unpadded = digits.rstrip(b"=")
    num_bytes = len(unpadded) * 3 // 4
    if num_bytes > max_bytes:
        raise _too_large(num_bytes, max_bytes, param)
    num_padding = len(digits) - len(unpadded)
    if len(unpadded) % 4 == 1 or num_padding not in (0, -len(unpadded) % 4):
        raise _not_base64(unpadded, num_padding, param)
    try:
        return binascii.a2b_base64(unpadded + b"=" * (-len(unpadded) % 4), strict_mode=True)
    except binascii.Error as exc:
        raise _not_base64(unpadded, num_padding, param) from exc


def _not_base64(digits: bytes, num_padding: int, param: str) -> InvalidRequest:
    foreign = _FOREIGN.search(digits)
    if foreign is None:
        reason = f"{len(digits)} characters and {num_padding} of padding encode no file: send the whole data"
    elif foreign[0] in b"-_":
        reason = "its alphabet is the URL-safe one ('-' and '_'): send the standard one ('+' and '/')"
    else:
        reason = f"character {foreign.start()} of the data does not belong to its alphabet"
    return InvalidRequest(f"{param} is not valid base64: {reason}", param=param)


def _decode_percent(payload: str, param: str) -> bytes:
    if not payload.isascii():
        raise InvalidRequest(
            f"{param} is a data URI with characters outside of ASCII: percent-encode them, or use base64", param=param
        )
    return urllib.parse.unquote_to_bytes(payload)


def _too_large(num_bytes: int, max_bytes: int, param: str) -> MediaTooLarge:
    return MediaTooLarge(
        f"{param} has {num_bytes} bytes, above the limit of {max_bytes} for one item: send a smaller file", param=param
    )
