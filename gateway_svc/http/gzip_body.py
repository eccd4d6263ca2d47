"""Request bodies that come compressed with gzip, unpacked piece by piece, so that no small body becomes a large one.

Owns the decompressor of one body. Each piece that comes out is bounded, whatever goes in; how many there may be is for
whoever counts them. Pure; a piece takes less than a millisecond.
"""

import zlib

from common.errors import InvalidRequest

PIECE_BYTES = 256 << 10
_GZIP = 31  # zlib's name for the format, with its largest window


class GzipBody:
    """The unpacked bytes of one body."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(_GZIP)
        self._packed = b""

    @property
    def has_more(self) -> bool:
        """Whether `next_piece` has something without more input."""
        return bool(self._packed)

    @property
    def is_complete(self) -> bool:
        """Whether the end of the format was seen and nothing is behind it."""
        return self._inflater.eof and not self._packed

    def feed(self, packed: bytes) -> None:
        """Take what arrived."""
        self._packed += packed

    def next_piece(self) -> bytes:
        """At most `PIECE_BYTES`; empty when more input is needed. Raises InvalidRequest."""
        try:
            if self._inflater.eof and self._packed:  # the format allows several members in a row
                self._inflater = zlib.decompressobj(_GZIP)
            piece = self._inflater.decompress(self._packed, PIECE_BYTES)
        except zlib.error as exc:
            raise InvalidRequest("the body is not valid gzip, although its content-encoding says so") from exc
        self._packed = self._inflater.unconsumed_tail or self._inflater.unused_data
        return piece
