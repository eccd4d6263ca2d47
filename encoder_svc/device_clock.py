"""What is under way on the tower's device: since when nothing of it has gone on, and how long the device has worked.

Owns the account of forwards from their launch to the arrival of their rows; several may be under way, of which the
device computes one at a time. Pure: `now` is an argument.
"""

from dataclasses import dataclass


@dataclass(eq=False)
class ForwardUnderWay:
    """A forward that was begun."""

    patches: int
    is_computed: bool = False


class DeviceClock:
    """The forwards of one tower, in the order in which they were begun."""

    def __init__(self) -> None:
        self._under_way: list[ForwardUnderWay] = []
        self._went_on_at = 0.0
        self._busy_since: float | None = None
        self._busy_s = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether a forward was begun that the device is not through with."""
        return any(not forward.is_computed for forward in self._under_way)

    @property
    def largest_patches(self) -> int:
        """Patches of the largest forward under way; 0 without one."""
        return max((forward.patches for forward in self._under_way), default=0)

    def begin(self, patches: int, now: float) -> ForwardUnderWay:
        """A forward is launched."""
        if not self._under_way:
            self._went_on_at = now
        if self._busy_since is None:
            self._busy_since = now
        forward = ForwardUnderWay(patches)
        self._under_way.append(forward)
        return forward

    def computed(self, forward: ForwardUnderWay, now: float) -> float:
        """The device is through with it, or it has failed; the seconds that the device worked. Once for each."""
        if forward.is_computed:
            return 0.0
        assert self._busy_since is not None
        forward.is_computed = True
        seconds = now - self._busy_since
        self._busy_s += seconds
        self._busy_since = now if self.is_computing else None
        self._went_on_at = now
        return seconds

    def end(self, forward: ForwardUnderWay, now: float) -> None:
        """Its rows have arrived, or it has failed; it must have been computed."""
        assert forward.is_computed
        self._under_way.remove(forward)
        self._went_on_at = now

    def busy_s_at(self, now: float) -> float:
        """Seconds that the device has worked since the start, those of the forward that runs included."""
        return self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0)

    def silent_s_at(self, now: float) -> float:
        """Seconds since something that is under way last went on; 0 when nothing is."""
        return now - self._went_on_at if self._under_way else 0.0
