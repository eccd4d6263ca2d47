"""Bytes of media that a gateway holds for its requests: counted as they arrive, given back when nobody needs them.

A holder travels with the bytes, and its end is the end of the count: whoever keeps the bytes keeps the holder, and no
way out of a request can forget to give them back. Runs on the event loop; only the end of a holder may come in any
thread, whenever memory is freed.
"""

import weakref
from collections import deque

from common.errors import Overloaded
from common.metrics import Gauge

HELD = Gauge("tandem_gateway_media_bytes", "Bytes of fetched media that running requests hold")
RETRY_AFTER_S = 5.0


class Holder:
    """The bytes of one item. Made by `ByteBudget.hold`."""

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self._count = [0]
        weakref.finalize(self, budget.give_back, self._count).atexit = False

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises Overloaded when there is no room for them."""
        self._budget.take(num_bytes)
        self._count[0] += num_bytes


class ByteBudget:
    """All bytes of one gateway."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_taken = 0
        self._given_back: deque[list[int]] = deque()  # an append is atomic, where a subtraction is not

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        while self._given_back:
            self._num_taken -= self._given_back.popleft()[0]
        return self._num_taken

    def hold(self) -> Holder:
        """A holder with nothing in it yet."""
        return Holder(self)

    def take(self, num_bytes: int) -> None:
        """Count bytes in."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the media of all requests together would exceed {self._max_bytes} bytes: try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_taken += num_bytes
        HELD.set(self.num_bytes)

    def give_back(self, count: list[int]) -> None:
        """Count bytes out, with the next look."""
        self._given_back.append(count)
