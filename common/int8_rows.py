"""Embeddings as 8-bit integers: half the bytes of bfloat16, with a scale for each row and each level.

A row's main part and its DeepStack levels differ in range by an order of magnitude, and so do rows; one scale for all
would spend the few steps of the small ones on the large ones. A packed row is `1 + L` float32 scales and then its
`H * (1 + L)` integers, so that rows of slices can be put one behind the other. Knows torch, and nothing of sockets.

`V` rows, `H` hidden, `L` levels.
"""

import torch
from torch import Tensor

from common.messages import SCALE_BYTES

LARGEST = 127


def pack_rows(embeddings: Tensor, levels: int) -> Tensor:
    """Round to the nearest of 255 steps between the largest value of a part and its negative.

    embeddings  [V, H*(1+L)]                 any float dtype, any device
    returns     [V, 4*(1+L) + H*(1+L)] uint8  on the same device

    A part with a value that is not finite has a scale that is none.
    """
    num_rows, width = embeddings.shape
    parts = embeddings.float().view(num_rows, 1 + levels, width // (1 + levels))
    scales = parts.abs().amax(dim=2) / LARGEST
    # A part of zeros has the scale 0, which nothing can be divided by.
    steps = (parts / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)).round()
    integers = steps.clamp(-LARGEST, LARGEST).to(torch.int8).view(num_rows, width)
    return torch.cat((scales.contiguous().view(torch.uint8), integers.view(torch.uint8)), dim=1)


def scales_of(packed: Tensor, levels: int) -> Tensor:
    """The scales [V, 1+L] float32 of packed rows."""
    # A copy, since rows need not begin where a float32 may.
    return packed[:, : SCALE_BYTES * (1 + levels)].clone(memory_format=torch.contiguous_format).view(torch.float32)


def unpack_rows(packed: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Embeddings [V, H*(1+L)] in `dtype`, of rows packed as `pack_rows` does.

    What came from a peer may have scales that are not finite, or too large for `dtype`: then values are not finite.
    """
    integers = packed[:, SCALE_BYTES * (1 + levels) :].view(torch.int8)
    num_rows, width = integers.shape
    parts = integers.float().view(num_rows, 1 + levels, width // (1 + levels))
    parts *= scales_of(packed, levels).unsqueeze(2)
    return parts.view(num_rows, width).to(dtype)
