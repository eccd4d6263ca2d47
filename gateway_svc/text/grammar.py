"""What an answer's text must look like, as the decoder takes it: from `response_format` and `structured_outputs`.

Owns the translation into a kind and a text, the check that a schema is one, and the joining of constraints with a
model's reasoning, which comes first and stays free. Joined constraints are Lark grammars in llguidance's dialect.
Whether a constraint can be followed is the decoder's word. Pure; schemas may be large, so call it in a thread.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from common.errors import InvalidRequest
from common.json_schema import META_SCHEMA, WHITESPACE_PATTERN
from common.messages import GrammarKind
from gateway_svc.schemas.plain_json import check_plain
from gateway_svc.schemas.sampling_fields import ResponseFormat, SamplingFields, StructuredOutputs

MAX_GRAMMAR_CHARACTERS = 1 << 20
# A rule of its own for anything: special tokens, such as the end of reasoning, never match it.
_ANYTHING = r"/(.|\n)*/"
_REGEX_PARTS = re.compile(r"\\.|/|\n", re.DOTALL)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Grammar:
    """A constraint. `param` is the request's field that asked for it."""

    kind: GrammarKind
    text: str | None
    param: str

    def __post_init__(self) -> None:
        if self.text is not None and len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{self.param} comes to {len(self.text)} characters of grammar, above the limit of "
                f"{MAX_GRAMMAR_CHARACTERS}: send a smaller one",
                param=self.param,
            )

    @property
    def rule(self) -> str:
        """The same as the body of a Lark rule."""
        text = self.text or ""
        if self.kind == "json_object":
            return inline_schema('{"type": "object"}')
        if self.kind == "json_schema":
            return inline_schema(text)
        if self.kind == "regex":
            return f"/{_REGEX_PARTS.sub(_escaped, text)}/"
        if self.kind == "choice":
            return " | ".join(json.dumps(choice) for choice in json.loads(text))
        return f"%lark {{\n{text}\n}}"


def inline_schema(text: str) -> str:
    """A JSON schema as the body of a Lark rule. White space is bounded: models may write it for ever where they can."""
    schema = json.loads(text)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE_PATTERN}}
    return f"%json {json.dumps(schema)}"


def lark(param: str, start: str, **rules: str) -> Grammar:
    """A Lark grammar of these rules."""
    lines = [f"start: {start}", *(f"{name}: {body}" for name, body in rules.items())]
    return Grammar("grammar", "\n".join(lines) + "\n", param)


def literal(text: str, added_tokens: frozenset[str]) -> str:
    """A text in a Lark rule: by its token's name where it is a token of its own, since grammars match those apart."""
    return text if text in added_tokens else json.dumps(text)


def after_reasoning(grammar: Grammar, end: str, added_tokens: frozenset[str]) -> Grammar:
    """The same constraint, for what follows the end of the reasoning."""
    return lark(
        grammar.param,
        f"thoughts {literal(end, added_tokens)} space answer",
        thoughts=_ANYTHING,
        space=r"/\s*/",
        answer=grammar.rule,
    )


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """The constraint that a request asks for by `response_format` or `structured_outputs`. Raises InvalidRequest."""
    by_format = _of_format(fields.response_format) if fields.response_format is not None else None
    if fields.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequest(
            "structured_outputs and response_format exclude each other: send only one", param="structured_outputs"
        )
    return _of_structured(fields.structured_outputs)


def schema_text(schema: Any, param: str) -> str:
    """A JSON schema as the decoder takes it. Raises InvalidRequest that says where it is none."""
    try:
        META_SCHEMA.validate(schema)
    except jsonschema_rs.ValidationError as exc:
        path = [str(step) for step in exc.instance_path]
        shown = json.dumps(exc.instance)[:_SHOWN_CHARACTERS]
        raise InvalidRequest(
            f"{param} is not a valid JSON schema: {shown} cannot stand at {'.'.join(path) or 'its top'}", param=param
        ) from exc
    return json.dumps(schema)


def _of_format(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object", None, "response_format")
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        raise InvalidRequest(
            'response_format of type "json_schema" needs the schema in response_format.json_schema.schema',
            param="response_format",
        )
    return Grammar("json_schema", schema_text(schema, "response_format"), "response_format")


def _of_structured(wanted: StructuredOutputs) -> Grammar | None:
    given = [name for name in ("json", "json_object", "regex", "choice", "grammar") if _is_given(wanted, name)]
    if len(given) > 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(given)}, which exclude each other: send only one",
            param="structured_outputs",
        )
    if not given:
        return None
    param = f"structured_outputs.{given[0]}"
    if wanted.json_ is not None:
        return Grammar("json_schema", schema_text(_parsed(wanted.json_, param), param), param)
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex, param)
    if wanted.choice is not None:
        return Grammar("choice", json.dumps(_distinct(wanted.choice, param)), param)
    if wanted.grammar is not None:
        return Grammar("grammar", wanted.grammar, param)
    return Grammar("json_object", None, param)


def _is_given(wanted: StructuredOutputs, name: str) -> bool:
    value = getattr(wanted, "json_" if name == "json" else name)
    return value is not None and value is not False


def _distinct(choices: Sequence[str], param: str) -> list[str]:
    if "" in choices:
        raise InvalidRequest(f"{param}[{choices.index('')}] is empty: each choice needs some text", param=param)
    return list(dict.fromkeys(choices))


def _parsed(schema: dict[str, Any] | str, param: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{param} is text that is not JSON: send the schema as an object", param=param) from exc
    check_plain(value, param)
    return value


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])
