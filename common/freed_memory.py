"""How the C library treats memory that was freed: kept for the next use, not given back to the system at once.

A message of a megabyte is allocated for each chunk that arrives and freed soon afterwards. By default its pages go back
each time and come again one by one, cleared, which takes ZMQ's thread as long as half of the transfer itself. Called
once, when a process starts.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 64 << 20  # at the end of a heap, which of a thread's own heaps is all that there is
LARGEST_BYTES = 8 << 20  # what is larger is mapped by itself, as ever


def keep_freed_memory() -> bool:
    """Set both thresholds; false where the C library has no such setting, as musl's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
