"""What must hold of an embedding before it may touch a model, wherever it came from.

Pure: the same checks serve the ZMQ fetch and the Redis cache. A forward pass may assume; the wire may not.
"""

import contextlib
import mmap
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
from isal import isal_zlib

from common.errors import ProtocolError
from common.messages import EmbeddingHeader, Fingerprint, Grid, WireDtype, payload_bytes
from common.wire import CHUNK_BYTES, chunks

T = TypeVar("T")
Payload: TypeAlias = bytearray | mmap.mmap | memoryview
"""Writable memory; what holds it is a matter of its size and its owner."""
HUGE_BYTES = 4 << 20
HOT_BYTES = 128 << 10  # a part that stays in a core's cache


class FleetFacts(msgspec.Struct, frozen=True):
    """What a gateway knows of a model's encoders, and a restarted one must know to use cached media without any.

    The fingerprint covers the wire dtype; whoever reads an embedding is told it too, since a hash tells nothing.
    """

    fingerprint: Fingerprint
    wire_dtype: WireDtype


@dataclass(frozen=True)
class ExpectedEmbedding:
    """What a receiver knows beforehand of the embedding that it asks for. None is unknown (to a gateway)."""

    key: str
    grid: Grid
    fingerprint: str
    rows: int | None = None
    width: int | None = None
    levels: int | None = None
    dtype: WireDtype | None = None

    def num_bytes(self, dtype: WireDtype) -> int:
        """Payload size in bytes, as far as it is known."""
        return payload_bytes(dtype, self.rows or 0, self.width or 0, self.levels or 0)

    def check(self, header: EmbeddingHeader) -> None:
        """Raise ProtocolError, naming the field and both values, unless the header is exactly what is expected."""
        for field in ("key", "fingerprint", "grid", "rows", "width", "levels", "dtype"):
            got, want = getattr(header, field), getattr(self, field)
            if want is not None and got != want:
                raise ProtocolError(f"the embedding's {field} is {got}, expected {want}")


def new_payload(num_bytes: int) -> Payload:
    """Memory to receive an embedding in.

    A large one is mapped in huge pages and not cleared: filling 32 MB then costs 14 ms of one core instead of 36, since
    a bytearray is written twice and its pages come 4 KB at a time.
    """
    return bytearray(num_bytes) if num_bytes < HUGE_BYTES else map_huge(num_bytes)


def map_huge(num_bytes: int) -> mmap.mmap:
    """Memory in huge pages, where the kernel has them."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def checksum(payload: bytes | Payload, before: int = 0) -> int:
    """CRC-32 of a payload, or of what follows the bytes whose CRC-32 is `before`.

    ISA-L's is the same number as zlib's at three to ten times the speed, which at 2 to 7 GB/s would cost as much as the
    transfer itself.
    """
    return isal_zlib.crc32(payload, before)


def copy_summed(target: memoryview, source: memoryview, before: int) -> int:
    """Copy `source` to `target` and give the CRC-32 as `checksum` does, each part while it is in the core's cache."""
    for start in range(0, len(target), HOT_BYTES):
        part = target[start : start + HOT_BYTES]
        part[:] = source[start : start + HOT_BYTES]
        before = isal_zlib.crc32(part, before)
    return before


def check_payload(header: EmbeddingHeader, payload: bytes | Payload) -> None:
    """Raise ProtocolError unless the payload has the header's length and checksum."""
    if len(payload) != header.num_bytes:
        raise ProtocolError(f"the embedding has {len(payload)} bytes, its header says {header.num_bytes}")
    check_checksum(header, checksum(payload))


def check_checksum(header: EmbeddingHeader, found: int) -> None:
    """Raise ProtocolError unless the payload's checksum is the header's."""
    if found != header.checksum:
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
    "FleetFacts",
    "Payload",
    "check_checksum",
    "check_payload",
    "checksum",
    "chunks",
    "copy_summed",
    "map_huge",
    "new_payload",
    "pack_manifest",
    "unpack_stored",
]
