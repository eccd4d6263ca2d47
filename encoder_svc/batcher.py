"""Which prepared items go into the next forward: in arrival order, bounded by patches and by items together.

A video of more patches than one slice may have is cut between frames (frames are attention segments of their own), and
what else waits runs between its slices, so no image waits for more than one of them. Pure: knows no torch, sockets or
clock. What cannot be cut and exceeds the patch limit runs alone, so nothing waits for ever.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Piece(Generic[T]):
    """The frames `[first, first + num_frames)` of an item: all of them, but for an item that was cut."""

    item: T
    first: int
    num_frames: int


@dataclass
class _Waiting(Generic[T]):
    item: T
    num_frames: int
    patches_per_frame: int
    taken: int = 0

    @property
    def num_patches(self) -> int:
        return (self.num_frames - self.taken) * self.patches_per_frame


class Batcher(Generic[T]):
    """A queue that is taken in batches. What `is_wanted` denies meanwhile is dropped instead of taken.

    `max_slice_patches` may change as the tower's rate does: it is asked for each item and each slice.
    """

    def __init__(
        self,
        max_patches: int,
        max_items: int,
        *,
        max_slice_patches: Callable[[], float] = lambda: math.inf,
        is_wanted: Callable[[T], bool] = lambda item: True,
    ) -> None:
        self._max_patches = max_patches
        self._max_items = max_items
        self._max_slice_patches = max_slice_patches
        self._is_wanted = is_wanted
        self._whole: deque[_Waiting[T]] = deque()
        self._long: deque[_Waiting[T]] = deque()
        self._is_turn_of_long = False

    def __len__(self) -> int:
        return len(self._whole) + len(self._long)

    @property
    def waiting_patches(self) -> int:
        """Patches that were added and not taken."""
        return sum(waiting.num_patches for waiting in (*self._whole, *self._long))

    @property
    def is_full(self) -> bool:
        """Whether waiting longer could not make the next batch larger."""
        return self._is_slice_next or self.has_full_batch

    @property
    def has_full_batch(self) -> bool:
        """Whether the next batch is of whole items, and what comes later could neither join it nor be before it."""
        if self._is_slice_next:
            return False
        patches = sum(waiting.num_patches for waiting in self._whole)
        return len(self._whole) >= self._max_items or patches >= self._max_patches

    @property
    def _is_slice_next(self) -> bool:
        return bool(self._long) and (self._is_turn_of_long or not self._whole)

    @property
    def _slice_patches(self) -> int:
        return int(min(self._max_patches, self._max_slice_patches()))

    def add(self, item: T, num_patches: int, num_frames: int = 1) -> None:
        """Queue an item, whose patches are of `num_frames` equal frames that may run apart."""
        waiting = _Waiting(item, num_frames, num_patches // num_frames)
        is_long = num_frames > 1 and num_patches > self._slice_patches
        (self._long if is_long else self._whole).append(waiting)

    def next_batch(self) -> list[Piece[T]]:
        """Take the next pieces, at least one; empty when nothing waits.

        A slice of a long item runs alone and takes turns with batches of the others.
        """
        self.drop_unwanted()
        is_long = self._is_slice_next
        self._is_turn_of_long = not is_long
        return [self._next_slice()] if is_long else self._next_whole()

    def _next_slice(self) -> Piece[T]:
        head = self._long[0]
        count = max(1, self._slice_patches // head.patches_per_frame)
        piece = Piece(head.item, head.taken, min(count, head.num_frames - head.taken))
        head.taken += piece.num_frames
        if head.taken == head.num_frames:
            self._long.popleft()
        return piece

    def _next_whole(self) -> list[Piece[T]]:
        batch: list[Piece[T]] = []
        patches = 0
        while self._whole and len(batch) < self._max_items:
            head = self._whole[0]
            if batch and patches + head.num_patches > self._max_patches:
                break
            self._whole.popleft()
            batch.append(Piece(head.item, 0, head.num_frames))
            patches += head.num_patches
        return batch

    def drop_unwanted(self) -> None:
        """Forget what is not wanted any more, and the memory that it holds."""
        for queue in (self._whole, self._long):
            if not all(self._is_wanted(waiting.item) for waiting in queue):
                wanted = [waiting for waiting in queue if self._is_wanted(waiting.item)]
                queue.clear()
                queue.extend(wanted)
