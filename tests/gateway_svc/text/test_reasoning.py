"""Reasoning and answer: told apart in the same way wherever the text is cut into pieces."""

import random

import pytest

from gateway_svc.text.reasoning import ReasoningSplitter, num_begun

CASES = [
    # (prompt has opened it, text, reasoning, answer)
    (True, "I think.\n</think>\n\nYes.", "I think.", "Yes."),
    (True, "\nA <b> < /think>\n\nmore\n</think>Yes.\n", "A <b> < /think>\n\nmore", "Yes.\n"),
    (True, "no end", "no end", ""),
    (True, "no end </thin", "no end </thin", ""),
    (True, "</think>\n\nat once", "", "at once"),
    (True, "a</think>", "a", ""),
    (False, "<think>\na\n</think>\n\nb", "a", "b"),
    (False, "\n <think>a</think>b", "a", "b"),
    (False, "an answer with <think> in it", "", "an answer with <think> in it"),
    (False, "<thi", "", "<thi"),
    (False, "<thin air", "", "<thin air"),
    (False, "  ", "", "  "),
    (False, "", "", ""),
]


def split(is_open: bool, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*map(splitter.feed, pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "answer"), CASES)
def test_any_cut_gives_the_same(is_open: bool, text: str, reasoning: str, answer: str) -> None:
    assert split(is_open, [text]) == (reasoning, answer)
    assert split(is_open, list(text)) == (reasoning, answer)
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(is_open, pieces) == (reasoning, answer)


def test_thoughts_are_shown_as_they_come() -> None:
    splitter = ReasoningSplitter(is_open=True)
    assert splitter.feed("One two") == ("One two", "")
    assert splitter.feed(" three\n") == (" three", "")
    assert splitter.is_thinking
    assert splitter.feed("</think>") == ("", "")
    assert not splitter.is_thinking
    assert splitter.feed("\n") == ("", "")
    assert splitter.feed("Yes") == ("", "Yes")


def test_a_beginning_of_a_mark_is_seen_at_the_end_only() -> None:
    assert [num_begun(text, "</think>") for text in ("", "a", "a<", "</thin", "</think>", "<</")] == [0, 0, 1, 6, 0, 2]
