"""The work that a gateway has for encoders: what waits to be encoded, and how much comes each second.

Counted in patches, after caches and duplicates, from when an item is known to need an encoder until it is encoded or
given up, so that it is there with no encoder alive. Pure but for the clock; runs on the event loop.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OFFERED_WINDOW_S = 30.0


@dataclass
class _Arrival:
    """An item that came, with the patches that it gave to encode."""

    at: float
    key: str
    patches: int


class EncoderDemand:
    """Patches that are admitted and not encoded, each item once however many requests wait for it; and their rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._waiting: dict[str, tuple[int, int]] = {}  # key -> patches, requests
        self._arrivals: deque[_Arrival] = deque()  # of the window, oldest first
        self._latest: dict[str, _Arrival] = {}  # by key
        self._offered_patches = 0  # of all arrivals
        self.backlog_patches = 0

    @contextlib.contextmanager
    def admitted(self, key: str, num_patches: int) -> Iterator[None]:
        """An item that no cache has, from now until it is encoded or given up."""
        patches, requests = self._waiting.get(key, (num_patches, 0))
        self._waiting[key] = (patches, requests + 1)
        if not requests:
            self.backlog_patches += patches
            self._note_arrival(key, patches)
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
        if (arrival := self._latest.get(key)) is not None:
            self._offered_patches -= arrival.patches
            arrival.patches = 0

    def patches_per_s(self) -> float:
        """New work of the last half minute, each second."""
        now = self._clock()
        self._forget_before(now - OFFERED_WINDOW_S)
        return self._offered_patches / max(1.0, min(OFFERED_WINDOW_S, now - self._began_at))

    def _note_arrival(self, key: str, patches: int) -> None:
        arrival = _Arrival(self._clock(), key, patches)
        self._arrivals.append(arrival)
        self._latest[key] = arrival
        self._offered_patches += patches

    def _forget_before(self, time_s: float) -> None:
        while self._arrivals and self._arrivals[0].at < time_s:
            arrival = self._arrivals.popleft()
            self._offered_patches -= arrival.patches
            if self._latest.get(arrival.key) is arrival:
                del self._latest[arrival.key]
