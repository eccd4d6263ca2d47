"""The checks that every embedding passes before a model sees it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.embedding import (
    HOT_BYTES,
    ExpectedEmbedding,
    check_payload,
    checksum,
    copy_summed,
    pack_manifest,
    unpack_stored,
)
from common.errors import ProtocolError
from common.messages import EmbeddingHeader, VideoFacts
from tests.common.test_messages import HEADER

EXPECTED = ExpectedEmbedding(
    key=HEADER.key, grid=HEADER.grid, fingerprint=HEADER.fingerprint, rows=6, width=192, levels=3, dtype=HEADER.dtype
)


def test_what_was_expected_passes() -> None:
    EXPECTED.check(HEADER)
    ExpectedEmbedding(key=HEADER.key, grid=HEADER.grid, fingerprint=HEADER.fingerprint).check(HEADER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "0" * 64),
        ("grid", (1, 6, 4)),
        ("fingerprint", "1" * 64),
        ("rows", 7),
        ("width", 191),
        ("levels", 2),
        ("dtype", "int8"),
    ],
)
def test_every_difference_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=f"embedding's {field} is .*, expected"):
        EXPECTED.check(msgspec.structs.replace(HEADER, **{field: value}))


def test_a_payload_must_have_its_header_s_length_and_checksum() -> None:
    payload = bytes(range(256)) * 9
    header = msgspec.structs.replace(HEADER, checksum=checksum(payload))
    check_payload(header, payload)
    check_payload(header, memoryview(payload))
    with pytest.raises(ProtocolError, match="2303 bytes, its header says 2304"):
        check_payload(header, payload[:-1])
    flipped = bytearray(payload)
    flipped[1000] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        check_payload(header, flipped)


def test_a_manifest_survives_the_store() -> None:
    assert unpack_stored(pack_manifest(HEADER), EmbeddingHeader) == HEADER


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    for struct in (EmbeddingHeader, VideoFacts):
        with pytest.raises(ProtocolError, match=f"stored {struct.__name__} is not valid"):
            unpack_stored(data, struct)


def test_a_value_nested_beyond_reason_is_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_stored(b"\x81\xa3new" + b"\x91" * 100_000, EmbeddingHeader)


@pytest.mark.parametrize("size", [0, 1, HOT_BYTES - 1, HOT_BYTES, 2 * HOT_BYTES + 3])
def test_a_copy_is_summed_as_a_whole_and_goes_on_from_what_came_before(size: int) -> None:
    source = bytes(index % 251 for index in range(size))
    target = bytearray(size)
    assert copy_summed(memoryview(target), memoryview(source), checksum(b"before")) == checksum(b"before" + source)
    assert target == source
