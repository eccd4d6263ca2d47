"""What crosses between the host and the device in a step: inputs that nobody waits for, and one read of the results.

Owns the copies in both directions. On CUDA they go through pinned memory, since a copy from or to other memory waits;
on CPU nothing is copied. Used in the engine thread. Whatever else would bring a number to the host, `.item()`,
`.tolist()`, `nonzero` or a mask as an index, makes the host wait for the device and has no place in a step.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on the device, where it will be when what is launched later needs it; on CPU in the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def index_on(values: list[int], device: torch.device) -> Tensor:
    """Row numbers [n] int64 on the device."""
    return to_device(np.array(values, np.int64), device)


def all_to_device(arrays: Seq[NDArray[np.int32] | NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """As `to_device`, for arrays that go together in one copy, each to its shape and dtype."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = to_device(np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64), device)
    pieces = torch.split(flat, [array.size for array in arrays])
    return [
        piece.view(array.shape).to(torch.int32 if array.dtype == np.int32 else torch.int64)
        for piece, array in zip(pieces, arrays, strict=True)
    ]


class Readback:
    """The results of a step on their way to the host: parts are added, then all are copied at once.

    It is made when the step begins. `start` waits for nothing; `wait` does until the copy has arrived, but for no work
    that was launched later.
    """

    def __init__(self, device: torch.device) -> None:
        self._parts: list[Tensor] = []
        self._host: list[Tensor] = []
        self._began = _mark() if device.type == "cuda" else None
        self._arrived: torch.cuda.Event | None = None

    def add(self, part: Tensor) -> int:
        """Have a tensor of any shape and dtype copied; its number among the parts."""
        self._parts.append(part)
        return len(self._parts) - 1

    def start(self) -> None:
        """Begin the copy, as float64, which holds token ids and log probabilities alike."""
        if self._began is None:
            self._host = self._parts
            return
        if self._parts:
            flat = torch.cat([part.reshape(-1).double() for part in self._parts])
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            pieces = torch.split(host, [part.numel() for part in self._parts])
            self._host = [piece.view(part.shape) for piece, part in zip(pieces, self._parts, strict=True)]
        self._arrived = _mark()

    def wait(self) -> list[Tensor]:
        """All parts on the host, each in its shape; returns when the step has run, also without any.

        What was copied is float64.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host

    @property
    def device_s(self) -> float | None:
        """How long the device was at the step, once it was waited for; None where the host is the device."""
        if self._began is None or self._arrived is None:
            return None
        return float(self._began.elapsed_time(self._arrived)) / 1e3


def _mark() -> torch.cuda.Event:
    """A place in the order of what the device is given, with its time."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
