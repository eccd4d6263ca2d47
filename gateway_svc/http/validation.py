"""What is wrong with a body, from a failed validation: in words of ours, with the field named as OpenAI names it.

A message says what the field must be and, where that can be read, what it is. Nothing of the validator's own text
reaches a client. Pure.
"""

from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest, UnknownParameter
from gateway_svc.schemas.strict_model import REFUSED_FIELD

_SHOWN_CHARACTERS = 200  # of a name that a client made up
_SHOWN_VALUE = 40  # characters
# What a field must be, by the kind of error; filled in from the error's context.
_MUST: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must have the form {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} items",
    "too_short": "must not be empty",
    "union_tag_invalid": "must have a type that is one of {expected_tags}",
    "union_tag_not_found": "needs a type",
}


def validation_error(errors: Any, body: object) -> InvalidRequest:
    """The first error of a validation, with the field named as OpenAI's `param` names it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON, at character {first['loc'][-1]}")
    if first["type"] == REFUSED_FIELD:
        return _refused_field(first["loc"][1:], body, first["ctx"])
    is_in_url = first["loc"][0] in ("path", "query")
    path = str(first["loc"][1]) if is_in_url else field_path(first["loc"][1:], body)
    if not path:
        return InvalidRequest("the body must be a JSON object, sent with content-type application/json")
    limits = {name: _whole(value) for name, value in (first.get("ctx") or {}).items()}
    must = _MUST.get(first["type"], "is not valid").format_map(limits)
    return InvalidRequest(f"{path} {must}{_given(first)}", param=path)


def _refused_field(location: tuple[int | str, ...], body: object, context: Mapping[str, Any]) -> InvalidRequest:
    """In OpenAI's words where the field is not known at all: clients look for them."""
    path = field_path((*location, context["field"]), body)
    if "remedy" in context:
        return InvalidRequest(f"{path} is not supported: {context['remedy']}", param=path)
    hint = (
        f"Did you mean '{context['near']}'?" if context["near"] else "Leave it out, or see /docs for those there are."
    )
    return UnknownParameter(f"Unknown parameter: '{path[:_SHOWN_CHARACTERS]}'. {hint}", param=path)


def _whole(value: object) -> object:
    """A limit as it is written in the documentation: 100 and not 100.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _given(error: Mapping[str, Any]) -> str:
    """The refused value, where it is short enough to be read."""
    value = error["ctx"]["tag"] if error["type"] == "union_tag_invalid" else error.get("input")
    if not isinstance(value, bool | int | float | str) or value == "":
        return ""
    if isinstance(value, str) and len(value) > _SHOWN_VALUE:
        return ""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f", not {shown}" if len(shown) <= 2 * _SHOWN_VALUE else ""


def field_path(location: tuple[int | str, ...], body: object) -> str:
    """`messages[0].content[1].type` from a validation's location, which also names the branches of unions.

    A step that does not exist in the body is a branch's name, unless it is the last one: then a field is missing.
    """
    path = ""
    value = body
    for position, step in enumerate(location):
        if isinstance(step, int) and isinstance(value, list):
            path += f"[{step}]"
            value = value[step] if step < len(value) else None
        elif location[max(0, position - 2)] == "parts" and isinstance(location[position - 1], int):
            continue  # the branch of a content part
        elif isinstance(value, dict) and (step in value or position == len(location) - 1):
            path += f".{step}" if path else str(step)
            value = value.get(step)
    return path
