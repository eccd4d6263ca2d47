"""From token ids back to text, one token at a time: bytes, characters, stop strings.

A byte-level token is a fixed string of bytes, so a stream is decoded exactly, in constant work per token, by an
incremental UTF-8 decoder: a character that spans tokens appears when it is complete, and what never completes becomes
U+FFFD, as in the decoding of the whole. Pure; knows nothing of HTTP or sampling. One object per choice.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from common.errors import ConfigError


class TokenTable:
    """The bytes of every token id. Shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ConfigError(
                f"tokenizer.json has a decoder of type {decoder.get('type')!r}, but only ByteLevel is supported: "
                "Qwen's tokenizers are byte-level"
            )
        added = tokenizer.get_added_tokens_decoder()
        byte_of = _byte_of_character()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes] = [b""] * (max(vocabulary.values()) + 1)
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = _token_bytes(token, byte_of)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def size(self) -> int:
        """Token ids from here on have no text."""
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token is made of, special tokens included. Ids without a token (padding rows) are empty."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def text_of(self, token_ids: Iterable[int]) -> str:
        """Their text, special tokens included; what is no whole character is U+FFFD."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def visible_bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the answer: nothing, for a special token."""
        return b"" if token_id in self._special else self.bytes_of(token_id)


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, table: TokenTable, *, keep_special: bool = False) -> None:
        self._bytes_of = table.bytes_of if keep_special else table.visible_bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What an unfinished character comes to at the end."""
        return self._decoder.decode(b"", final=True)


@dataclass
class _StopString:
    """One stop string and how much of it the text now ends with (Knuth, Morris and Pratt's automaton)."""

    text: str
    fallback: list[int]
    num_matched: int = 0

    def advance(self, character: str) -> bool:
        """Take one character; whether the string is now complete."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self.fallback[self.num_matched - 1]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)


class StopStrings:
    """Withholds text that may turn out to be a stop string, across any borders of tokens and chunks.

    The string that is complete first ends the text, just before it; of several complete at the same character, the
    longest. Text is released as soon as it can no longer be part of one. With `is_shown`, the string itself is the
    end of the text.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._is_shown = is_shown
        self._stops = [_StopString(stop, _fallbacks(stop)) for stop in stops if stop]
        self._withheld = ""
        self.is_hit = False

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Once `is_hit`, there is no more."""
        if self.is_hit:
            return ""
        if not self._stops:
            return text
        pending = self._withheld + text
        for index, character in enumerate(text):
            complete = [len(stop.text) for stop in self._stops if stop.advance(character)]
            if complete:
                self.is_hit = True
                self._withheld = ""
                end = len(pending) - len(text) + index + 1
                return pending[: end if self._is_shown else end - max(complete)]
        num_withheld = max(stop.num_matched for stop in self._stops)
        self._withheld = pending[len(pending) - num_withheld :]
        return pending[: len(pending) - num_withheld]

    def flush(self) -> str:
        """What was withheld, at an end that no stop string made."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def _fallbacks(text: str) -> list[int]:
    """For each length: how long the longest proper beginning is that is also the end of so much of the text."""
    fallback = [0] * len(text)
    size = 0
    for index in range(1, len(text)):
        while size and text[index] != text[size]:
            size = fallback[size - 1]
        if text[index] == text[size]:
            size += 1
        fallback[index] = size
    return fallback


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet, which byte-level tokenizers spell their tokens in: printable bytes stand for themselves, the
    others, in order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """An added token outside of the alphabet stands for itself, as the library's decoder has it."""
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:
        return token.encode()
