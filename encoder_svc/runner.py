"""The forward pass: prepared items in, embeddings with headers out.

Owns the tower, its compute thread, which alone launches forwards, and where a device runs beside them a second thread,
which waits for their results. Packs items into one varlen batch, splits the rows and turns them into payload bytes in
the wire dtype. Knows nothing of sockets, requests or caches.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.embedding import CHUNK_BYTES, checksum
from common.int8_rows import pack_rows, scales_of
from common.messages import EmbeddingHeader, Grid, WireDtype
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.rate import RateMeter
from common.tensors import DTYPES, check_finite, payload_of
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.model.vision import VisionTower
from encoder_svc.shared_regions import NEVER_SHARED, SharedRegions
from encoder_svc.tower_device import Launched, TowerDevice, device_of

FORWARD_SECONDS = Histogram(
    "tandem_encoder_forward_seconds", "Time of one tower forward on its device", buckets=SECONDS_BUCKETS
)
BATCH_ITEMS = Histogram("tandem_encoder_batch_items", "Items in one forward", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
ATTENTION = Gauge("tandem_encoder_attention", "1 for the attention kernel that the tower uses", ["backend"])
PATCHES = Counter("tandem_encoder_patches_total", "Patches that went through the tower")


@dataclass(frozen=True)
class TowerItem:
    """One item ready for the tower, or a slice of one: `pixel_values` is `[patches, columns]`, in any form of
    `PreparedMedia`."""

    key: str
    grid: Grid
    pixel_values: np.ndarray
    is_whole: bool = True


class TowerRunner:
    """Runs the tower, in the order in which it is asked. `device` is told by tests; else it follows from the tower."""

    def __init__(
        self,
        tower: VisionTower,
        *,
        fingerprint: str,
        wire_dtype: WireDtype,
        device: TowerDevice | None = None,
        regions: SharedRegions = NEVER_SHARED,
    ) -> None:
        self._tower = tower
        self._regions = regions
        self._fingerprint = fingerprint
        self._wire_dtype: WireDtype = wire_dtype
        self._device = device or device_of(self._forward, tower.device)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._results: ThreadPoolExecutor | None = None
        if self._device.max_in_flight > 1:
            self._results = ThreadPoolExecutor(1, thread_name_prefix="tower-results")
        ATTENTION.labels(tower.attention.name).set(1)
        self._rate = RateMeter()
        self.is_broken = False
        """Whether the device reported what no later forward in this process can get over, as a fault of a kernel is."""

    @property
    def patches_per_s(self) -> float:
        """The rate of warm, full batches; 0 before the first."""
        return self._rate.per_s

    @property
    def max_in_flight(self) -> int:
        """Runs that may be begun and not be over."""
        return self._device.max_in_flight

    async def run(
        self, items: Sequence[TowerItem], on_computed: Callable[[], None] = lambda: None
    ) -> list[HeldEmbedding]:
        """Embeddings of the items, in order. Raises ModelFailure for values that are not finite.

        `on_computed` is called, on the event loop, when the device could begin the next forward.
        """
        loop = asyncio.get_running_loop()

        def note_computed(seconds: float) -> None:
            self._record(items, seconds)
            on_computed()

        def on_device(seconds: float) -> None:
            loop.call_soon_threadsafe(note_computed, seconds)

        if self._results is None:  # a forward is over when it was launched
            return await loop.run_in_executor(self._compute, self._launch_and_finish, items, on_device)
        launched = await loop.run_in_executor(self._compute, self._launch, items)
        return await loop.run_in_executor(self._results, self._finish, items, launched, on_device)

    def close(self) -> None:
        """Let the threads end after the forwards that run."""
        for thread in (self._compute, self._results):
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)

    def _record(self, items: Sequence[TowerItem], seconds: float) -> None:
        patches = sum(item.pixel_values.shape[0] for item in items)
        FORWARD_SECONDS.observe(seconds)
        BATCH_ITEMS.observe(len(items))
        PATCHES.inc(patches)
        self._rate.add(patches, seconds)

    def _launch_and_finish(self, items: Sequence[TowerItem], on_device: Callable[[float], None]) -> list[HeldEmbedding]:
        return self._finish(items, self._launch(items), on_device)

    def _launch(self, items: Sequence[TowerItem]) -> Launched:
        with self._faults_noted():
            return self._device.launch([item.pixel_values for item in items], [item.grid for item in items])

    def _finish(
        self, items: Sequence[TowerItem], launched: Launched, on_device: Callable[[float], None]
    ) -> list[HeldEmbedding]:
        try:
            with self._faults_noted():
                on_device(launched.computed())
                packed, is_lent = launched.rows()
            merge = self._tower.config.spatial_merge_size**2
            parts = torch.split(packed, [item.pixel_values.shape[0] // merge for item in items])
            # Each item gets memory of its own, so that freeing one does not wait for the others of its batch.
            is_lent = is_lent or len(items) > 1
            return [self._held(item, part, is_lent=is_lent) for item, part in zip(items, parts, strict=True)]
        finally:
            launched.release()

    @contextlib.contextmanager
    def _faults_noted(self) -> Iterator[None]:
        try:
            yield
        except torch.AcceleratorError:  # too little memory is another error
            self.is_broken = True
            raise

    def _forward(self, pixel_values: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """`[V, width]` in the wire dtype, or packed rows for int8, on the tower's device."""
        embeddings: Tensor = self._tower(pixel_values, grids)
        if self._wire_dtype == "int8":
            return pack_rows(embeddings, self._tower.num_levels)
        return embeddings.to(DTYPES[self._wire_dtype])

    def _held(self, item: TowerItem, embedding: Tensor, *, is_lent: bool) -> HeldEmbedding:
        # A value that is not finite shows in its scale.
        values = scales_of(embedding, self._tower.num_levels) if self._wire_dtype == "int8" else embedding
        check_finite(values, f"the embedding of a {item.grid} grid")
        region = self._regions.take(embedding.nbytes) if item.is_whole else None
        if region is not None:
            region.write(0, payload_of(embedding))
            payload = region.seal()
        else:
            payload = payload_of(embedding.clone() if is_lent else embedding).toreadonly()
        header = EmbeddingHeader(
            key=item.key,
            grid=item.grid,
            dtype=self._wire_dtype,
            rows=embedding.shape[0],
            width=self._tower.out_width,
            levels=self._tower.num_levels,
            fingerprint=self._fingerprint,
            checksum=checksum(payload),
            chunk_bytes=CHUNK_BYTES,
        )
        return HeldEmbedding(header, payload, region)
