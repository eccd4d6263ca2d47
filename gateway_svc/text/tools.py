"""Tool calls: which tools a turn may call, the constraint that makes it call one, and Qwen's format back to calls.

Qwen writes `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>` into its text. The parser takes such
text as it grows and gives the arguments out character by character, as OpenAI's streams do; what only looks like a
call stays text. Knows nothing of templates or HTTP. Pure; one parser per choice.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.errors import InvalidRequest
from gateway_svc.schemas.chat_request import AllowedToolsChoice, ChatCompletionRequest, NamedTool, Tool
from gateway_svc.text.grammar import Grammar, inline_schema, lark, literal, schema_text
from gateway_svc.text.reasoning import num_begun

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_MAX_HEAD_CHARACTERS = 4096  # a head that is longer is read when its call is complete
# Any text without a mark. Where the mark is a token of its own, text never matches that, but it could spell it.
_FREE_TEXT = rf"/(.|\n)*/ & ~/(.|\n)*{OPEN}(.|\n)*/"
_ANY_ARGUMENTS = '{"type": "object"}'


@dataclass(frozen=True)
class ToolUse:
    """What a turn may do with tools: those that the template shows, and those that may be called, by their places.

    Without tools that may be called, the text is never looked at for calls.
    """

    shown: tuple[Tool, ...] = ()
    tools: tuple[tuple[int, Tool], ...] = ()
    mode: Literal["auto", "required", "named"] = "auto"
    is_parallel: bool = True

    @property
    def stops(self) -> list[str]:
        """Stop strings that keep a turn to one call."""
        return [CLOSE] if self.tools and not self.is_parallel else []

    def grammar(self, otherwise: Grammar | None, added_tokens: frozenset[str]) -> Grammar | None:
        """The constraint of a turn that must call a tool, or that must obey `otherwise` where it calls none.

        A turn that may do as it likes is held to the schemas of strict tools alone.
        """
        is_free = self.mode == "auto" and otherwise is None
        if not self.tools or (is_free and not any(tool.function.strict for _, tool in self.tools)):
            return otherwise
        calls = 'call ("\\n" call)*' if self.is_parallel and self.mode != "named" else "call"
        alternatives, rules = [], {}
        for index, tool in self.tools:
            head = '{"name": ' + json.dumps(tool.function.name) + ', "arguments": '
            alternatives.append(f"{json.dumps(head)} arguments_{index} {json.dumps('}')}")
            is_any = is_free and not tool.function.strict
            rules[f"arguments_{index}"] = inline_schema(_ANY_ARGUMENTS if is_any else _parameters(tool, index))
        body = " | ".join(alternatives)
        call = f"{literal(OPEN, added_tokens)} {json.dumps(chr(10))} ({body}) {json.dumps(chr(10))} "
        rules["call"] = call + literal(CLOSE, added_tokens)
        if is_free:
            return lark("tools", "FREE (call FREE)*" if self.is_parallel else "FREE call?", FREE=_FREE_TEXT, **rules)
        if self.mode != "auto" or otherwise is None:
            return lark("tool_choice", calls, **rules)
        return lark(otherwise.param, "calls | answer", calls=calls, answer=otherwise.rule, **rules)


def tool_use(request: ChatCompletionRequest) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say together. Raises InvalidRequest."""
    tools, choice = tuple(request.tools or ()), request.tool_choice
    is_parallel = request.parallel_tool_calls is not False
    if choice == "none" or (not tools and choice in (None, "auto")):
        return ToolUse()
    if not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools: send some", param="tool_choice")
    if isinstance(choice, NamedTool):
        return ToolUse(tools, _named(tools, [choice], "tool_choice"), "named", is_parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed, mode = choice.allowed_tools, choice.allowed_tools.mode
        callable_tools = _named(tools, allowed.tools, "tool_choice.allowed_tools.tools")
        shown = tuple(tool for _, tool in callable_tools) if mode == "auto" else tools
        return ToolUse(shown, callable_tools, mode, is_parallel)
    return ToolUse(tools, tuple(enumerate(tools)), choice or "auto", is_parallel)


def _named(tools: Sequence[Tool], names: Sequence[NamedTool], param: str) -> tuple[tuple[int, Tool], ...]:
    by_name = {tool.function.name: (index, tool) for index, tool in enumerate(tools)}
    for chosen in names:
        if chosen.function.name not in by_name:
            raise InvalidRequest(
                f"{param} names the function {chosen.function.name[:100]!r}, which is not among the tools", param=param
            )
    return tuple(by_name[name] for name in dict.fromkeys(chosen.function.name for chosen in names))


def _parameters(tool: Tool, index: int) -> str:
    if not tool.function.parameters:
        return _ANY_ARGUMENTS
    return schema_text(tool.function.parameters, f"tools[{index}].function.parameters")


class CallDelta(NamedTuple):
    """What was added to call `number`: first its name and id, then pieces of its arguments."""

    number: int
    arguments: str
    name: str | None = None
    call_id: str | None = None


class Called(NamedTuple):
    """New text of an answer, and what was added to its calls."""

    text: str
    calls: list[CallDelta]


class ToolCallParser:
    """The state of one choice."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._pending = ""  # text that may be white space before a call, part of a mark, or a call's head
        self._scanner = _ObjectScanner()

    def feed(self, text: str) -> Called:
        """What this text adds."""
        self._pending += text
        shown = ""
        calls: list[CallDelta] = []
        while True:
            before = (self._state, len(self._pending))
            if self._state == "text":
                shown += self._read_text()
            elif self._state == "head":
                shown += self._read_head(calls)
            elif self._state == "arguments":
                self._read_arguments(calls)
            else:
                self._read_tail()
            if before == (self._state, len(self._pending)):
                return Called(shown, calls)

    def flush(self) -> Called:
        """What was withheld, at the end of the text. A call that a limit cut off stays as it is."""
        pending, self._pending = self._pending, ""
        if self._state == "head":
            call = _whole_call(pending)
            return Called("", self._added(*call)) if call is not None else Called(OPEN + pending, [])
        if self._state == "text" and not (self.num_calls and not pending.strip()):
            return Called(pending, [])
        return Called("", [])

    def _read_text(self) -> str:
        """Text up to a call, without the white space before it."""
        text, mark, rest = self._pending.partition(OPEN)
        if mark:
            self._state, self._pending = "head", rest
            return text.rstrip()
        kept = text[: len(text) - num_begun(text, OPEN)].rstrip()
        self._pending = text[len(kept) :]
        return kept

    def _read_head(self, calls: list[CallDelta]) -> str:
        """Begin a call as soon as its arguments do; one of another shape is read as a whole, or shown as text."""
        head = _HEAD.match(self._pending[:_MAX_HEAD_CHARACTERS])
        name = _name(head[1]) if head is not None else None
        if head is not None and name is not None:
            calls += self._added(name, "")
            self._state, self._pending = "arguments", self._pending[head.end() :]
            self._scanner = _ObjectScanner()
            return ""
        inner, mark, rest = self._pending.partition(CLOSE)
        if not mark:
            return ""
        self._state, self._pending = "text", rest
        call = _whole_call(inner)
        if call is None:
            return OPEN + inner + CLOSE
        calls += self._added(*call)
        return ""

    def _read_arguments(self, calls: list[CallDelta]) -> None:
        num_inside = self._scanner.feed(self._pending)
        inside, self._pending = self._pending[:num_inside], self._pending[num_inside:]
        if inside:
            calls.append(CallDelta(self.num_calls - 1, inside))
        if self._scanner.is_closed:
            self._state = "tail"

    def _read_tail(self) -> None:
        """What stands between a call's arguments and its end is a closing brace, or of no use."""
        _, mark, rest = self._pending.partition(CLOSE)
        if mark:
            self._state, self._pending = "text", rest
        else:
            self._pending = self._pending[len(self._pending) - num_begun(self._pending, CLOSE) :]

    def _added(self, name: str, arguments: str) -> list[CallDelta]:
        self.num_calls += 1
        index = self.num_calls - 1
        first = CallDelta(index, "", name, f"call_{secrets.token_hex(12)}")
        return [first, CallDelta(index, arguments)] if arguments else [first]


class _ObjectScanner:
    """Finds the end of one JSON object in text that comes in pieces."""

    _INTERESTING = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self.is_closed = False
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        position = 0
        if self._is_escaped and text:
            position, self._is_escaped = 1, False
        while match := self._INTERESTING.search(text, position):
            position = match.end()
            character = match[0]
            if self._is_string:
                if character == "\\":
                    self._is_escaped = position == len(text)
                    position += 1
                elif character == '"':
                    self._is_string = False
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return position
        return len(text)


def _name(text: str) -> str | None:
    try:
        name = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is complete; None for text that is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
