"""Where each patch is: the interpolated position table and the two-axis rotary angles, in merge-block order.

Owns the maths of positions of a grid. Knows nothing of the blocks. Runs in the compute thread.
Legend: `P` patches of all items, `h`, `w` rows and columns of one frame, `m` merge size, `G` side of the table.
"""

from collections.abc import Sequence

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


def position_embeds(table: Tensor, grid_thw: Sequence[Grid], merge_size: int) -> Tensor:
    """Position embeddings of all patches [P, C] float32: one frame each, repeated over time."""
    frames = {(h, w): interpolate_positions(table, h, w, merge_size) for h, w in {(h, w) for _, h, w in grid_thw}}
    return torch.cat([frames[h, w].repeat(t, 1) for t, h, w in grid_thw])


def patch_coordinates(grid_thw: Sequence[Grid], merge_size: int, device: torch.device) -> Tensor:
    """(row, column) of every patch inside its frame: [P, 2] int64 in merge-block order."""
    parts = []
    for t, h, w in grid_thw:
        rows, columns = torch.arange(h, device=device), torch.arange(w, device=device)
        frame = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
        parts.append(to_merge_order(frame, merge_size).repeat(t, 1))
    return torch.cat(parts)


def rotary_cos_sin(coordinates: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines that rotate the whole head: head_dim/4 frequencies for the row, as many for the column.

    coordinates  [P, 2] int64
    returns      two of [P, head_dim] float32: (row, column) angles, doubled for the two halves of the head
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=coordinates.device)
    frequencies = 1.0 / theta ** (exponents / (head_dim // 2))
    angles = (coordinates[:, :, None].float() * frequencies).flatten(1)  # [P, head_dim/2]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
