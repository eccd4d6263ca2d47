"""Keeps special tokens that a client wrote apart from those that the chat template writes.

A marker character that occurs nowhere in the inputs is put into every client string at each place that could become
part of a special token; whatever special token the rendered text still holds is the template's own. Pure text work:
knows nothing of token ids beyond their spelling, and nothing of HTTP or media. Any thread may use it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

from common.errors import ConfigError, InvalidRequest
from gateway_svc.text.chat_template import ChatTemplate, Conversation

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class SpecialTokenShield:
    """Breaks up the special tokens in a client's strings with a marker character.

    A token may also be pieced together, from two strings that the template writes side by side or from the
    template's own text and a string after it, so ends that could begin a token, and beginnings that could complete
    one that the template's text begins, are marked as well.
    """

    def __init__(self, special_ids: dict[str, int], template: ChatTemplate) -> None:
        self._pattern = any_of(special_ids)
        beginnings = {(token[:size], token[size:]) for token in special_ids for size in range(1, len(token))}
        self._beginnings = frozenset(beginning for beginning, _ in beginnings)
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        literals = tuple(template.literals())
        self._completions = frozenset(
            rest for beginning, rest in beginnings if any(literal.endswith(beginning) for literal in literals)
        )
        self._template_characters = set(template.source)

    def free_characters(self, conversation: Conversation) -> tuple[str, str]:
        """Two private-use characters that occur neither in the conversation nor in the template."""
        used = set(self._template_characters)
        for text in _strings([conversation.messages, conversation.tools, conversation.template_kwargs]):
            if not text.isascii():
                used.update(text)
        candidates = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
        marker, tag = next(candidates, None), next(candidates, None)
        if marker is None or tag is None:
            raise InvalidRequest(
                "the messages use every private-use character of Unicode: leave two unused", param="messages"
            )
        return marker, tag

    def shielded(self, conversation: Conversation, marker: str) -> Conversation:
        """The conversation with every client string marked. Roles and part types are our own words."""
        return Conversation(
            messages=[self._message(message, marker) for message in conversation.messages],
            tools=self._marked(conversation.tools, marker),
            template_kwargs=self._marked(conversation.template_kwargs, marker),
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
        )

    def _message(self, message: dict[str, Any], marker: str) -> dict[str, Any]:
        return {key: value if key == "role" else self._marked(value, marker) for key, value in message.items()}

    def _marked(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, marker)
        if isinstance(value, dict):
            return {self._marked_text(key, marker): self._marked(item, marker) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item, marker) for item in value]
        return value

    def _marked_text(self, text: str, marker: str) -> str:
        marked = self._pattern.sub(lambda match: "".join(char + marker for char in match[0]), text)
        if any(text[-size:] in self._beginnings for size in range(1, min(self._longest_beginning, len(text)) + 1)):
            marked += marker
        if text and any(rest.startswith(text) or text.startswith(rest) for rest in self._completions):
            marked = marker + marked
        return marked


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Spelling to id of every special token. Raises ConfigError for kinds whose matching we do not reproduce."""
    special = {token.content: (token, number) for number, token in tokenizer.get_added_tokens_decoder().items()}
    for content, (token, _) in special.items():
        if token.special and (token.lstrip or token.rstrip or token.single_word):
            raise ConfigError(
                f"special token {content!r} strips or needs spaces around it, which is not supported: Qwen's do not"
            )
    return {content: number for content, (token, number) in special.items() if token.special}


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the tokens, the longest first, as the tokenizer itself matches."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def without(text: str, *characters: str) -> str:
    """The text without the given characters."""
    for character in characters:
        text = text.replace(character, "")
    return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
