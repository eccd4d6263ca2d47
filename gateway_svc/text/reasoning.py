"""The reasoning of Thinking models, told apart from the answer as the text grows.

Such a model writes its thoughts, `</think>`, then the answer; its template may have opened `<think>` already. Owns
these marks and the white space around them, which the template adds again when the thoughts come back as
`reasoning_content`. Pure; one object per choice.
"""

from typing import NamedTuple

OPEN = "<think>"
CLOSE = "</think>"


class Reasoned(NamedTuple):
    """New text of both kinds."""

    reasoning: str
    answer: str


class ReasoningSplitter:
    """The state of one choice. Nothing that may be part of a mark, or white space before one, is shown early."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open` says that the prompt ends inside of `<think>`; else the text may begin with it."""
        self._state = "thoughts" if is_open else "start"
        self._withheld = ""
        self._is_blank = True  # nothing but line breaks was seen since the last mark

    @property
    def is_thinking(self) -> bool:
        """Whether the answer has not begun, as far as is known."""
        return self._state in ("start", "thoughts")

    def feed(self, text: str) -> Reasoned:
        """What this text adds."""
        text = self._withheld + text
        self._withheld = ""
        if self._state == "start":
            text = self._begin(text)
        reasoning = ""
        if self._state == "thoughts":
            reasoning, text = self._think(text)
        if self._state == "gap":
            text = text.lstrip("\n")
            if text:
                self._state = "answer"
        return Reasoned(reasoning, text)

    def flush(self) -> Reasoned:
        """What was withheld, at the end of the text."""
        withheld, self._withheld = self._withheld, ""
        if self._state == "thoughts":
            return Reasoned(withheld.rstrip("\n"), "")
        return Reasoned("", withheld)

    def _begin(self, text: str) -> str:
        """Text of the answer, once it is clear that it does not begin with `<think>`."""
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = "thoughts"
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):
            self._withheld = text
            return ""
        self._state = "answer"
        return text

    def _think(self, text: str) -> tuple[str, str]:
        thoughts, mark, rest = text.partition(CLOSE)
        if mark:
            self._state = "gap"
            return self._shown(thoughts.rstrip("\n")), rest
        kept = text[: len(text) - num_begun(text, CLOSE)].rstrip("\n")
        self._withheld = text[len(kept) :]
        return self._shown(kept), ""

    def _shown(self, thoughts: str) -> str:
        if self._is_blank:
            thoughts = thoughts.lstrip("\n")
            self._is_blank = not thoughts
        return thoughts


def num_begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
