"""An item cut between frames, and the embedding put together again from those of its slices.

Frames are attention segments of their own and the position tables repeat over them, so the rows of the slices are the
rows of the whole. Knows nothing of batches or sockets. `cut` is free of copies; `Joining.add` copies, and may run in
any one thread at a time.
"""

import dataclasses

import msgspec

from common.embedding import Payload, checksum, new_payload
from common.messages import Grid
from common.shared_region import SharedRegion
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem
from encoder_svc.shared_regions import NEVER_SHARED, SharedRegions


def cut(item: TowerItem, first: int, num_frames: int) -> TowerItem:
    """The temporal patches `[first, first + num_frames)` of an item; the item itself when these are all."""
    t, h, w = item.grid
    if num_frames == t:
        return item
    rows = item.pixel_values[first * h * w : (first + num_frames) * h * w]
    return dataclasses.replace(item, grid=(num_frames, h, w), pixel_values=rows, is_whole=False)


class Joining:
    """The embedding of an item whose slices are encoded one after another."""

    def __init__(self, grid: Grid, regions: SharedRegions = NEVER_SHARED) -> None:
        self._grid = grid
        self._regions = regions
        self._frames = 0
        self._region: SharedRegion | None = None
        self._payload: Payload = bytearray()
        self._checksum = 0

    def add(self, part: HeldEmbedding) -> HeldEmbedding | None:
        """Take the next slice's embedding; gives the whole one with the last."""
        header = part.header
        frames, per_frame = header.grid[0], header.num_bytes // header.grid[0]
        if self._frames == 0:
            self._region = self._regions.take(per_frame * self._grid[0])
            if self._region is None:
                self._payload = new_payload(per_frame * self._grid[0])
        start = self._frames * per_frame
        if self._region is not None:
            self._region.write(start, part.payload)
        else:
            self._payload[start : start + header.num_bytes] = part.payload
        self._checksum = checksum(part.payload, self._checksum)
        self._frames += frames
        if self._frames < self._grid[0]:
            return None
        rows = header.rows // frames * self._grid[0]
        whole = msgspec.structs.replace(header, grid=self._grid, rows=rows, checksum=self._checksum)
        payload = self._region.seal() if self._region is not None else memoryview(self._payload).toreadonly()
        return HeldEmbedding(whole, payload, self._region)
