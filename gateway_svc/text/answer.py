"""What the text of a choice says: reasoning, content and tool calls, as it grows and as a whole.

Joins the two parsers, and settles how a choice ends when it has called tools. A choice that can have neither goes
through untouched. Knows nothing of JSON shapes or HTTP. Pure; one parser per choice, fed by the request's task.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway_svc.text.choice import ChoiceDelta
from gateway_svc.text.reasoning import ReasoningSplitter
from gateway_svc.text.tools import CallDelta, ToolCallParser

Thinking = Literal["never", "perhaps", "open"]  # whether the text reasons first; "open": the prompt has begun it


class AnswerDelta(msgspec.Struct, frozen=True):
    """What one event added. Quick to make, since there is one for each token of each choice."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    logprobs: Sequence[dict[str, Any]] = ()
    finish_reason: str | None = None


@dataclass
class Call:
    """A whole tool call."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def of(cls, deltas: Iterable[AnswerDelta]) -> "Message":
        """All deltas of one choice together."""
        message = cls()
        contents, thoughts = [], []
        for delta in deltas:
            contents.append(delta.content)
            thoughts.append(delta.reasoning)
            message.logprobs += delta.logprobs
            message.finish_reason = delta.finish_reason
            for call in delta.calls:
                if call.name is not None:
                    message.calls.append(Call(call.call_id or "", call.name))
                message.calls[call.number].arguments += call.arguments
        message.content, message.reasoning = "".join(contents), "".join(thoughts)
        return message


class AnswerParser:
    """The state of one choice."""

    def __init__(self, thinking: Thinking, *, has_tools: bool, is_named: bool = False) -> None:
        """`is_named`: the one function was named by the request, so that calling it is an ordinary end."""
        self.num_reasoning_tokens = 0
        self._splitter = None if thinking == "never" else ReasoningSplitter(is_open=thinking == "open")
        self._calls = ToolCallParser() if has_tools else None
        self._is_named = is_named

    def feed(self, delta: ChoiceDelta) -> AnswerDelta:
        """What a delta of the text adds."""
        if self._splitter is None and self._calls is None:
            return AnswerDelta(delta.text, logprobs=delta.logprobs, finish_reason=delta.finish_reason)
        answer = self._read(delta.text, delta.num_tokens)
        if delta.finish_reason is None:
            return msgspec.structs.replace(answer, logprobs=delta.logprobs)
        rest = self._flushed()
        return AnswerDelta(
            answer.content + rest.content,
            answer.reasoning + rest.reasoning,
            [*answer.calls, *rest.calls],
            delta.logprobs,
            self._finish_reason(delta.finish_reason),
        )

    def _read(self, text: str, num_tokens: int) -> AnswerDelta:
        reasoning = ""
        if self._splitter is not None:
            if self._splitter.is_thinking:
                self.num_reasoning_tokens += num_tokens
            reasoning, text = self._splitter.feed(text)
        if self._calls is None:
            return AnswerDelta(text, reasoning)
        called = self._calls.feed(text)
        return AnswerDelta(called.text, reasoning, called.calls)

    def _flushed(self) -> AnswerDelta:
        reasoning, text = self._splitter.flush() if self._splitter is not None else ("", "")
        if self._calls is None:
            return AnswerDelta(text, reasoning)
        fed, rest = self._calls.feed(text), self._calls.flush()
        return AnswerDelta(fed.text + rest.text, reasoning, fed.calls + rest.calls)

    def _finish_reason(self, reason: str) -> str:
        has_called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" and not self._is_named else reason
