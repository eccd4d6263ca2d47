"""The cores that a process keeps to: read from a setting, and set before any thread of its kernels exists.

Pure but for the one call to the system.
"""

import os
import re
from collections.abc import Callable, Iterable

from common.errors import ConfigError

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cores(text: str) -> frozenset[int]:
    """Core numbers of a list such as `0-3,8`; none of an empty one. Raises ConfigError."""
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(
                f"--cores {text!r} is not a list of cores and ranges of them, such as 0-3,8: see {part!r}"
            )
        cores |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(cores)


def keep_to_cores(text: str, pin: Callable[[int, Iterable[int]], None] = os.sched_setaffinity) -> None:
    """Pin this process, and all threads and children that it will have, to the cores of a list, if it names any.

    Raises ConfigError for cores that this process may not use.
    """
    cores = parse_cores(text)
    allowed = os.sched_getaffinity(0)
    if missing := cores - allowed:
        raise ConfigError(f"--cores {text!r}: this process may not use {sorted(missing)}, only {sorted(allowed)}")
    if cores:
        pin(0, cores)
