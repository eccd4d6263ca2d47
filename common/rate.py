"""How fast a service is, as its full batches show it: an encoder by patches, a decoder by tokens of prompts.

The first batch warms kernels and caches up, and a small one is mostly overhead: either would make the service look
slow, and a fleet that scales by it too large. Pure; a meter has one owner, who adds to it in one thread.
"""

LEAST_PART = 0.5  # of the largest batch that was seen: below that a batch is small
FORGET = 0.99  # the largest batch shrinks so much with each smaller one, so that small ones count in the end
WEIGHT = 0.2  # of the newest
LONGEST_S = 3600.0  # no queue is told to be longer, however slow a first batch was


class RateMeter:
    """A mean over batches that moves along."""

    def __init__(self) -> None:
        self.per_s = 0.0
        """0 before the first batch."""
        self._num_batches = 0
        self._largest = 0.0

    def add(self, amount: int, seconds: float) -> None:
        """A batch of so much took so long."""
        rate = amount / max(seconds, 1e-6)
        self._num_batches += 1
        is_small = amount < LEAST_PART * self._largest
        is_first_full = amount * LEAST_PART > self._largest  # twice as large as any: the others tell little
        self._largest = max(float(amount), self._largest * FORGET)
        if self._num_batches <= 2 or is_first_full:
            self.per_s = rate  # the second replaces the first, which was cold
        elif not is_small:
            self.per_s = (1 - WEIGHT) * self.per_s + WEIGHT * rate


def seconds_for(amount: float, per_s: float) -> float:
    """How long so much takes at a rate: 0 while the rate is not known, and an hour at most."""
    return min(LONGEST_S, amount / per_s) if per_s else 0.0
