"""How fast this encoder is: patches a second, as its full batches show it.

The first forward warms kernels and caches up, and a small batch is mostly overhead: either would make the encoder look
slow, and a fleet that scales by it too large. Pure; used in the event loop.
"""

LEAST_PART = 0.5  # of the largest batch that was seen: below that a batch is small
FORGET = 0.99  # the largest batch shrinks so much with each smaller one, so that small ones count in the end
WEIGHT = 0.2  # of the newest


class RateMeter:
    """A mean over batches that moves along."""

    def __init__(self) -> None:
        self.patches_per_s = 0.0
        """0 before the first batch."""
        self._num_batches = 0
        self._largest = 0.0

    def add(self, num_patches: int, seconds: float) -> None:
        """One forward of so many patches took so long."""
        rate = num_patches / max(seconds, 1e-6)
        self._num_batches += 1
        is_small = num_patches < LEAST_PART * self._largest
        is_first_full = num_patches * LEAST_PART > self._largest  # twice as large as any: the others tell little
        self._largest = max(float(num_patches), self._largest * FORGET)
        if self._num_batches <= 2 or is_first_full:
            self.patches_per_s = rate  # the second replaces the first, which was cold
        elif not is_small:
            self.patches_per_s = (1 - WEIGHT) * self.patches_per_s + WEIGHT * rate
