"""What JSON from outside must be before anything else looks at it: valid Unicode, finite numbers, bounded nesting.

`json.loads` lets lone surrogates, NaN and any depth through, and each of them breaks something far from the door.
Pure.
"""

import math
import re
from collections.abc import Iterable

from common.errors import InvalidRequest

MAX_NESTING = 64
MAX_PENDING = 1_000_000  # objects and arrays seen and not yet looked into
_SURROGATE = re.compile("[\ud800-\udfff]")
_SLICE_CHARACTERS = 1 << 20


def check_plain(body: object, path: str = "") -> None:
    """Refuse lone surrogates, numbers that are not finite, and deep nesting, anywhere in a parsed JSON body.

    Iterative, so that no depth can exhaust the stack; places are only spelled out for objects, arrays and errors.
    """
    stack: list[tuple[str, object, int]] = [(path, body, 1)]
    while stack:
        place, value, depth = stack.pop()
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{place} is nested deeper than {MAX_NESTING} levels", param=place)
        for step, item in _items(place, value):
            if isinstance(item, dict | list):
                stack.append((_place(place, step), item, depth + 1))
            elif not _is_plain(item):
                raise _not_plain(_place(place, step), item)
        if len(stack) > MAX_PENDING:
            raise InvalidRequest(f"the body has more than {MAX_PENDING} objects and arrays", param=place)


def _items(place: str, value: object) -> Iterable[tuple[int | str, object]]:
    if isinstance(value, list):
        return enumerate(value)
    if isinstance(value, dict):
        for key in value:
            if not _is_plain(key):
                raise _not_plain(place or "the body", key)
        return value.items()
    return ()


def _place(path: str, step: int | str) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() or _surrogate_offset(value) is None
    return not isinstance(value, float) or math.isfinite(value)


def _surrogate_offset(text: str) -> int | None:
    """Where the first lone surrogate is. In slices, since no other thread runs during a search."""
    for start in range(0, len(text), _SLICE_CHARACTERS):
        if match := _SURROGATE.search(text, start, start + _SLICE_CHARACTERS):
            return match.start()
    return None


def _not_plain(place: str, value: object) -> InvalidRequest:
    if not isinstance(value, str):
        return InvalidRequest(f"{place} is not a finite number: JSON has no NaN or Infinity", param=place)
    offset = _surrogate_offset(value)
    return InvalidRequest(
        f"{place} has a lone surrogate (half a UTF-16 pair) at character {offset}: send valid Unicode", param=place
    )
