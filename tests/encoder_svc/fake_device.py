"""A device that runs beside the host as a GPU does, one step at a time, as the test lets it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.messages import Grid
from encoder_svc.tower_device import Forward

PATIENCE_S = 2.0


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "the test let this step wait for ever"


@dataclass
class FakeLaunched:
    """A forward whose computing and whose copy each wait to be let."""

    number: int
    result: Tensor
    lent: Tensor
    log: list[str]
    may_compute: threading.Event = field(default_factory=threading.Event)
    may_copy: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    is_released: bool = False

    def computed(self) -> float:
        _wait(self.may_compute)
        self.log.append(f"computed {self.number}")
        if self.error is not None:
            raise self.error
        return 0.5

    def rows(self) -> tuple[Tensor, bool]:
        _wait(self.may_copy)
        self.log.append(f"copied {self.number}")
        return self.lent.view(self.result.shape).copy_(self.result), True

    def release(self) -> None:
        self.lent.fill_(torch.nan)  # what is still read from it would show
        self.log.append(f"released {self.number}")
        self.is_released = True

    def let_go(self) -> None:
        """Compute and copy."""
        self.may_compute.set()
        self.may_copy.set()


@dataclass
class FakeDevice:
    """Launches forwards of a real tower. `refuses` says what keeps one from being launched; `breaks` what ends it."""

    forward: Forward
    is_open: bool = False
    max_in_flight: int = 2
    refuses: Callable[[Sequence[np.ndarray]], Exception | None] = lambda pixel_values: None
    breaks: Callable[[Sequence[np.ndarray]], Exception | None] = lambda pixel_values: None
    launched: list[FakeLaunched] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def launch(self, pixel_values: Sequence[np.ndarray], grids: Sequence[Grid]) -> FakeLaunched:
        assert self.num_in_flight < self.max_in_flight, "more is in flight than there is memory for"
        if (error := self.refuses(pixel_values)) is not None:
            raise error
        with torch.inference_mode():
            result = self.forward([torch.from_numpy(values) for values in pixel_values], grids)
        number = len(self.launched)
        launched = FakeLaunched(number, result, torch.empty(result.numel()), self.log)
        launched.error = self.breaks(pixel_values)
        if self.is_open:
            launched.let_go()
        self.log.append(f"launched {number}")
        self.launched.append(launched)
        return launched

    @property
    def num_in_flight(self) -> int:
        """Forwards launched and not released."""
        return sum(not launched.is_released for launched in self.launched)
