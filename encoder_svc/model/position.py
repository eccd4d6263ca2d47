"""Where each patch is: the interpolated position table and the two-axis rotary angles, in merge-block order.

Owns the maths of positions of a frame, and the memory of the frames computed last, within a byte budget. Knows nothing
of the blocks. Runs in the compute thread.
Legend: `P` patches of all items, `h`, `w` rows and columns of one frame, `m` merge size, `G` side of the table.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def to_merge_order(frame: Tensor, merge_size: int) -> Tensor:
    """Reorder a frame so that the m*m patches of one merged token are neighbours.

    frame    [h, w, C] in raster order
    returns  [h*w, C] in the order (h/m, w/m, m, m)
    """
    height, width, channels = frame.shape
    blocks = frame.reshape(height // merge_size, merge_size, width // merge_size, merge_size, channels)
    return blocks.transpose(1, 2).reshape(height * width, channels)


def _axis_taps(size: int, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lower tap [size], upper tap [size] (int64) and weight of the upper [size] (float32), end points aligned.

    The product comes before the division, so that the last position is exactly `side - 1`.
    """
    position = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    lower = position.floor().clamp_(max=side - 1)
    upper = (lower + 1).clamp_(max=side - 1)
    return lower.long(), upper.long(), position - lower


def interpolate_positions(table: Tensor, height: int, width: int, merge_size: int) -> Tensor:
    """Resample the learned position table to one frame, bilinear with end points aligned.

    table    [G*G, C]   any dtype, row-major over the square grid
    returns  [h*w, C]   float32, in merge-block order

    Source: transformers 5.24, vision_utils.py, `get_vision_interpolation_indices_and_weights` (align_corners).
    """
    side = int(table.shape[0] ** 0.5)
    square = table.float().view(side, side, -1)
    lower, upper, weight = _axis_taps(height, side, table.device)
    rows = torch.lerp(square[lower], square[upper], weight[:, None, None])  # [h, G, C]
    lower, upper, weight = _axis_taps(width, side, table.device)
    frame = torch.lerp(rows[:, lower], rows[:, upper], weight[None, :, None])  # [h, w, C]
    return to_merge_order(frame, merge_size)


def patch_coordinates(height: int, width: int, merge_size: int, device: torch.device) -> Tensor:
    """(row, column) of every patch of a frame: [h*w, 2] int64 in merge-block order."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    frame = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
    return to_merge_order(frame, merge_size)


def rotary_cos_sin(coordinates: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines that rotate the whole head: head_dim/4 frequencies for the row, as many for the column.

    coordinates  [P, 2] int64
    returns      two of [P, head_dim/2] float32: (row, column) angles, which both halves of the head share
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=coordinates.device)
    frequencies = 1.0 / theta ** (exponents / (head_dim // 2))
    angles = (coordinates[:, :, None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


@dataclass(frozen=True)
class FrameTables:
    """What the tower needs of one frame: `position` [h*w, C] in the compute dtype; `cos`, `sin` [h*w, head_dim/2]."""

    position: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the three."""
        return self.position.nbytes + self.cos.nbytes + self.sin.nbytes


class FrameTableCache:
    """Tables of the frame sizes used last. For one set of weights, which must not change while it is used."""

    def __init__(self, *, merge_size: int, head_dim: int, theta: float, budget_bytes: int) -> None:
        self._merge_size = merge_size
        self._head_dim = head_dim
        self._theta = theta
        self._budget_bytes = budget_bytes
        self._tables: OrderedDict[tuple[int, int], FrameTables] = OrderedDict()
        self.held_bytes = 0

    def get(self, table: Tensor, height: int, width: int) -> FrameTables:
        """The tables of an h x w frame, on the device and in the dtype of the learned position `table` [G*G, C]."""
        tables = self._tables.get((height, width))
        if tables is None:
            tables = self._compute(table, height, width)
            self._keep((height, width), tables)
        else:
            self._tables.move_to_end((height, width))
        return tables

    def rotary(self, table: Tensor, grid_thw: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """(cos, sin) of all items' patches, each [P, 1, 1, head_dim/2] float32."""
        of_items = [(self.get(table, h, w), t) for t, h, w in grid_thw]
        cos = torch.cat([tables.cos.repeat(t, 1) for tables, t in of_items])
        sin = torch.cat([tables.sin.repeat(t, 1) for tables, t in of_items])
        return cos[:, None, None], sin[:, None, None]

    def _compute(self, table: Tensor, height: int, width: int) -> FrameTables:
        position = interpolate_positions(table, height, width, self._merge_size).to(table.dtype)
        coordinates = patch_coordinates(height, width, self._merge_size, table.device)
        return FrameTables(position, *rotary_cos_sin(coordinates, self._head_dim, self._theta))

    def _keep(self, size: tuple[int, int], tables: FrameTables) -> None:
        if tables.num_bytes > self._budget_bytes:
            return
        self._tables[size] = tables
        self.held_bytes += tables.num_bytes
        while self.held_bytes > self._budget_bytes:
            _, oldest = self._tables.popitem(last=False)
            self.held_bytes -= oldest.num_bytes
