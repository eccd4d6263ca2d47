"""Streamed text: joined, it is the decoding of the whole, cut before the stop string that was complete first."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from common.errors import ConfigError
from gateway_svc.text.detokenizer import Detokenizer, StopStrings, TokenTable
from tests.paths import SHARED, needs_shared
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens([AddedToken("<a space>", special=False), AddedToken("né", special=False)])
TABLE = TokenTable(TOKENIZER)


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TABLE)
    return [*[detokenizer.feed(token_id) for token_id in token_ids], detokenizer.flush()]


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_tokens_stream_to_the_decoding_of_the_whole(token_ids: list[int]) -> None:
    assert "".join(pieces(token_ids)) == TOKENIZER.decode(token_ids, skip_special_tokens=True)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_valid_text_never_shows_a_replacement_in_a_stream(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    streamed = pieces(token_ids)
    assert "".join(streamed) == TOKENIZER.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in streamed)


@needs_shared
def test_an_emoji_in_four_tokens_appears_with_the_last() -> None:
    expected = json.loads((SHARED / "cases" / "TXT-17" / "expected.json").read_text())
    byte_tokens = Tokenizer(models.BPE({character: index for index, character in enumerate("ðŁĺĢ")}, []))
    byte_tokens.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(TokenTable(byte_tokens))
    assert [detokenizer.feed(token_id) for token_id in range(4)] == expected["deltas"]


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    token_ids = TOKENIZER.encode("\N{GRINNING FACE}", add_special_tokens=False).ids[:-1]
    assert pieces(token_ids) == [""] * len(token_ids) + ["\ufffd"]


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="only ByteLevel"):
        TokenTable(Tokenizer(models.BPE({"a": 0}, [])))


def first_complete(text: str, stops: list[str]) -> str:
    """The definition, by search: the smallest end, then the longest string."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return text if not ends else text[: min(ends)[0] + min(ends)[1]]


@given(
    st.text(alphabet="ab<|>", max_size=30),
    st.lists(st.text(alphabet="ab<|>", min_size=1, max_size=5), max_size=4),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_cut_alike_however_the_text_is_chunked(text: str, stops: list[str], data: st.DataObject) -> None:
    checker = StopStrings(stops)
    shown, rest = "", text
    while rest and not checker.is_hit:
        size = data.draw(st.integers(1, len(rest)))
        shown += checker.feed(rest[:size])
        rest = rest[size:]
        assert first_complete(text, stops).startswith(shown)
    if not checker.is_hit:
        shown += checker.flush()
    assert shown == first_complete(text, stops)
    assert checker.is_hit == any(stop in text for stop in stops)


def test_text_that_cannot_be_a_stop_string_is_not_withheld() -> None:
    checker = StopStrings(["STOP"])
    assert [checker.feed(text) for text in ("Hello S", "T", "art", " STO")] == ["Hello ", "", "STart", " "]
    assert checker.flush() == "STO"


def test_nothing_follows_a_hit() -> None:
    checker = StopStrings(["b"])
    assert checker.feed("abc") == "a"
    assert (checker.feed("more"), checker.flush()) == ("", "")
