"""Memory that embeddings are received in, used again: fresh pages cost as much as the transfer that fills them.

A payload goes back by itself when the last view or tensor over it is gone, in whichever thread that happens.
What lies idle is bounded. Owned by the process that receives; knows nothing of what is received.
"""

import mmap
import threading
import weakref
from collections import deque

import numpy as np

from common.embedding import HUGE_BYTES, Payload, map_huge, new_payload
from common.metrics import Gauge

POOL_BYTES = Gauge(
    "tandem_decoder_payload_pool_bytes",
    "Memory for large embeddings to arrive in: used by those that are there or coming, and idle for the next ones",
    ["state"],
)

HUGE_PAGE_BYTES = 2 << 20
MAX_IDLE_BYTES = 128 << 20
MAX_UNUSED_SHARE = 0.25  # of a mapping's bytes, when a smaller payload gets it


class PayloadPool:
    """Mappings for large payloads. Safe to use from several threads."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: deque[mmap.mmap] = deque()  # the one that has been idle for the longest first
        self._lock = threading.RLock()  # a payload may come back while the same thread takes another
        self._used_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait for the next payload."""
        with self._lock:
            return sum(map(len, self._idle))

    @property
    def used_bytes(self) -> int:
        """Bytes of the mappings that payloads are in."""
        with self._lock:
            return self._used_bytes

    def report(self) -> None:
        """Show these bytes as metrics, counted when they are asked for. For the one pool of a process."""
        POOL_BYTES.labels("used").set_function(lambda: self.used_bytes)
        POOL_BYTES.labels("idle").set_function(lambda: self.idle_bytes)

    def take(self, num_bytes: int) -> Payload:
        """Memory for a payload of so many bytes; what it holds is arbitrary."""
        if num_bytes < HUGE_BYTES:
            return new_payload(num_bytes)
        mapped = self._take_idle(num_bytes)
        if mapped is None:
            mapped = map_huge(-(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        # All views and tensors over this array keep it alive. The mapping itself would not tell of its last use.
        array = np.frombuffer(mapped, np.uint8, num_bytes)
        with self._lock:
            self._used_bytes += len(mapped)
        weakref.finalize(array, self._give_back, mapped).atexit = False
        return array.data

    def _take_idle(self, num_bytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [
                mapped for mapped in self._idle if 0 <= len(mapped) - num_bytes <= MAX_UNUSED_SHARE * len(mapped)
            ]
            if fitting:
                smallest = min(fitting, key=len)
                self._idle.remove(smallest)
                return smallest
            while self._idle and self.idle_bytes + num_bytes > self._max_idle_bytes:
                self._idle.popleft()  # sizes that are wanted no more make room for this one, once it comes back
            return None

    def _give_back(self, mapped: mmap.mmap) -> None:
        with self._lock:
            self._used_bytes -= len(mapped)
            if self.idle_bytes + len(mapped) <= self._max_idle_bytes:
                self._idle.append(mapped)
