"""The wire format against whatever bytes may come: a message, or ProtocolError."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.messages import Cancel, Hello, Message
from common.wire import CHUNK_BYTES, MAX_HEADER_BYTES, PREFIX_BYTES, PROTOCOL_MAJOR, chunks, pack, request_id_of, unpack
from tests.common.test_messages import EXAMPLES
from tests.paths import SHARED, needs_shared

WIRE_CASES = SHARED / "cases" / "DIS-14" / "wire"


def survives(frame: bytes) -> None:
    """Unpacking gives a message or ProtocolError, and nothing else."""
    with contextlib.suppress(ProtocolError):
        assert isinstance(unpack(frame), Message)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


@given(st.binary(max_size=300))
def test_random_bytes_behind_the_prefix_never_do_worse_than_an_error(data: bytes) -> None:
    survives(pack(EXAMPLES[0])[:PREFIX_BYTES] + data)


@settings(max_examples=300)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_never_does_worse_than_an_error(message: Hello, data: st.DataObject) -> None:
    frame = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    survives(bytes(frame))


@pytest.mark.parametrize(
    "body", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa1a" * 100_000]
)
def test_lengths_and_depths_that_lie_allocate_nothing(body: bytes) -> None:
    prefix = pack(EXAMPLES[0])[:PREFIX_BYTES]
    for wrapped in (body, b"\x82\xa4type\xa6Cancel\xa3new" + body):
        with pytest.raises(ProtocolError):
            unpack(prefix + wrapped)


@needs_shared
@pytest.mark.parametrize("name", ["cut", "empty", "len2g", "map2g", "nest", "one", "random"])
def test_frames_that_broke_others_are_refused(name: str) -> None:
    frame = (WIRE_CASES / f"{name}.bin").read_bytes()
    for data in (frame, pack(EXAMPLES[0])[:PREFIX_BYTES] + frame):
        with pytest.raises(ProtocolError):
            unpack(data)


def test_another_major_version_is_refused_with_both_versions_named() -> None:
    frame = bytearray(pack(Cancel(request_id="r")))
    frame[3] = PROTOCOL_MAJOR + 1
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_MAJOR + 1} and this process {PROTOCOL_MAJOR}"):
        unpack(bytes(frame))


def test_another_minor_version_is_understood() -> None:
    frame = bytearray(pack(Cancel(request_id="r")))
    frame[4] += 1
    assert unpack(memoryview(frame)) == Cancel(request_id="r")


def test_an_overlong_header_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        unpack(bytes(MAX_HEADER_BYTES + 1))


def test_an_error_quotes_little_of_what_was_sent() -> None:
    frame = pack(EXAMPLES[0])[:PREFIX_BYTES] + b"\x81\xa4type\xda\xff\xff" + b"S" * 0xFFFF
    with pytest.raises(ProtocolError) as caught:
        unpack(frame)
    assert len(caught.value.message) < 300


@given(st.integers(0, 5000), st.integers(1, 700))
def test_chunks_are_views_that_join_to_the_payload(size: int, chunk_bytes: int) -> None:
    payload = bytes(index % 251 for index in range(size))
    parts = list(chunks(memoryview(payload), chunk_bytes))
    assert b"".join(parts) == payload
    assert all(len(part) == chunk_bytes for part in parts[:-1])
    assert all(part.obj is payload for part in parts)


def test_a_chunk_fits_what_a_receiver_accepts() -> None:
    assert CHUNK_BYTES < MAX_HEADER_BYTES


REFUSED_FRAME = b"TDM\x01\x00" + msgspec.msgpack.encode({"type": "GenerateRequest", "request_id": "r", "n": [1] * 9})


def test_the_request_id_of_a_refused_header_is_found_where_it_can_be_read() -> None:
    with pytest.raises(ProtocolError):
        unpack(REFUSED_FRAME)
    assert request_id_of(REFUSED_FRAME) == "r"
    assert request_id_of(memoryview(REFUSED_FRAME)) == "r"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        REFUSED_FRAME[:-1],
        b"TDM\x02\x00" + REFUSED_FRAME[5:],
        b"TDM\x01\x00" + msgspec.msgpack.encode({"request_id": "x" * 129}),
        b"TDM\x01\x00" + msgspec.msgpack.encode({"request_id": 7}),
        b"TDM\x01\x00" + msgspec.msgpack.encode({"type": "Hello"}),
        b"TDM\x01\x00" + b"\x91" * 100_000,
    ],
    ids=["empty", "garbage", "cut", "version", "too long", "no text", "none", "deep"],
)
def test_a_header_without_a_readable_request_id_has_none(frame: bytes) -> None:
    assert request_id_of(frame) is None


@given(st.binary(max_size=300))
def test_looking_for_a_request_id_never_raises(data: bytes) -> None:
    assert isinstance(request_id_of(b"TDM\x01\x00" + data), str | None)
