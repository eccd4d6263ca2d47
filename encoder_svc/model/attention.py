"""Attention within segments of a packed sequence: each frame sees itself alone.

Owns the choice of the kernel, made once at start, and hides the differences of their signatures. Knows nothing of
images. Runs in the compute thread. Legend: `P` packed patches, `n` segments.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionBackend(Protocol):
    """Non-causal attention of packed segments."""

    @property
    def name(self) -> str:
        """What logs and metrics call this backend."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Attend within each segment, scaled by head_dim**-0.5.

        q, k, v     [P, heads, head_dim]
        cu_seqlens  [n+1] int32, on the device of q: first row of each segment, then P
        lengths     n integers, the same on the host
        returns     [P, heads, head_dim]
        """
        ...


class SdpaAttention:
    """Torch's own attention; segments of one length run as one batch. Any device and dtype."""

    name = "sdpa"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        out = torch.empty_like(q)
        for length, starts in _segments_by_length(lengths).items():
            if starts == list(range(starts[0], starts[0] + length * len(starts), length)):
                rows = slice(starts[0], starts[0] + length * len(starts))
                out[rows] = self._attend_equal(q[rows], k[rows], v[rows], length)
            else:
                first = torch.tensor(starts, device=q.device)
                index = (first[:, None] + torch.arange(length, device=q.device)).flatten()
                out[index] = self._attend_equal(q[index], k[index], v[index], length)
        return out

    @staticmethod
    def _attend_equal(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        """Attention of [b*length, heads, head_dim] as b segments."""
        q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


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


def select_attention(device: torch.device | str, dtype: torch.dtype) -> AttentionBackend:
    """The best backend that is present: flash-attn, torch's varlen kernel, else SDPA. The first two need CUDA."""
    if torch.device(device).type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        if importlib.util.find_spec("flash_attn") is not None:
            return FlashAttention()
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
            return TorchVarlenAttention()
    return SdpaAttention()


def _segments_by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    """First rows of the segments of each length."""
    groups: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        groups.setdefault(length, []).append(start)
        start += length
    return groups
