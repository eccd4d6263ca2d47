"""Which prepared items go into the next forward: in arrival order, bounded by patches and by items together.

Pure: knows no torch, sockets or clock. An item larger than the patch budget runs alone, so nothing waits for ever.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sized(Generic[T]):
    """An item and its size in patches."""

    item: T
    num_patches: int


class Batcher(Generic[T]):
    """A queue that is taken in batches."""

    def __init__(self, max_patches: int, max_items: int) -> None:
        self._max_patches = max_patches
        self._max_items = max_items
        self._waiting: deque[Sized[T]] = deque()
        self.waiting_patches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, num_patches: int) -> None:
        """Queue an item."""
        self._waiting.append(Sized(item, num_patches))
        self.waiting_patches += num_patches

    def next_batch(self) -> list[T]:
        """Take as many of the oldest items as fit both limits, at least one; empty when nothing waits."""
        batch: list[T] = []
        patches = 0
        while self._waiting and len(batch) < self._max_items:
            head = self._waiting[0]
            if batch and patches + head.num_patches > self._max_patches:
                break
            self._waiting.popleft()
            batch.append(head.item)
            patches += head.num_patches
        self.waiting_patches -= patches
        return batch
