"""A video given as a list of JPEG pictures: one after another in one file, as `data:video/jpeg` brings them.

Owns where one picture ends and the next begins, which its markers tell: a thumbnail inside a picture's header is part
of it. Knows nothing of frame rates or sampling. Pure.
"""

import re

from common.errors import MediaTooLarge, UnsupportedMedia

JPEG_START = b"\xff\xd8\xff"
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
# The end of a scan: a marker, which is neither a stuffed 0xFF, nor a restart, nor fill.
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def split_jpegs(data: bytes, max_frames: int) -> list[memoryview]:
    """The pictures, in order, without copies. Raises UnsupportedMedia for what lies between them and is none."""
    frames: list[memoryview] = []
    start = 0
    while start < len(data):
        if not data.startswith(JPEG_START, start):
            raise UnsupportedMedia(
                f"behind {len(frames)} JPEG frames something else follows: send frames in one format, whole"
            )
        if len(frames) == max_frames:
            raise MediaTooLarge(f"the video has more than {max_frames} frames: send a shorter one")
        end = _end_of_jpeg(data, start + 2)
        frames.append(memoryview(data)[start:end])
        start = end
    return frames


def _end_of_jpeg(data: bytes, position: int) -> int:
    """The index behind a picture's end marker, or the end of the data when it is cut off."""
    while position + 2 <= len(data):
        if data[position] != 0xFF:
            return len(data)  # not a marker: a damaged picture, of which nothing behind this place can be trusted
        marker = data[position + 1]
        if marker == _EOI:
            return position + 2
        if marker == 0xFF:  # fill
            position += 1
        elif marker in _WITHOUT_LENGTH:
            position += 2
        else:
            position += 2 + max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
            if marker == _SOS:
                found = _MARKER_IN_SCAN.search(data, position)
                position = found.start() if found is not None else len(data)
    return len(data)
