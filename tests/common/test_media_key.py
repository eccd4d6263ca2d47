"""What a media key covers: everything that changes an embedding, each field apart from the next."""

import hashlib
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.media_key import media_key
from common.messages import MediaKey, MediaOptions

BASE: dict[str, Any] = {
    "source": b"bytes",
    "modality": "image",
    "options": MediaOptions(),
    "fingerprint": "f" * 64,
    "cache_salt": None,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"source": b"bytes "},
    {"source": b""},
    {"modality": "video"},
    {"fingerprint": "e" * 64},
    {"cache_salt": ""},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    *({"options": MediaOptions(**{name: 3})} for name in MediaOptions.__struct_fields__),
    {"options": MediaOptions(min_pixels=3, max_pixels=3)},
]


def key_of(**changes: Any) -> str:
    fields = {**BASE, **changes}
    return media_key(fields.pop("source"), **fields)


def test_every_field_changes_the_key() -> None:
    keys = [key_of(**change) for change in CHANGES]
    assert len(set(keys)) == len(CHANGES)


def test_a_key_is_what_messages_carry() -> None:
    assert msgspec.convert(key_of(), MediaKey) == key_of()


def test_a_key_is_a_full_sha256_over_length_framed_fields() -> None:
    """Written out once more, so that a change of the scheme, which orphans every cache, is made on purpose."""
    fields = [
        b"tandem.media_key.v1",
        b"bytes",
        b"image",
        b'{"min_pixels":null,"max_pixels":null,"fps":null,"num_frames":null,"max_frames":null}',
        b"f" * 64,
        b"salt:x",
    ]
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert key_of(cache_salt="x") == hashlib.sha256(framed).hexdigest()


def test_equal_input_of_another_type_has_the_same_key() -> None:
    assert key_of(source=memoryview(b"bytes")) == key_of()


@given(st.lists(st.tuples(st.binary(max_size=4), st.text("ab:", max_size=4)), min_size=2, max_size=6, unique=True))
def test_bytes_that_move_between_fields_change_the_key(pairs: list[tuple[bytes, str]]) -> None:
    keys = [key_of(source=source, cache_salt=salt) for source, salt in pairs]
    assert all(first != second for first, second in combinations(keys, 2))


@pytest.mark.parametrize("salt", ["\ud800", "\0", "salt:"])
def test_odd_salts_are_salts_like_others(salt: str) -> None:
    assert key_of(cache_salt=salt) not in {key_of(), key_of(cache_salt="")}
