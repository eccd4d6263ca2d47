"""Bytes of media that a gateway holds for its requests: counted as they arrive, given back when nobody needs them.

A holder travels with the bytes, and its end is the end of the count: whoever keeps the bytes keeps the holder, and no
way out of a request can forget to give them back. Knows how many lie in files, and nothing of the files. Runs on the
event loop; only the end of a holder may come in any thread, whenever memory is freed.
"""

import weakref
from collections import deque
from dataclasses import dataclass

from common.errors import Overloaded
from common.metrics import Gauge

HELD = Gauge("tandem_gateway_media_bytes", "Bytes of media that running requests hold, in memory and in files")
ON_DISK = Gauge("tandem_gateway_media_disk_bytes", "Bytes of media that running requests hold in files")
RETRY_AFTER_S = 5.0


@dataclass
class _Count:
    num_bytes: int = 0
    num_on_disk: int = 0


class Holder:
    """The bytes of one item. Made by `ByteBudget.hold`."""

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self._count = _Count()
        weakref.finalize(self, budget.give_back, self._count).atexit = False

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises Overloaded when there is no room for them."""
        self._budget.take(num_bytes)
        self._count.num_bytes += num_bytes

    def move_to_disk(self) -> None:
        """All of them lie in a file from now on."""
        self._budget.move_to_disk(self._count.num_bytes - self._count.num_on_disk)
        self._count.num_on_disk = self._count.num_bytes


class ByteBudget:
    """All bytes of one gateway."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_taken = 0
        self._num_on_disk = 0
        self._given_back: deque[_Count] = deque()  # an append is atomic, where a subtraction is not

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        self._settle()
        return self._num_taken

    @property
    def num_memory_bytes(self) -> int:
        """Those of them that are in memory."""
        self._settle()
        return self._num_taken - self._num_on_disk

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
        self._tell()

    def move_to_disk(self, num_bytes: int) -> None:
        """Count bytes as lying in a file."""
        self._num_on_disk += num_bytes
        self._tell()

    def give_back(self, count: _Count) -> None:
        """Count bytes out, with the next look."""
        self._given_back.append(count)

    def _settle(self) -> None:
        while self._given_back:
            count = self._given_back.popleft()
            self._num_taken -= count.num_bytes
            self._num_on_disk -= count.num_on_disk

    def _tell(self) -> None:
        HELD.set(self.num_bytes)
        ON_DISK.set(self._num_on_disk)
