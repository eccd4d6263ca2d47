"""How forwards run on a device: the order of a GPU's streams, and the memory that pixels and rows pass through."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.messages import Grid
from encoder_svc.model.vision import VisionTower
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.tower_device import (
    ALIGNMENT,
    CudaDevice,
    InlineDevice,
    StagingBuffer,
    device_of,
    packed_bytes,
    unpacked,
)
from tests.encoder_svc.embeddings import FINGERPRINT, key
from tests.encoder_svc.towers import tiny_tower
from tests.media_samples import DEMO_PROCESSOR

CPU = torch.device("cpu")


@dataclass
class FakeCuda:
    """Stands for `torch.cuda`: tensors stay on the CPU, and what is asked of streams and events is written down."""

    log: list[str] = field(default_factory=list)
    names: Iterator[str] = field(default_factory=lambda: iter(["upload", "download"]))
    current: list[str] = field(default_factory=lambda: ["compute"])
    num_events: int = 0

    def Stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, next(self.names))

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> "FakeEvent":
        assert blocking, "it would spin on a core"
        return self.new_event(enable_timing)

    def new_event(self, has_time: bool = False) -> "FakeEvent":
        self.num_events += 1
        return FakeEvent(self, self.num_events, has_time)

    def current_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, self.current[-1])

    @contextlib.contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.current.append(stream.name)
        yield
        self.current.pop()

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def synchronize(self, device: torch.device) -> None:
        self.log.append("all wait")


@dataclass
class FakeEvent:
    cuda: FakeCuda
    number: int
    has_time: bool
    stream: str = ""

    def record(self, stream: "FakeStream") -> None:
        self.stream = stream.name
        self.cuda.log.append(f"{stream.name} is at {self.number}")

    def synchronize(self) -> None:
        assert self.stream, "an event that was never recorded is no reason to wait"
        self.cuda.log.append(f"host waits for {self.number}")

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.has_time
        assert end.has_time
        return 250.0


@dataclass
class FakeStream:
    cuda: FakeCuda
    name: str

    def record_event(self) -> FakeEvent:
        event = self.cuda.new_event()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.number}")


def doubled(parts: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
    return torch.cat([part.float() * 2 for part in parts])


def cuda_device(forward: Any = doubled) -> tuple[CudaDevice, FakeCuda]:
    cuda = FakeCuda()
    return CudaDevice(forward, CPU, cuda=cuda), cuda


def pixels(*shapes: tuple[int, int], dtype: Any = np.uint8) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 100, shape).astype(dtype) for number, shape in enumerate(shapes)]


def test_a_forward_waits_for_its_pixels_its_rows_wait_for_it_and_the_host_for_neither() -> None:
    def forward(parts: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        cuda.log.append(f"{cuda.current[-1]} runs the tower")
        return doubled(parts, grids)

    device, cuda = cuda_device(forward)
    values = pixels((3, 4), (5, 4))
    launched = device.launch(values, [(1, 3, 1), (1, 5, 1)])
    assert cuda.log == [
        "upload is at 1",
        "compute waits for 1",
        "compute is at 2",
        "compute runs the tower",
        "compute is at 3",
        "download waits for 3",
        "download is at 4",
    ]
    cuda.log.clear()
    assert launched.computed() == 0.25
    rows, is_lent = launched.rows()
    assert cuda.log == ["host waits for 3", "host waits for 4"]
    assert is_lent
    np.testing.assert_array_equal(rows.numpy(), np.concatenate(values) * 2.0)
    launched.release()


def test_forwards_in_flight_share_no_memory_and_a_released_one_s_is_used_again() -> None:
    device, _ = cuda_device()
    values = pixels((64, 16))
    first, second = device.launch(values, [(1, 8, 8)]), device.launch(values, [(1, 8, 8)])
    places = [launched.rows()[0].data_ptr() for launched in (first, second)]
    assert places[0] != places[1]
    first.release()
    assert device.launch(pixels((8, 8)), [(1, 4, 2)]).rows()[0].data_ptr() == places[0]


def test_a_forward_that_cannot_be_launched_gives_its_memory_back_once_nothing_reads_it() -> None:
    errors = [torch.OutOfMemoryError("no memory"), None, None]

    def forward(parts: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        if (error := errors.pop(0)) is not None:
            raise error
        return doubled(parts, grids)

    device, cuda = cuda_device(forward)
    with pytest.raises(torch.OutOfMemoryError):
        device.launch(pixels((3, 4)), [(1, 3, 1)])
    assert cuda.log[-1] == "all wait"
    launched = [device.launch(pixels((3, 4)), [(1, 3, 1)]) for _ in range(device.max_in_flight)]
    assert device._slots.empty()
    for one in launched:
        one.release()
    assert device._slots.qsize() == device.max_in_flight


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 33), st.sampled_from(["uint8", "float32"])), min_size=1, max_size=5
    )
)
def test_pixels_of_any_form_lie_aligned_one_behind_the_other(shapes: list[tuple[int, int, str]]) -> None:
    arrays = [pixels((rows, columns), dtype=dtype)[0] for rows, columns, dtype in shapes]
    flat = torch.zeros(packed_bytes(arrays), dtype=torch.uint8)
    views = unpacked(flat, arrays)
    for view, array in zip(views, arrays, strict=True):
        assert (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0
        view.copy_(torch.from_numpy(array))
    for view, array in zip(views, arrays, strict=True):
        np.testing.assert_array_equal(view.numpy(), array)


def test_staging_memory_grows_to_the_largest_and_is_kept() -> None:
    buffer = StagingBuffer(is_page_locked=False)
    small = buffer.take(5)
    assert (len(small), buffer.num_bytes) == (5, 1 << 20)
    large = buffer.take((1 << 20) + 1)
    assert (len(large), buffer.num_bytes) == ((1 << 20) + 1, 1 << 21)
    assert buffer.take(7).data_ptr() == large.data_ptr()


def test_on_a_cpu_a_forward_is_over_when_it_was_launched() -> None:
    device = device_of(doubled, CPU)
    assert isinstance(device, InlineDevice)
    assert device.max_in_flight == 1
    values = pixels((3, 4))
    launched = device.launch(values, [(1, 3, 1)])
    rows, is_lent = launched.rows()
    assert (launched.computed() > 0, is_lent) == (True, False)
    np.testing.assert_array_equal(rows.numpy(), values[0] * 2.0)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    tower = tiny_tower()
    tower.patch_embed.fold(DEMO_PROCESSOR)
    return tower


def items_of(tower: VisionTower) -> list[list[TowerItem]]:
    """Batches of stills, videos and normalised floats, of several sizes."""
    rng = np.random.default_rng(3)
    batches: list[list[tuple[Grid, int]]] = [
        [((1, 4, 4), 768), ((2, 2, 8), 1536), ((1, 6, 4), 768)],
        [((1, 16, 16), 768)],
        [((4, 4, 4), 1536), ((1, 4, 4), 768)],
        [((1, 2, 2), 768)],
    ]
    items = [
        [
            TowerItem(key(10 * number + index), grid, rng.integers(0, 256, (int(np.prod(grid)), columns), np.uint8))
            for index, (grid, columns) in enumerate(batch)
        ]
        for number, batch in enumerate(batches)
    ]
    floats = rng.standard_normal((16, tower.patch_width)).astype(np.float32)
    return [*items, [TowerItem(key(99), (1, 4, 4), floats)]]


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "int8"])
async def test_what_is_staged_for_a_gpu_gives_the_bytes_that_a_cpu_gives(tower: VisionTower, wire_dtype: Any) -> None:
    """The code of `CudaDevice` over tensors of the CPU: what it stages and splits, and not how a GPU computes."""
    inline = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype=wire_dtype)
    staged = TowerRunner(
        tower,
        fingerprint=FINGERPRINT,
        wire_dtype=wire_dtype,
        device=CudaDevice(inline._forward, CPU, cuda=FakeCuda()),
    )
    for batch in items_of(tower):
        for expected, got in zip(await inline.run(batch), await staged.run(batch), strict=True):
            assert got.header == expected.header
            assert bytes(got.payload) == bytes(expected.payload)
    inline.close()
    staged.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
async def test_forwards_in_flight_on_a_gpu_give_what_a_cpu_gives(tower: VisionTower) -> None:
    batches = items_of(tower) * 4
    on_cpu = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32")
    on_gpu_tower = tiny_tower().to("cuda")
    on_gpu_tower.patch_embed.fold(DEMO_PROCESSOR)
    on_gpu = TowerRunner(on_gpu_tower, fingerprint=FINGERPRINT, wire_dtype="float32")
    room = asyncio.Semaphore(on_gpu.max_in_flight)

    async def run(batch: list[TowerItem]) -> list[Any]:
        async with room:
            return await on_gpu.run(batch)

    assert on_gpu.max_in_flight == 2
    for batch, together in zip(batches, await asyncio.gather(*map(run, batches)), strict=True):
        for expected, got in zip(await on_cpu.run(batch), together, strict=True):
            wanted, found = (np.frombuffer(held.payload, np.float32) for held in (expected, got))
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    on_cpu.close()
    on_gpu.close()
