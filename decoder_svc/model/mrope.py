"""Rotary embedding over three axes, interleaved (M-RoPE).

Owns the maths from positions to cosines and sines; `kernels.py` rotates by them. Knows nothing of where positions
come from.
Runs in the compute thread. Legend: `T` packed tokens, `D` head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """[D/2] float32 on the CPU, also while modules are built on the meta device."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / theta ** (exponents / head_dim)


def frequency_axes(head_dim: int, mrope_section: Sequence[int]) -> Tensor:
    """Which axis (0 time, 1 row, 2 column) turns each frequency: [D/2] int64 on the CPU.

    Rows take frequencies 1, 4, 7, ... and columns 2, 5, 8, ..., as many as their section says; time has the rest.
    """
    axes = torch.zeros(head_dim // 2, dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        axes[axis : 3 * mrope_section[axis] : 3] = axis
    return axes


def mrope_cos_sin(positions: Tensor, frequencies: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token, computed in float32.

    positions    [3, T] int64
    frequencies  [D/2] float32
    axes         [D/2] int64
    returns      two of [T, D/2] float32: both halves of a head turn by the same angles

    Source: transformers 5.24, modeling_qwen3_vl.py, `Qwen3VLTextRotaryEmbedding`.
    """
    angles = positions.t().index_select(1, axes).float() * frequencies
    return angles.cos(), angles.sin()
