"""Lists of cores, and what a process is pinned to."""

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from common.cores import keep_to_cores, parse_cores
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"), [("", []), ("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), (" 5 , 1-2,2", [1, 2, 5]), ("7-7", [7])]
)
def test_lists_and_ranges_are_read(text: str, expected: list[int]) -> None:
    assert sorted(parse_cores(text)) == expected


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1;2", "0x1", "1.5", "99999"])
def test_what_is_no_list_is_refused_by_its_part(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 0-3,8"):
        parse_cores(text)


def test_a_core_that_the_process_may_not_use_is_refused_with_those_that_it_may() -> None:
    with pytest.raises(ConfigError, match=r"may not use \[9999\], only"):
        keep_to_cores("9999")


def test_without_a_list_nothing_is_pinned() -> None:
    pinned: list[Iterable[int]] = []
    keep_to_cores("", lambda pid, cores: pinned.append(cores))
    assert not pinned


def test_a_process_and_its_children_keep_to_the_cores() -> None:
    core = max(os.sched_getaffinity(0))
    inner = "import os; print(sorted(os.sched_getaffinity(0)))"
    code = (
        f"from common.cores import keep_to_cores; import subprocess, sys; keep_to_cores('{core}'); "
        f"subprocess.run([sys.executable, '-c', '{inner}'], check=True)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == f"[{core}]"
