"""Attention within segments of a packed sequence: each frame sees itself alone.

Owns the kernels and hides the differences of their signatures; `attention_choice.py` takes one at start. Knows
nothing of images. Runs in the compute thread. Legend: `P` packed patches, `n` segments, `b` segments of one length.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores of one tile: what a core's second-level cache holds besides the tile's queries, keys and values.
TILE_BYTES_PER_THREAD = 1 << 20
MIN_TILE_QUERIES, MAX_TILE_QUERIES = 64, 512


class AttentionBackend(Protocol):
    """Non-causal attention of packed segments."""

    @property
    def name(self) -> str:
        """What logs and metrics call this backend."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Attend within each segment, scaled by head_dim**-0.5.

        q, k, v     [P, heads, head_dim]; only the last dimension need be contiguous
        cu_seqlens  [n+1] int32, on the device of q: first row of each segment, then P
        lengths     n integers, the same on the host
        returns     [P, heads, head_dim]
        """
        ...


class SdpaAttention:
    """Torch's own attention; segments of one length run as one batch. Any device and dtype."""

    name = "sdpa"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        return _attend_by_length(_sdpa_equal, q, k, v, lengths)


class TiledAttention:
    """Matrix products over tiles of queries whose scores stay in cache; made for bfloat16 on CPUs.

    Scores and probabilities are rounded to the dtype of q, where SDPA keeps float32: the error in bf16 is three times
    SDPA's (0.002 against 0.0006 of values of order one), still below that of rounding q, k and v to bf16.
    """

    name = "tiled"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        return _attend_by_length(_tiled_equal, q, k, v, lengths)


class FlashAttention:
    """The flash-attn package's varlen kernel: CUDA, half precision."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._varlen: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        longest = max(lengths)
        return self._varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


class TorchVarlenAttention:
    """Torch's varlen kernel: CUDA, half precision, torch 2.10 or newer."""

    name = "torch_varlen"

    def __init__(self) -> None:
        self._varlen: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        longest = max(lengths)
        return self._varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


AttendEqual = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attend_by_length(attend_equal: AttendEqual, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run `attend_equal`, which takes [b, heads, length, head_dim], once for each length that occurs."""
    groups = _segments_by_length(lengths)
    if len(groups) == 1:
        return _attend_group(attend_equal, q, k, v, lengths[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for length, starts in groups.items():
        if starts == list(range(starts[0], starts[0] + length * len(starts), length)):
            rows = slice(starts[0], starts[0] + length * len(starts))
            out[rows] = _attend_group(attend_equal, q[rows], k[rows], v[rows], length)
        else:
            first = torch.tensor(starts, device=q.device)
            index = (first[:, None] + torch.arange(length, device=q.device)).flatten()
            out[index] = _attend_group(attend_equal, q[index], k[index], v[index], length)
    return out


def _attend_group(attend_equal: AttendEqual, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Attention of [b*length, heads, head_dim] as b segments."""
    q, k, v = (torch.unflatten(x, 0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    return attend_equal(q, k, v).transpose(1, 2).flatten(0, 1)


def _sdpa_equal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _tiled_equal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, heads, length, head_dim] each -> the same; one tile of queries of a few heads and segments at a time."""
    batch, heads, length, head_dim = q.shape
    # Heads outside, as the tower lays them out: then these are views.
    q, k, v = (x.transpose(0, 1).reshape(heads * batch, length, head_dim) for x in (q, k, v))
    keys, out = k.transpose(1, 2), torch.empty_like(q)
    budget = TILE_BYTES_PER_THREAD * torch.get_num_threads() // q.element_size()  # scores of a tile
    tile = min(length, max(MIN_TILE_QUERIES, min(MAX_TILE_QUERIES, budget // length)))
    group = max(1, budget // (tile * length))
    zero = q.new_zeros(())
    for first in range(0, len(q), group):
        some = slice(first, first + group)
        for start in range(0, length, tile):
            rows = slice(start, start + tile)
            scores = torch.baddbmm(zero, q[some, rows], keys[some], beta=0, alpha=head_dim**-0.5)
            out[some, rows] = torch.bmm(torch.softmax(scores, -1), v[some])
    return out.view(heads, batch, length, head_dim).transpose(0, 1)


def _segments_by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    """First rows of the segments of each length."""
    groups: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        groups.setdefault(length, []).append(start)
        start += length
    return groups
