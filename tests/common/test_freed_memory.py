"""Freed memory stays with a process that asked for it."""

import subprocess
import sys
from pathlib import Path

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


HEAPS = """
import ctypes, sys, threading
from common.freed_memory import share_one_heap

if sys.argv[1] == "one":
    assert share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fopen.restype = ctypes.c_void_p
everybody = threading.Barrier(4)

def allocate():
    everybody.wait()
    for _ in range(1000):
        libc.malloc(5000)
    everybody.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[2]).read().count("<heap nr="))
"""


def heaps(mode: str, path: Path) -> int:
    command = [sys.executable, "-c", HEAPS, mode, str(path)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_threads_share_a_heap_where_a_process_asks_for_it(tmp_path: Path) -> None:
    assert heaps("as ever", tmp_path / "info") > 1
    assert heaps("one", tmp_path / "info") == 1
