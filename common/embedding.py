"""What must hold of an embedding before it may touch a model, wherever it came from.

Pure: the same checks serve the ZMQ fetch and the Redis cache. A forward pass may assume; the wire may not.
"""

import zlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from common.errors import ProtocolError
from common.messages import EmbeddingHeader, Grid
from common.wire import CHUNK_BYTES, chunks

T = TypeVar("T")


@dataclass(frozen=True)
class ExpectedEmbedding:
    """What a receiver knows beforehand of the embedding that it asks for. None is unknown (to a gateway)."""

    key: str
    grid: Grid
    fingerprint: str
    rows: int | None = None
    width: int | None = None
    levels: int | None = None

    def check(self, header: EmbeddingHeader) -> None:
        """Raise ProtocolError, naming the field and both values, unless the header is exactly what is expected."""
        for field in ("key", "fingerprint", "grid", "rows", "width", "levels"):
            got, want = getattr(header, field), getattr(self, field)
            if want is not None and got != want:
                raise ProtocolError(f"the embedding's {field} is {got}, expected {want}")


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """CRC-32 of a payload."""
    return zlib.crc32(payload)


def check_payload(header: EmbeddingHeader, payload: bytes | bytearray | memoryview) -> None:
    """Raise ProtocolError unless the payload has the header's length and checksum."""
    if len(payload) != header.num_bytes:
        raise ProtocolError(f"the embedding has {len(payload)} bytes, its header says {header.num_bytes}")
    if (found := checksum(payload)) != header.checksum:
        raise ProtocolError(f"the embedding's checksum is {found:08x}, its header says {header.checksum:08x}")


def pack_manifest(header: EmbeddingHeader) -> bytes:
    """A header as stored beside its chunks."""
    return msgspec.msgpack.encode(header)


def unpack_stored(data: bytes, struct: type[T]) -> T:
    """A stored struct, such as the header beside its chunks; raises ProtocolError when the bytes are not one."""
    try:
        return msgspec.msgpack.decode(data, type=struct)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the stored {struct.__name__} is not valid") from exc


__all__ = [
    "CHUNK_BYTES",
    "ExpectedEmbedding",
    "check_payload",
    "checksum",
    "chunks",
    "pack_manifest",
    "unpack_stored",
]
