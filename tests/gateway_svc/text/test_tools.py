"""Tool calls: Qwen's text to calls, however it is cut; and what a choice of tools makes the model do."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text.grammar import Grammar, after_reasoning
from gateway_svc.text.tools import ToolCallParser, ToolUse, tool_use
from tests.tiny_tokenizer import tiny_tokenizer

ADDED = frozenset(token.content for token in tiny_tokenizer().get_added_tokens_decoder().values())


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = '{"city": "Paris", "nested": {"list": [1, {"a": "}\\"]</tool_call>"}]}}'
CASES = [
    ("no call", "no call", []),
    (call("f", ONE), "", [("f", ONE)]),
    (f"Let me see.\n{call('f', '{}')}", "Let me see.", [("f", "{}")]),
    (f"{call('f', '{}')}\n{call('g', ONE)}\n", "", [("f", "{}"), ("g", ONE)]),
    (f"a {call('f', '{}')} b", "a b", [("f", "{}")]),
    # Other orders, names and types than Qwen's usual ones.
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {"a": "é"}}</tool_call>', "", [("f", '{"a": "é"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "a\\"b", "arguments": {}}</tool_call>', "", [('a"b', "{}")]),
    # What is no call stays text.
    ("<tool_call>no json</tool_call> on", "<tool_call>no json</tool_call> on", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ("a <tool_ca", "a <tool_ca", []),
    ("text  \n", "text  \n", []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    # What a limit or a stop string cut off.
    ('<tool_call>\n{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"arguments": {}, "name": "f"}\n', "", [("f", "{}")]),
]


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    text, calls, ids = "", [], []
    for part in [*map(parser.feed, pieces), parser.flush()]:
        text += part.text
        for delta in part.calls:
            if delta.name is not None:
                assert delta.number == len(calls)
                ids.append(delta.call_id)
                calls.append((delta.name, ""))
            calls[delta.number] = (calls[delta.number][0], calls[delta.number][1] + delta.arguments)
    assert parser.num_calls == len(calls) == len(set(ids))
    return text, calls


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_any_cut_gives_the_same(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=4))
        assert parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser()
    head = parser.feed('<tool_call>\n{"name": "f", "arguments": ').calls
    assert head == []
    first = parser.feed("{").calls
    assert [(delta.name, delta.arguments) for delta in first] == [("f", ""), (None, "{")]
    assert [delta.arguments for delta in parser.feed('"a": 1').calls] == ['"a": 1']
    assert [delta.arguments for delta in parser.feed("}}").calls] == ["}"]
    assert parser.feed("\n</tool_call>").calls == []


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "say"}},
]


def use(**fields: Any) -> ToolUse:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    return tool_use(ChatCompletionRequest.model_validate(body))


def names(wanted: ToolUse) -> list[str]:
    return [tool.function.name for _, tool in wanted.tools]


def test_what_each_choice_shows_and_allows() -> None:
    assert use(tool_choice="none") == ToolUse()
    assert (names(use()), use().mode, use().stops) == (["get_weather", "say"], "auto", [])
    assert use(parallel_tool_calls=False).stops == ["</tool_call>"]
    assert use(tool_choice="required").mode == "required"
    named = use(tool_choice={"type": "function", "function": {"name": "say"}})
    assert (names(named), len(named.shown), named.mode) == (["say"], 2, "named")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "say"}}]}
    some = use(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (names(some), len(some.shown), some.mode) == (["say"], 1, "auto")
    must = use(tool_choice={"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "required"}})
    assert (names(must), len(must.shown), must.mode) == (["say"], 2, "required")


def test_a_bad_schema_of_a_tool_that_must_be_called_is_named() -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": {"type": "wrong"}}}]
    with pytest.raises(InvalidRequest) as refusal:
        use(tools=tools, tool_choice="required").grammar(None, ADDED)
    assert refusal.value.param == "tools[2].function.parameters"


STRICT = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
PARIS = call("get_weather", '{"city": "Paris"}')
SAY = call("say", '{"anything": [1, 2]}')
ANSWER = Grammar("json_schema", '{"type": "object", "properties": {"ok": {"type": "boolean"}}}', "response_format")
ACCEPTED: list[tuple[dict[str, Any], Grammar | None, list[str], list[str]]] = [
    ({"tool_choice": "required"}, None, [PARIS, SAY, f"{PARIS}\n{SAY}"], ["Hello", call("other", "{}"), ""]),
    ({"tool_choice": "required"}, None, [], [call("get_weather", '{"town": "x"}'), call("get_weather", "{}")]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, None, [PARIS], [f"{PARIS}\n{SAY}"]),
    ({"tool_choice": {"type": "function", "function": {"name": "say"}}}, None, [SAY], [PARIS, f"{SAY}\n{SAY}"]),
    ({}, ANSWER, [PARIS, '{"ok": true}'], ["Hello", '{"ok": 5}']),
    # A turn that may do as it likes, with a strict tool and one that is not.
    (
        {"tools": [STRICT, TOOLS[1]]},
        None,
        ["", "Hello\n<tool_ca", f"Let me see.\n{PARIS}\n{SAY} Done.", SAY],
        [call("get_weather", "{}"), f"{PARIS}\n{call('other', '{}')}", "<tool_call>"],
    ),
    (
        {"tools": [STRICT], "parallel_tool_calls": False},
        None,
        ["Hello", f"Let me see.\n{PARIS}"],
        [f"{PARIS}\n{PARIS}", call("get_weather", '{"town": "x"}')],
    ),
]


@pytest.mark.parametrize(("fields", "otherwise", "accepted", "refused"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_the_constraint_allows_exactly_the_calls(
    fields: dict[str, Any], otherwise: Grammar | None, accepted: list[str], refused: list[str]
) -> None:
    grammar = use(**fields).grammar(otherwise, ADDED)
    assert grammar is not None
    assert [follows(grammar, text) for text in accepted] == [True] * len(accepted)
    assert [follows(grammar, text) for text in refused] == [False] * len(refused)


def test_a_mark_that_is_spelt_in_other_tokens_is_no_way_around_a_strict_tool() -> None:
    grammar = use(tools=[STRICT]).grammar(None, ADDED)
    assert grammar is not None
    assert follows(grammar, "Hello <tool", "_cal>")
    assert not follows(grammar, "Hello <tool", call("get_weather", "{}").removeprefix("<tool"))


def test_a_strict_tool_binds_what_follows_the_reasoning() -> None:
    grammar = use(tools=[STRICT]).grammar(None, ADDED)
    assert grammar is not None
    after = after_reasoning(grammar, "</think>", ADDED)
    assert follows(after, f"Hm.</think>\n\nHello\n{PARIS}")
    assert not follows(after, f"Hm.</think>\n\n{call('get_weather', '{}')}")


def test_without_need_there_is_no_constraint() -> None:
    assert use().grammar(None, ADDED) is None
    assert use(tool_choice="none").grammar(ANSWER, ADDED) is ANSWER


def follows(grammar: Grammar, *pieces: str, tokenizer: Tokenizer | None = None) -> bool:
    """Whether a whole text follows a constraint, as the decoder's library sees it; no token is of two pieces."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = tokenizer or tiny_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(tokenizer.to_str(), eos_token=end),
        llguidance.LLMatcher.grammar_from_lark(f"start: {grammar.rule}" if grammar.kind != "grammar" else grammar.text),
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece, add_special_tokens=False).ids]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_names_are_written_as_json_writes_them() -> None:
    tools = [{"type": "function", "function": {"name": 'odd "é" <|im_end|>'}}]
    grammar = use(tools=tools, tool_choice="required").grammar(None, frozenset())
    assert grammar is not None
    assert json.dumps(json.dumps('odd "é" <|im_end|>'))[1:-1] in (grammar.text or "")
