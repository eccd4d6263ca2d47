"""Compiled grammars: what they allow, where they end, and what is said of one that is wrong."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, InvalidRequest
from decoder_svc import grammar as grammar_module
from decoder_svc.grammar import GrammarCompiler, GrammarKind, GrammarState
from decoder_svc.grammar_masks import GrammarMasker
from tests.decoder_svc.grammars import EOS_ID, VOCAB_SIZE, byte_tokenizer, compiler, ids_of, text_of


def begun(kind: GrammarKind, text: str | None, output: str = "") -> GrammarState:
    return compiler().compile(kind, text).begin(ids_of(output))


def allowed(state: GrammarState) -> str:
    """The next characters, with $ for the end."""
    banned = GrammarMasker(VOCAB_SIZE)._banned([state])[0]
    ids = [token_id for token_id in range(VOCAB_SIZE) if not banned[token_id]]
    return "".join(sorted("$" if token_id == EOS_ID else text_of([token_id]) for token_id in ids))


def test_a_regex_allows_what_continues_it_and_its_end() -> None:
    assert allowed(begun("regex", "a(b|c)?")) == "a"
    assert allowed(begun("regex", "a(b|c)?", "a")) == "$bc"
    assert begun("regex", "a(b|c)?", "ab").is_complete
    assert not begun("regex", "a(b|c)?", "a").is_complete


def test_a_choice_is_one_of_its_texts() -> None:
    state = begun("choice", json.dumps(["red", "rose", 'ü"\n']))
    assert allowed(begun("choice", '["red", "rose"]', "r")) == "eo"
    for token_id in ids_of('ü"\n'):
        assert not state.is_complete
        state.accept(token_id)
    assert state.is_complete
    assert state.error is None


def test_any_object_is_an_object() -> None:
    assert allowed(begun("json_object", None)).strip("\t\n\r ") == "{"
    assert begun("json_object", None, '{"a": [1, {"b": null}]}').is_complete


def test_a_schema_bounds_its_values_and_white_space_has_an_end() -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]})
    assert allowed(begun("json_schema", schema, '{"n":2')) == "2"
    assert " " in allowed(begun("json_schema", schema, "{" + " " * 63))
    assert " " not in allowed(begun("json_schema", schema, "{" + " " * 64))


@pytest.mark.parametrize("text", ['start: "a" b\nb: "x" | "y"', 'root ::= "a" b\nb ::= "x" | "y"'])
def test_a_grammar_is_written_in_either_notation(text: str) -> None:
    assert allowed(begun("grammar", text, "a")) == "xy"


def test_a_token_outside_the_grammar_is_an_error_and_no_end() -> None:
    state = begun("regex", "[0-9]{3}", "12")
    state.accept(ids_of("x")[0])
    assert state.error is not None
    assert "follow its grammar no further" in state.error


def test_an_output_that_does_not_follow_the_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="output so far does not follow"):
        begun("regex", "[0-9]+", "12x")


def test_answers_in_one_grammar_go_their_own_ways() -> None:
    grammar = compiler().compile("regex", "[ab]{2}")
    first, second = grammar.begin([]), grammar.begin([])
    for token_id in ids_of("ab"):
        first.accept(token_id)
    assert first.is_complete
    assert allowed(second) == "ab"


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"properties": {"foo": "bar"}}', ["$.properties.foo", '"bar" is not of type']),
        ("json_schema", '{"type": "objekt"}', ["$.type"]),
        ("json_schema", '{"$schema": [5]}', ["$.$schema"]),
        ("json_schema", '{"properties"', ["not valid JSON"]),
        ("json_schema", None, ["not valid JSON"]),
        ("json_schema", "[1]", ["not an object"]),
        ("json_schema", '{"anyOf": [true, {"items": {"uniqueItems": true}}]}', ["$.anyOf[1].items", "uniqueItems"]),
        ("json_schema", '{"properties": {"a": {"pattern": "(", "type": "string"}}}', ["$.properties.a", "regex"]),
        ("json_schema", '{"not": {"type": "string"}, "x-guidance": {"lenient": true}}', ["not"]),
        ("json_schema", '{"$ref": "http://elsewhere/schema"}', ["http://elsewhere/schema", "$defs"]),
        ("json_schema", '{"$ref": "#/definitions/nowhere"}', ["/definitions/nowhere"]),
        ("json_schema", '{"items":' * 600 + "{}" + "}" * 600, ["json_schema"]),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, ["nested too deeply"]),
        ("regex", "a(b", ["unclosed group"]),
        ("regex", "(?=x)", ["look-ahead"]),
        ("choice", "[]", ["0 texts"]),
        ("choice", '["a", ""]', ["none of them empty"]),
        ("choice", '{"a": 1}', ["not a JSON list"]),
        ("choice", json.dumps(["a"] * 1025), ["1025 texts"]),
        ("grammar", "start: nowhere", ["nowhere"]),
        ("grammar", 'root ::= "a" | ("b', ["line 1"]),
        ("grammar", None, ["grammar is wrong"]),
    ],
)
def test_what_is_wrong_is_refused_and_its_place_is_named(kind: GrammarKind, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler().compile(kind, text)
    assert all(word in refused.value.message for word in words), refused.value.message
    assert len(refused.value.message) < 700
    assert "0x" not in refused.value.message


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 2)
    small = GrammarCompiler(byte_tokenizer().to_str(), VOCAB_SIZE, [EOS_ID])
    first = small.compile("regex", "a")
    small.compile("regex", "b")
    assert small.compile("regex", "a") is first
    small.compile("choice", '["a"]')
    small.compile("regex", "c")
    assert small.compile("regex", "a") is not first


def test_threads_may_compile_together() -> None:
    found: list[Any] = []

    def work(number: int) -> None:
        found.extend(compiler().compile("regex", f"x{number % 3}{{1,{i}}}") for i in range(2, 6))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16


def test_a_checkpoint_without_a_tokenizer_has_no_grammars_and_a_broken_one_stops_the_start(tmp_path: Path) -> None:
    assert GrammarCompiler.load(tmp_path, VOCAB_SIZE, [EOS_ID]) is None
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"tokenizer\.json of the checkpoint is not usable"):
        GrammarCompiler.load(tmp_path, VOCAB_SIZE, [EOS_ID])
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    assert GrammarCompiler.load(tmp_path, VOCAB_SIZE, []) is not None
