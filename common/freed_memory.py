"""How the C library treats memory that was freed: where it is kept for the next use, and for which.

Each function is called once, when a process starts.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
KEPT_BYTES = 64 << 20  # at the end of a heap, which of a thread's own heaps is all that there is
LARGEST_BYTES = 8 << 20  # what is larger is mapped by itself, as ever


def keep_freed_memory() -> bool:
    """Keep what is freed instead of giving it back; false where the C library has no such setting, as musl's.

    A message of a megabyte is allocated for each chunk that arrives and freed soon afterwards. By default its pages go
    back each time and come again one by one, cleared, which takes ZMQ's thread as long as half of the transfer itself.
    """
    return _set(M_MMAP_THRESHOLD, LARGEST_BYTES) and _set(M_TRIM_THRESHOLD, KEPT_BYTES)


def share_one_heap() -> bool:
    """Let all threads use one heap; false where the C library has no such setting.

    By default threads have heaps of their own. What a forward allocates in one thread and lets go in another leaves
    holes in each of them: an encoder then took twice as much memory beyond its weights, and another amount each time.
    """
    return _set(M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))
