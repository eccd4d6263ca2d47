"""Structured output: a request's schema, regex, choice or grammar, compiled, and how far an answer has come in it.

Owns the checkpoint's vocabulary as grammars need it, what is refused and where it is wrong, and a small cache of
compiled grammars. The parsing is llguidance's. Compiling takes up to a second and runs in any thread but the engine's;
an answer's state is used in the engine thread, and in the thread that computes masks. Knows no torch.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from common.errors import ConfigError, InvalidRequest
from common.json_schema import META_SCHEMA, WHITESPACE_PATTERN
from common.messages import GrammarKind

KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)

MAX_CHOICES = 1024
MAX_CACHED = 32
MAX_REASON_CHARACTERS = 300
MAX_LOCATING_CHARACTERS = 1 << 20  # of schemas that are compiled only to say which of them is wrong
# Lexer states take 1 to 2 KiB each; the library's own limit would let one grammar take half a GiB.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE_PATTERN, "lenient": False, "coerce_one_of": False}


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the grammar and can grow no further."""
        return bool(self.matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any more, if so."""
        if not self.matcher.is_error():
            return None
        return "the answer can follow its grammar no further: give a schema or grammar that is simpler, or that can end"

    def accept(self, token_id: int) -> None:
        """Go on by one token. One that the grammar does not allow becomes `error`."""
        self.matcher.consume_token(token_id)


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def begin(self, output: Seq[int]) -> GrammarState:
        """The state of an answer, behind the tokens that it has already. Raises InvalidRequest."""
        matcher = self._start.deep_copy()
        if output and not matcher.consume_tokens(list(output)):
            raise InvalidRequest("the output so far does not follow the request's own grammar")
        return GrammarState(matcher)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Callable from several threads."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], Grammar] = OrderedDict()

    @classmethod
    def load(cls, checkpoint_dir: Path, vocab_size: int, eos_token_ids: Seq[int]) -> "GrammarCompiler | None":
        """With the checkpoint's tokenizer; None when it has none: then there is no structured output."""
        path = checkpoint_dir / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(path.read_text(), vocab_size, eos_token_ids)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"tokenizer.json of the checkpoint is not usable: {_short(exc)}") from exc

    def compile(self, kind: GrammarKind, text: str | None) -> Grammar:
        """A grammar, compiled now or before. Raises InvalidRequest, which says what is wrong and where."""
        key = (kind, text or "")
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return known
        compiled = Grammar(self._matcher(kind, text or ""))
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _matcher(self, kind: GrammarKind, text: str) -> LLMatcher:
        if kind == "json_object":
            return self._checked(kind, _of_schema({"type": "object"}))
        if kind == "json_schema":
            return self._of_json_schema(text)
        if kind == "regex":
            return self._checked(kind, LLMatcher.grammar_from_regex(text))
        if kind == "choice":
            return self._checked(kind, LLMatcher.grammar_from_lark(_choice_rules(text)))
        return self._checked(kind, LLMatcher.grammar_from_lark(_lark_of(text)))

    def _of_json_schema(self, text: str) -> LLMatcher:
        try:
            schema = msgspec.json.decode(text)
            if not isinstance(schema, dict):
                raise InvalidRequest("the json_schema is not an object: give a JSON schema object")
            META_SCHEMA.validate(schema)
            matcher, reason = self._compiled_schema(schema)
            if matcher is None:
                if (reference := _foreign_reference(schema)) is not None:
                    raise InvalidRequest(
                        f"the json_schema has $ref {_short(reference)!r}, and nothing is fetched for a schema: "
                        "put what it means into $defs"
                    )
                where, reason = self._locate(schema, reason)
                raise InvalidRequest(f"the json_schema cannot be used, at {_short(where)}: {reason}")
            return matcher
        except msgspec.MsgspecError as exc:
            raise InvalidRequest(f"the json_schema is not valid JSON: {_short(exc)}") from exc
        except jsonschema_rs.ValidationError as exc:
            where = _short("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in exc.instance_path))
            raise InvalidRequest(f"the json_schema is wrong, at ${where}: {_short(exc.message)}") from exc
        except RecursionError as exc:
            raise InvalidRequest("the json_schema is nested too deeply: give a flatter one") from exc

    def _compiled_schema(self, schema: dict[str, Any]) -> tuple[LLMatcher | None, str]:
        """The matcher of a schema, or why there is none."""
        try:
            matcher = LLMatcher(self._tokenizer, _of_schema(schema), log_level=0, limits=LIMITS)
        except ValueError as exc:  # it is nested more deeply than the library follows
            return None, _short(exc)
        return (None, _short(matcher.get_error())) if matcher.is_error() else (matcher, "")

    def _locate(self, schema: dict[str, Any], reason: str) -> tuple[str, str]:
        """Where in a schema the reason lies that it cannot be compiled: the innermost part that fails with the same."""
        where, part, characters = "$", schema, 0
        while True:
            for name, inner in _inner_schemas(part):
                characters += len(json.dumps(inner))
                if characters > MAX_LOCATING_CHARACTERS:
                    return where, reason
                if self._compiled_schema(inner)[1] == reason:
                    where, part = where + name, inner
                    break
            else:
                return where, reason

    def _checked(self, kind: GrammarKind, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the {kind} cannot be used: {_short(matcher.get_error())}")
        return matcher


def _lark_of(text: str) -> str:
    """A grammar in Lark's notation, given in this or in llama.cpp's (GBNF)."""
    try:
        return str(any_to_lark(text))
    except Exception as exc:  # the converter raises plain ones; all mean that the text is no grammar
        raise InvalidRequest(f"the grammar is wrong: {_short(exc) or type(exc).__name__}") from exc


def _of_schema(schema: dict[str, Any]) -> str:
    # As a text with its keys in the client's order: the answer's keys come in the same.
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)


def _inner_schemas(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects inside a schema that may be schemas themselves, with their paths: its values, and theirs."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield f".{name}", value
            yield from ((f".{name}.{key}", inner) for key, inner in value.items() if isinstance(inner, dict))
        elif isinstance(value, list):
            yield from ((f".{name}[{index}]", inner) for index, inner in enumerate(value) if isinstance(inner, dict))


def _foreign_reference(schema: dict[str, Any]) -> str | None:
    """A reference that leads out of the schema, if there is one."""
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                return reference
            part = list(part.values())
        if isinstance(part, list):
            pending += part
    return None


def _choice_rules(text: str) -> str:
    """One rule with all choices, of a JSON list of texts."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(f"the choice is not a JSON list of texts: {_short(exc)}") from exc
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        raise InvalidRequest(f"the choice has {len(choices)} texts: give 1 to {MAX_CHOICES}, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _short(reason: object) -> str:
    """A library's reason, in one line that is not too long."""
    return " ".join(str(reason).split())[:MAX_REASON_CHARACTERS]
