"""The bytes that `docs/wire.md` shows are the bytes that the code packs."""

import re

import pytest

from common import wire
from common.messages import AnyMessage, FetchChunk, FetchCredit
from decoder_svc.embedding_fetch import CREDIT_CHUNKS, STALL_S
from tests.docs.tables import DOCS

PAGE = (DOCS / "wire.md").read_text()
SHOWN: list[AnyMessage] = [FetchCredit(fetch_id="f7", chunks=1), FetchChunk(fetch_id="f7", index=8)]


def dump_of(name: str) -> bytes:
    """The hex column of a dump."""
    block = re.search(rf"<!-- dump {name} -->\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    columns = [re.match(r"(?:[0-9a-f]{2} )+", line) for line in block[1].splitlines()]
    return b"".join(bytes.fromhex(column[0]) for column in columns if column is not None)


@pytest.mark.parametrize("message", SHOWN, ids=lambda message: type(message).__name__)
def test_a_dump_is_the_message_that_the_page_names(message: AnyMessage) -> None:
    dump = dump_of(type(message).__name__)
    assert dump == wire.pack(message)
    assert wire.unpack(dump) == message


def test_the_page_states_the_version_and_the_sizes() -> None:
    assert f"Version {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}." in PAGE
    assert f"at most {wire.MAX_HEADER_BYTES >> 20} MiB" in PAGE
    assert f"no more than {CREDIT_CHUNKS * wire.CHUNK_BYTES >> 20} MiB of a fetch" in PAGE
    assert f"credit={CREDIT_CHUNKS}" in PAGE
    assert f"no chunk comes for {STALL_S:g} s" in PAGE
