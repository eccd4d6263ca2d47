"""The forward pass: prepared items in, embeddings with headers out. The one thread that touches the device.

Owns the tower and its compute thread; packs items into one varlen batch, splits the result and turns it into payload
bytes in the wire dtype. Knows nothing of sockets, requests or caches.
"""

import asyncio
import time
from collections.abc import Sequence
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

FORWARD_SECONDS = Histogram("tandem_encoder_forward_seconds", "Time of one tower forward", buckets=SECONDS_BUCKETS)
BATCH_ITEMS = Histogram("tandem_encoder_batch_items", "Items in one forward", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
ATTENTION = Gauge("tandem_encoder_attention", "1 for the attention kernel that the tower uses", ["backend"])
PATCHES = Counter("tandem_encoder_patches_total", "Patches that went through the tower")


@dataclass(frozen=True)
class TowerItem:
    """One item ready for the tower: `pixel_values` is `[patches, columns]`, in any form of `PreparedMedia`."""

    key: str
    grid: Grid
    pixel_values: np.ndarray


class TowerRunner:
    """Runs the tower in its own thread."""

    def __init__(self, tower: VisionTower, *, fingerprint: str, wire_dtype: WireDtype) -> None:
        self._tower = tower
        self._fingerprint = fingerprint
        self._wire_dtype: WireDtype = wire_dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        ATTENTION.labels(tower.attention.name).set(1)
        self._rate = RateMeter()
        self.started_at: float | None = None  # when the forward that runs now began, for the liveness probe

    @property
    def patches_per_s(self) -> float:
        """The rate of warm, full batches; 0 before the first."""
        return self._rate.per_s

    async def run(self, items: Sequence[TowerItem]) -> list[HeldEmbedding]:
        """Embeddings of the items, in order. Raises ModelFailure for values that are not finite."""
        self.started_at = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._forward, items)
        finally:
            self._record(items, time.monotonic() - self.started_at)
            self.started_at = None

    def close(self) -> None:
        """Let the thread end after the forward that runs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _record(self, items: Sequence[TowerItem], seconds: float) -> None:
        patches = sum(item.pixel_values.shape[0] for item in items)
        FORWARD_SECONDS.observe(seconds)
        BATCH_ITEMS.observe(len(items))
        PATCHES.inc(patches)
        self._rate.add(patches, seconds)

    def _forward(self, items: Sequence[TowerItem]) -> list[HeldEmbedding]:
        pixel_values = [torch.from_numpy(item.pixel_values) for item in items]
        with torch.inference_mode():
            packed = self._on_the_wire(self._tower(pixel_values, [item.grid for item in items]))
        merge = self._tower.config.spatial_merge_size**2
        rows = [item.pixel_values.shape[0] // merge for item in items]
        # Each item gets memory of its own, so that freeing one does not wait for the others of its batch.
        parts = torch.split(packed, rows) if len(items) > 1 else (packed,)
        return [
            self._held(item, part.clone() if len(items) > 1 else part) for item, part in zip(items, parts, strict=True)
        ]

    def _on_the_wire(self, embeddings: Tensor) -> Tensor:
        """`[V, width]` in the wire dtype, or packed rows for int8, on the CPU."""
        if self._wire_dtype == "int8":
            return pack_rows(embeddings, self._tower.num_levels).cpu()
        return embeddings.to(device="cpu", dtype=DTYPES[self._wire_dtype])

    def _held(self, item: TowerItem, embedding: Tensor) -> HeldEmbedding:
        # A value that is not finite shows in its scale.
        values = scales_of(embedding, self._tower.num_levels) if self._wire_dtype == "int8" else embedding
        check_finite(values, f"the embedding of a {item.grid} grid")
        payload = payload_of(embedding).toreadonly()
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
        return HeldEmbedding(header, payload)
