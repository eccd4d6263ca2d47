"""Freed memory stays with a process that asked for it."""

import subprocess
import sys

SCRIPT = """
import ctypes, resource, sys
from common.freed_memory import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [ctypes.create_string_buffer(1 << 20) for _ in range(16)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults(2)
print(faults(10))
"""


def faults(mode: str) -> int:
    found = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, check=True, text=True)
    return int(found.stdout)


def test_memory_that_is_kept_comes_without_page_faults() -> None:
    given_back, kept = faults("as ever"), faults("kept")
    assert given_back > 10_000
    assert kept < given_back / 10
