"""Causal attention of packed sequences over the paged KV cache.

Owns the kernels and their choice, and the per-step plan that all layers share. Reads keys and values from the cache
alone: the layer writes the new ones first. A sequence may start in the middle (chunked prefill, prefix cache).
Runs in the compute thread. Legend: `T` packed tokens, `S` sequences, `g` query heads per KV head, `D` head_dim.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decoder_svc.kv_cache import KVCache
from decoder_svc.model_input import ModelInput

# Rows of a prefill tile: its scores stay in cache, and keys after the tile are never touched.
QUERY_TILE = 128
# flash-attn's paged kernel takes only such blocks.
FLASH_BLOCK_MULTIPLE = 256


class PagedAttention(Protocol):
    """A way to attend over the paged cache. `prepare` runs once a step, `attend` once a layer."""

    @property
    def name(self) -> str:
        """What logs and metrics call this backend."""
        ...

    def prepare(self, model_input: ModelInput, block_size: int) -> Any:
        """The plan of a step, to be passed to `attend`."""
        ...

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: Any) -> Tensor:
        """q [T, heads, D] -> [T, heads, D], scaled by D**-0.5."""
        ...


@dataclass(frozen=True)
class PrefillPlan:
    """One sequence with several new tokens: its rows `[start, end)`, its blocks and its context."""

    start: int
    end: int
    context_len: int
    blocks: Tensor


@dataclass(frozen=True)
class DecodePlan:
    """Sequences with one new token each and contexts of similar length.

    rows     [d] int64        rows of the step
    blocks   [d * b] int      b blocks of each, padded
    invalid  [d, b * block_size] bool, True beyond a context
    padding  (sequence, position) of each True, int64
    """

    rows: Tensor
    blocks: Tensor
    invalid: Tensor
    padding: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TorchPlan:
    """A step, split by kind."""

    prefills: list[PrefillPlan]
    decodes: list[DecodePlan]


class TorchPagedAttention:
    """Plain matrix products: tiled over queries in prefill, batched over sequences in decode. Any device."""

    name = "torch"

    def prepare(self, model_input: ModelInput, block_size: int) -> TorchPlan:
        starts = model_input.cu_seqlens_q.tolist()
        contexts = model_input.context_lens.tolist()
        prefills: list[PrefillPlan] = []
        by_size: dict[int, list[int]] = {}
        for seq, context in enumerate(contexts):
            num_blocks = -(-context // block_size)
            if starts[seq + 1] - starts[seq] > 1:
                blocks = model_input.block_tables[seq, :num_blocks]
                prefills.append(PrefillPlan(starts[seq], starts[seq + 1], context, blocks))
            elif starts[seq + 1] > starts[seq]:
                # Contexts within a factor of two share a batch, so padding at most doubles the work.
                by_size.setdefault(num_blocks.bit_length(), []).append(seq)
        decodes = [self._plan_decode(model_input, seqs, block_size) for seqs in by_size.values()]
        return TorchPlan(prefills, decodes)

    @staticmethod
    def _plan_decode(model_input: ModelInput, seqs: list[int], block_size: int) -> DecodePlan:
        device = model_input.block_tables.device
        index = torch.tensor(seqs, device=device)
        contexts = model_input.context_lens[index]
        num_blocks = -(-int(contexts.max()) // block_size)
        blocks = model_input.block_tables[index, :num_blocks]
        invalid = torch.arange(num_blocks * block_size, device=device) >= contexts[:, None]
        sequence, position = invalid.nonzero(as_tuple=True)
        return DecodePlan(model_input.cu_seqlens_q[index].long(), blocks.flatten(), invalid, (sequence, position))

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: TorchPlan) -> Tensor:
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            out[prefill.start : prefill.end] = _attend_prefill(q[prefill.start : prefill.end], kv_cache, layer, prefill)
        for decode in plan.decodes:
            out[decode.rows] = _attend_decode(q[decode.rows], kv_cache, layer, decode)
        return out


def _attend_prefill(q: Tensor, kv_cache: KVCache, layer: int, plan: PrefillPlan) -> Tensor:
    """New tokens of one sequence over its whole context, the last of which they are.

    q        [n, heads, D]
    returns  [n, heads, D]
    """
    keys, values = kv_cache.gather(layer, plan.blocks)
    num_new, num_heads, head_dim = q.shape
    num_old = plan.context_len - num_new
    grouped = (q * head_dim**-0.5).view(num_new, kv_cache.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    out = torch.empty_like(q)
    for start in range(0, num_new, QUERY_TILE):
        tile = grouped[:, :, start : start + QUERY_TILE]
        rows, visible = tile.shape[2], num_old + start + tile.shape[2]
        scores = torch.matmul(tile.flatten(1, 2), keys[:, :visible].transpose(1, 2))
        # Only the square where the tile's own keys are can lie in the future.
        future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
        scores.view(*tile.shape[:3], visible)[..., visible - rows :].masked_fill_(future, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(weights, values[:, :visible]).view(tile.shape)
        out[start : start + rows] = mixed.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
    return out


def _attend_decode(q: Tensor, kv_cache: KVCache, layer: int, plan: DecodePlan) -> Tensor:
    """One new token of each sequence over its context: q [d, heads, D] -> [d, heads, D]."""
    num_seqs, _, head_dim = q.shape
    kv_heads = kv_cache.num_kv_heads
    keys, values = (x.view(kv_heads, num_seqs, -1, head_dim) for x in kv_cache.gather(layer, plan.blocks))
    # Beyond a context lie other sequences' values. Weight zero is not enough: zero times NaN is NaN.
    sequence, position = plan.padding
    values[:, sequence, position] = 0
    grouped = (q * head_dim**-0.5).view(num_seqs, kv_heads, -1, head_dim).transpose(0, 1)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).masked_fill_(plan.invalid[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, values).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class FlashPlan:
    """Arguments of the flash-attn call that all layers share."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int
    block_tables: Tensor


class FlashPagedAttention:
    """The flash-attn package's varlen kernel over the paged cache: CUDA, half precision, blocks of 256 tokens."""

    name = "flash_attn"

    def __init__(self) -> None:
        self._varlen: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def prepare(self, model_input: ModelInput, block_size: int) -> FlashPlan:
        starts, contexts = model_input.cu_seqlens_q.tolist(), model_input.context_lens
        cu_seqlens_k = torch.nn.functional.pad(contexts.cumsum(0), (1, 0)).to(torch.int32)
        longest_q = max(end - start for start, end in itertools.pairwise(starts))
        return FlashPlan(
            model_input.cu_seqlens_q, cu_seqlens_k, longest_q, int(contexts.max()), model_input.block_tables
        )

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: FlashPlan) -> Tensor:
        keys, values = kv_cache.pages(layer)
        return self._varlen(
            q,
            keys,
            values,
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            plan.longest_q,
            plan.longest_k,
            causal=True,  # aligned to the end of the keys, so chunked prefill is right
            block_table=plan.block_tables,
        )


def select_attention(device: torch.device | str, dtype: torch.dtype, block_size: int) -> PagedAttention:
    """flash-attn where it is installed and can run, else plain torch."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    can_run = torch.device(device).type == "cuda" and is_half and block_size % FLASH_BLOCK_MULTIPLE == 0
    if can_run and importlib.util.find_spec("flash_attn") is not None:
        return FlashPagedAttention()
    return TorchPagedAttention()
