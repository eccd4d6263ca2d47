"""Data URIs to bytes, by explicit rules: what is not clearly right is refused, never half decoded.

Base64 may be in either alphabet, the standard or the URL-safe one, wrapped in white space and without its padding;
anything else is refused, because a lenient decoder drops such characters and answers with other bytes. The declared
media type is ignored: the bytes tell what they are. Pure; may run in a thread, and lets other threads run every few
milliseconds.
"""

import binascii
import re
import urllib.parse

from common.errors import InvalidRequest, MediaTooLarge

_HEAD = re.compile(r"data:([^,]*),", re.IGNORECASE)
_MAX_HEAD_CHARACTERS = 1024
_WHITE_SPACE = b" \t\r\n"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")  # the URL-safe alphabet's two other digits
_SLICE_CHARACTERS = 1 << 18
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
    if is_base64 and head[1].strip().lower().startswith("video/jpeg"):
        data = _decode_frames(uri[head.end() :], max_bytes, param)
    elif is_base64:
        data = _decode_base64(uri, head.end(), max_bytes, param)
    else:
        data = _decode_percent(uri[head.end() :], param)
    if not data:
        raise InvalidRequest(f"{param} is a data URI without data: send the bytes of a file", param=param)
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes, param)
    return data


def _decode_frames(payload: str, max_bytes: int, param: str) -> bytes:
    """A video as a list of JPEG pictures with commas between them: one after another, as an encoder reads them."""
    frames: list[bytes] = []
    left_bytes = max_bytes
    for text in payload.split(","):
        frames.append(_decode_base64(text, 0, left_bytes, param))
        left_bytes -= len(frames[-1])
        if not frames[-1]:
            raise InvalidRequest(f"frame {len(frames) - 1} of {param} is empty: send each frame's JPEG", param=param)
    return b"".join(frames)


def _decode_base64(uri: str, start: int, max_bytes: int, param: str) -> bytes:
    if "%" in uri:
        uri, start = urllib.parse.unquote(uri[start:]), 0
    decoded: list[bytes] = []
    num_bytes = num_before = 0
    digits = b""
    for begin in range(start, len(uri), _SLICE_CHARACTERS):
        digits += uri[begin : begin + _SLICE_CHARACTERS].encode("utf-8").translate(_TO_STANDARD, _WHITE_SPACE)
        # The last four wait for what may still come: padding belongs to the end alone.
        ready = max(0, (len(digits) - 4) // 4 * 4)
        decoded.append(_decode_digits(digits[:ready], num_before, 0, param))
        digits, num_before = digits[ready:], num_before + ready
        num_bytes += len(decoded[-1])
        if num_bytes > max_bytes:
            raise _too_large(num_bytes, max_bytes, param)
    unpadded = digits.rstrip(b"=")
    num_padding = len(digits) - len(unpadded)
    missing = -len(unpadded) % 4
    if missing == 3 or num_padding not in (0, missing):
        raise _not_base64(unpadded, num_before, num_padding, param)
    decoded.append(_decode_digits(unpadded, num_before, missing, param))
    return b"".join(decoded)


def _decode_digits(digits: bytes, num_before: int, missing: int, param: str) -> bytes:
    """Bytes of digits without padding, of which `missing` are added."""
    try:
        if b"=" in digits:
            raise binascii.Error("padding before the end")
        return binascii.a2b_base64(digits + b"=" * missing, strict_mode=True)
    except binascii.Error as exc:
        raise _not_base64(digits, num_before, 0, param) from exc


def _not_base64(digits: bytes, num_before: int, num_padding: int, param: str) -> InvalidRequest:
    foreign = _FOREIGN.search(digits)
    if foreign is None:
        num_digits = num_before + len(digits)
        reason = f"{num_digits} characters and {num_padding} of padding encode no file: send the whole data"
    else:
        reason = f"character {num_before + foreign.start()} of the data does not belong to its alphabet"
    return InvalidRequest(f"{param} is not valid base64: {reason}", param=param)


def _decode_percent(payload: str, param: str) -> bytes:
    if not payload.isascii():
        raise InvalidRequest(
            f"{param} is a data URI with characters outside of ASCII: percent-encode them, or use base64", param=param
        )
    return urllib.parse.unquote_to_bytes(payload)


def _too_large(num_bytes: int, max_bytes: int, param: str) -> MediaTooLarge:
    return MediaTooLarge(
        f"{param} has {num_bytes} bytes or more, above the limit of {max_bytes} for one item: send a smaller file",
        param=param,
    )
