"""The work that a gateway has for encoders: what waits to be encoded, and how much comes each second.

Counted in patches, after caches and duplicates, from when an item is known to need an encoder until it is encoded or
given up, so that it is there with no encoder alive. Pure but for the clock; runs on the event loop.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

OFFERED_WINDOW_S = 30.0


class EncoderDemand:
    """Patches that are admitted and not encoded, each item once however many requests wait for it; and their rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._waiting: dict[str, tuple[int, int]] = {}  # key -> patches, requests
        self._admitted: deque[tuple[float, str, int]] = deque()  # oldest first
        self.backlog_patches = 0

    @contextlib.contextmanager
    def admitted(self, key: str, num_patches: int) -> Iterator[None]:
        """An item that no cache has, from now until it is encoded or given up."""
        patches, requests = self._waiting.get(key, (num_patches, 0))
        self._waiting[key] = (patches, requests + 1)
        if not requests:
            self.backlog_patches += patches
            self._admitted.append((self._clock(), key, patches))
        try:
            yield
        finally:
            patches, requests = self._waiting.pop(key)
            if requests > 1:
                self._waiting[key] = (patches, requests - 1)
            else:
                self.backlog_patches -= patches

    def discount(self, key: str) -> None:
        """An item was held somewhere after all: it was no work."""
        for index, (at, admitted, _) in enumerate(self._admitted):
            if admitted == key:
                self._admitted[index] = (at, key, 0)

    def patches_per_s(self) -> float:
        """New work of the last half minute, each second."""
        now = self._clock()
        while self._admitted and self._admitted[0][0] < now - OFFERED_WINDOW_S:
            self._admitted.popleft()
        window_s = max(1.0, min(OFFERED_WINDOW_S, now - self._began_at))
        return sum(patches for _, _, patches in self._admitted) / window_s
