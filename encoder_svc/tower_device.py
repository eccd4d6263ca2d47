"""Where forwards run and how their rows come back: at once on a CPU, one behind the other on a GPU.

Owns what is asynchronous of a GPU: its streams and events, and the page-locked memory that pixels and rows pass
through, so that a copy runs beside the forward of another batch. Knows nothing of items or payloads. `launch` runs in
the compute thread; what it returns is for one other thread. Legend: `P` patches, `V` vision tokens.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.messages import Grid

ALIGNMENT = 16  # of each item's pixels among those of the batch, whatever their dtype
MIN_STAGING_BYTES = 1 << 20

Forward = Callable[[Sequence[Tensor], Sequence[Grid]], Tensor]
"""Each item's patches and grid -> rows [V, columns] in the form in which they travel, on the tower's device."""


class Launched(Protocol):
    """A forward that was begun. The methods are called in their order, `release` whatever the others raise."""

    def computed(self) -> float:
        """Wait until the device is through with it; how many seconds it took. Raises what went wrong there."""
        ...

    def rows(self) -> tuple[Tensor, bool]:
        """Wait until the rows are in host memory: [V, columns], and whether that memory is lent until `release`."""
        ...

    def release(self) -> None:
        """Its memory may serve another forward."""
        ...


class TowerDevice(Protocol):
    """What the tower runs on."""

    @property
    def max_in_flight(self) -> int:
        """Forwards that may be launched and not released."""
        ...

    def launch(self, pixel_values: Sequence[np.ndarray], grids: Sequence[Grid]) -> Launched:
        """Begin a forward behind those that were begun. Raises what keeps it from being begun, as full memory does."""
        ...


class InlineDevice:
    """Runs a forward within `launch`: a CPU, whose threads are busy with it anyway."""

    max_in_flight = 1

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def launch(self, pixel_values: Sequence[np.ndarray], grids: Sequence[Grid]) -> Launched:
        """See `TowerDevice`."""
        began = time.perf_counter()
        with torch.inference_mode():
            rows = self._forward([torch.from_numpy(values) for values in pixel_values], grids).cpu()
        return _Done(rows, time.perf_counter() - began)


class _Done:
    """A forward that has run."""

    def __init__(self, rows: Tensor, seconds: float) -> None:
        self._rows = rows
        self._seconds = seconds

    def computed(self) -> float:
        return self._seconds

    def rows(self) -> tuple[Tensor, bool]:
        return self._rows, False

    def release(self) -> None:
        pass


class StagingBuffer:
    """Host memory that one forward after another uses. It is as large as the largest needed, to a power of two."""

    def __init__(self, *, is_page_locked: bool) -> None:
        self._is_page_locked = is_page_locked
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._memory.nbytes

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8; what was taken before is given up."""
        if num_bytes > self._memory.nbytes:
            size = max(MIN_STAGING_BYTES, 1 << (num_bytes - 1).bit_length())
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go before there is a larger one
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_page_locked)
        return self._memory[:num_bytes]


def packed_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Bytes that arrays take one behind the other, each aligned."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)


def unpacked(flat: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of the places of arrays in `flat` [packed_bytes] uint8, on any device, in their shapes and dtypes."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array).dtype
        views.append(flat[start : start + array.nbytes].view(dtype).view(array.shape))
        start += packed_bytes([array])
    return views


class _Slot:
    """The page-locked memory of one forward in flight."""

    def __init__(self, *, is_page_locked: bool) -> None:
        self.pixels = StagingBuffer(is_page_locked=is_page_locked)
        self.rows = StagingBuffer(is_page_locked=is_page_locked)


class CudaDevice:
    """One GPU: a forward is launched while the one before it runs, and pixels and rows are copied beside both.

    Kernels run on the compute thread's stream. Pixels come on one side stream and rows go on another, since on one the
    pixels of a forward would wait for the rows of the one before. `cuda` is `torch.cuda`, or stands for it in a test.
    """

    max_in_flight = 2

    def __init__(self, forward: Forward, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._forward = forward
        self._device = device
        self._cuda = cuda
        self._upload, self._download = cuda.Stream(device), cuda.Stream(device)
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(self.max_in_flight):
            self._slots.put(_Slot(is_page_locked=device.type == "cuda"))

    def launch(self, pixel_values: Sequence[np.ndarray], grids: Sequence[Grid]) -> Launched:
        """See `TowerDevice`. Returns before the kernels have run."""
        slot = self._slots.get()
        try:
            with self._on_device(), torch.inference_mode():
                return self._launch(slot, pixel_values, grids)
        except BaseException:
            try:
                self._cuda.synchronize(self._device)  # a copy that was begun may still read the slot
            finally:
                self._slots.put(slot)
            raise

    def _on_device(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._cuda.device(self._device)
        return context

    def _launch(self, slot: _Slot, pixel_values: Sequence[np.ndarray], grids: Sequence[Grid]) -> Launched:
        compute = self._cuda.current_stream(self._device)
        staged = slot.pixels.take(packed_bytes(pixel_values))
        for view, values in zip(unpacked(staged, pixel_values), pixel_values, strict=True):
            view.copy_(torch.from_numpy(values))
        with self._cuda.stream(self._upload):
            pixels = staged.to(self._device, non_blocking=True)
            uploaded = self._upload.record_event()
        compute.wait_event(uploaded)
        began, ended = (self._cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        began.record(compute)
        rows = self._forward(unpacked(pixels, pixel_values), grids).contiguous()
        ended.record(compute)
        host_rows = slot.rows.take(rows.nbytes).view(rows.dtype).view(rows.shape)
        copied = self._cuda.Event(blocking=True)
        with self._cuda.stream(self._download):
            self._download.wait_event(ended)
            host_rows.copy_(rows, non_blocking=True)
            copied.record(self._download)
        # Until `release` nothing else may get the memory on the device that side streams read and write.
        return _Queued(began, ended, copied, host_rows, kept=(pixels, rows), on_release=lambda: self._slots.put(slot))


class _Queued:
    """A forward on a GPU. Its events wake the thread that waits for them; they do not spin."""

    def __init__(
        self,
        began: Any,
        ended: Any,
        copied: Any,
        host_rows: Tensor,
        *,
        kept: tuple[Tensor, ...],
        on_release: Callable[[], None],
    ) -> None:
        self._began, self._ended, self._copied = began, ended, copied
        self._host_rows = host_rows
        self._kept = kept
        self._on_release = on_release

    def computed(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000

    def rows(self) -> tuple[Tensor, bool]:
        self._copied.synchronize()
        return self._host_rows, True

    def release(self) -> None:
        self._kept = ()
        self._on_release()


def device_of(forward: Forward, device: torch.device) -> TowerDevice:
    """How forwards run on a torch device."""
    return CudaDevice(forward, device) if device.type == "cuda" else InlineDevice(forward)
