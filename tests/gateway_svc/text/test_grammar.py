"""Constraints: what a request's fields become, and how they follow reasoning."""

import json
from typing import Any

import pytest

from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text.grammar import Grammar, after_reasoning, grammar_of
from tests.gateway_svc.text.test_tools import ADDED, follows

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}


def of(**fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return grammar_of(ChatCompletionRequest.model_validate(body))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", None, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            ("json_schema", json.dumps(SCHEMA), "response_format"),
        ),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", json.dumps(SCHEMA), "structured_outputs.json")),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            ("json_schema", json.dumps(SCHEMA), "structured_outputs.json"),
        ),
        ({"structured_outputs": {"json_object": True}}, ("json_object", None, "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "b", "a"]}}, ("choice", '["a", "b"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: X"}}, ("grammar", "start: X", "structured_outputs.grammar")),
    ],
    ids=str,
)
def test_fields_become_a_kind_and_a_text(fields: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    grammar = of(**fields)
    assert (None if grammar is None else (grammar.kind, grammar.text, grammar.param)) == expected


@pytest.mark.parametrize(
    ("grammar", "text", "wrong"),
    [
        (Grammar("json_object", None, ""), '{"a": [1]}', "[1]"),
        (Grammar("json_schema", json.dumps(SCHEMA), ""), '{"b": 1}', '{"b": "x"}'),
        (Grammar("regex", r"a\/b/c[0-9]+", ""), "a/b/c12", "a/b/c"),
        (Grammar("choice", '["one \\"two\\"", "é\\n"]', ""), 'one "two"', "one"),
        (Grammar("grammar", "start: A B\nA: /x+/\nB: /\\{y\\}/", ""), "xx{y}", "xx"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else None,
)
def test_every_kind_may_follow_reasoning(grammar: Grammar, text: str, wrong: str) -> None:
    joined = after_reasoning(grammar, "</think>", ADDED)
    assert follows(joined, f"I see {{ [ \n</think>\n\n{text}")
    assert follows(joined, f"</think>{text}")
    assert not follows(joined, f"I see\n</think>\n\n{wrong}")
    assert not follows(joined, text)
    assert follows(grammar, text)
    assert not follows(grammar, wrong)
