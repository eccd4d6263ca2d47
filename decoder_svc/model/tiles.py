"""Weights as our product for AMX reads them: tile by tile, and without loss in three quarters of their memory.

Owns the layout that `linear_amx.cpp` reads; knows nothing of layers. A bfloat16 number is a sign, eight bits of
exponent and seven of mantissa. The exponents of a tile lie close together: all but the last bit of them, with the sign,
mostly take one of 16 values, which half a byte tells. Runs once at start, piece by piece: it needs some megabytes
beside a matrix and its layout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32  # outputs of two tiles side by side, and inputs of one
TILE_LINES = 16  # a tile: 16 pairs of inputs, each for 16 outputs
GROUP_BYTES = 64  # of a tile, which one vector holds
LOW_BYTES, HALF_BYTES = 512, 256
SLOT_BYTES = LOW_BYTES + HALF_BYTES
RAW = 255  # a base that says: the upper bytes are behind all slots, and the slot tells where
NUM_EXPONENTS = 8  # values of the upper seven bits of an exponent that half a byte tells
AT_ONCE = 1 << 12  # tiles that are laid out together, to bound what is needed meanwhile


@dataclass(frozen=True)
class TiledWeight:
    """A weight [out, in] of bfloat16, both multiples of 32, as `tandem_linear_amx` takes it.

    data  uint8: the base of each tile, rounded up to 64 bytes; a slot for each tile; and the upper bytes of those that
          do not fit into a slot. Tiles lie as [out / 32, in / 32, 2], a tile as [16 pairs of in, 16 of out, 2].
    """

    data: Tensor
    out_size: int
    in_size: int


def fits_tiles(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be laid out."""
    return weight.dtype == torch.bfloat16 and all(size % PANEL == 0 for size in weight.shape)


def lay_out(weight: Tensor) -> TiledWeight:
    """A plain weight [out, in] in tiles; the numbers are the same to the last bit."""
    out_size, in_size = weight.shape
    # Pairs of numbers. A vector holds 8 numbers of a line and of the next in turn, as vectors are interleaved.
    pairs = weight.contiguous().view(torch.int32).view(out_size // PANEL, 2, 4, 4, in_size // PANEL, TILE_LINES // 2, 2)
    tiles = pairs.permute(0, 4, 1, 5, 2, 6, 3)
    num_panels, per_panel = out_size // PANEL, in_size // PANEL * 2
    step = max(1, AT_ONCE // per_panel)
    first_slot = -(-num_panels * per_panel // GROUP_BYTES) * GROUP_BYTES
    used = first_slot + num_panels * per_panel * SLOT_BYTES
    num_raw = sum(_num_raw(weight[row : row + PANEL * step]) for row in range(0, out_size, PANEL * step))
    data = torch.zeros(used + num_raw * LOW_BYTES, dtype=torch.uint8)
    slots = data[first_slot:used].view(-1, SLOT_BYTES)
    for panel in range(0, num_panels, step):
        some = tiles[panel : panel + step].contiguous().view(torch.int16).view(-1, LOW_BYTES)
        first, last = panel * per_panel, panel * per_panel + len(some)
        data[first:last], slots[first:last], behind = _slots(some, used)
        data[used : used + behind.nbytes] = behind.flatten()
        used += behind.nbytes
    return TiledWeight(data, out_size, in_size)


def _num_raw(weight: Tensor) -> int:
    """How many tiles of some panels [out, in] do not fit into slots."""
    exponents = ((weight.contiguous().view(torch.int16) >> 8) & 0x7F).view(
        -1, TILE_LINES, weight.shape[1] // PANEL, PANEL
    )
    return int(((exponents.amax((1, 3)) - exponents.amin((1, 3))) >= NUM_EXPONENTS).sum())


def _slots(tiles: Tensor, behind: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles [n, 512] as bases [n], slots [n, 768] and upper bytes [m, 512], the first of which are at `behind`."""
    low, upper = tiles.to(torch.uint8), (tiles >> 8).to(torch.uint8)
    exponents = upper & 0x7F
    base = exponents.amax(1).clamp(min=NUM_EXPONENTS - 1) - (NUM_EXPONENTS - 1)
    is_raw = exponents.amin(1) < base
    halves = ((upper >> 7 << 3) | (exponents - base[:, None])).view(-1, 4, 2, GROUP_BYTES)
    slots = torch.cat([low, (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)], dim=1)
    raw = upper[is_raw]
    places = torch.arange(len(raw)) * LOW_BYTES + behind
    slots[is_raw, LOW_BYTES : LOW_BYTES + 8] = places.view(torch.uint8).view(-1, 8)
    base[is_raw] = RAW
    return base, slots, raw
