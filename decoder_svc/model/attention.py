"""Causal attention of packed sequences over the paged KV cache.

Owns the kernels and their choice, and the per-step plan that all layers share. Reads keys and values from the cache
alone: the layer writes the new ones first. A sequence may start in the middle (chunked prefill, prefix cache).
Runs in the compute thread. Legend: `T` packed tokens, `S` sequences, `g` query heads per KV head, `D` head_dim.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decoder_svc.kv_cache import KVCache
from decoder_svc.model.kernels import NativeKernels, TorchKernels
from decoder_svc.model_input import ModelInput
from decoder_svc.transfers import index_on, to_device

# Rows of a prefill tile: its scores stay in cache, and keys after the tile are never touched.
QUERY_TILE = 128
# Keys and values that a decode batch gathers at once: more would leave the processor's second cache before it is used.
DECODE_TILE_BYTES = 1 << 20
# flash-attn's paged kernel takes only multiples of such blocks.
FLASH_BLOCK_MULTIPLE = 256
BLOCK_SIZE = 16


class PagedAttention(Protocol):
    """A way to attend over the paged cache. `prepare` runs once a step, `attend` once a layer."""

    @property
    def name(self) -> str:
        """What logs and metrics call this backend."""
        ...

    @property
    def can_record(self) -> bool:
        """Whether a step's launches follow from its tensors' shapes alone, so that they can be replayed for another."""
        ...

    def prepare(self, model_input: ModelInput, kv_cache: KVCache) -> Any:
        """The plan of a step, to be passed to `attend`."""
        ...

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: Any) -> Tensor:
        """q [T, heads, D] -> [T, heads, D], scaled by D**-0.5."""
        ...


@dataclass(frozen=True)
class PrefillPlan:
    """One sequence with several new tokens: its rows `[start, end)`, its context, and where the cache holds it."""

    start: int
    end: int
    context_len: int
    gather_rows: Tensor


@dataclass(frozen=True)
class DecodePlan:
    """Sequences with one new token each and contexts of similar length, few enough to be gathered at once.

    rows         [d] int64        rows of the step
    gather_rows  int64            where the cache holds b blocks of each, padded
    invalid      [d, 1, b * block_size] bool, True beyond a context
    padding      (sequence, position) of each True, int64
    """

    rows: Tensor
    gather_rows: Tensor
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
    can_record = False  # contexts decide how sequences are gathered

    def prepare(self, model_input: ModelInput, kv_cache: KVCache) -> TorchPlan:
        decoding = _decoding(model_input)
        block_bytes = 2 * kv_cache.num_kv_heads * kv_cache.block_size * kv_cache.head_dim * kv_cache.pool.itemsize
        sizes = {seq: -(-context // kv_cache.block_size) for seq, context in decoding.items()}
        groups = decode_groups(sizes, max(1, DECODE_TILE_BYTES // block_bytes))
        decodes = [_plan_decode(model_input, group, kv_cache) for group in groups]
        return TorchPlan(_plan_prefills(model_input, kv_cache), decodes)

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: TorchPlan) -> Tensor:
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            out[prefill.start : prefill.end] = _attend_prefill(q[prefill.start : prefill.end], kv_cache, layer, prefill)
        for decode in plan.decodes:
            out[decode.rows] = _attend_decode(q[decode.rows], kv_cache, layer, decode)
        return out


def decode_groups(num_blocks: dict[int, int], max_blocks: int) -> list[list[int]]:
    """Sequences that are gathered together, each set padded to its longest: at most `max_blocks`, or one sequence.

    Contexts within a factor of two share a group, so padding at most doubles the work.
    """
    groups: list[list[int]] = []
    longest = 0
    for seq, count in sorted(num_blocks.items(), key=lambda item: -item[1]):
        if groups and 2 * count >= longest and longest * (len(groups[-1]) + 1) <= max_blocks:
            groups[-1].append(seq)
        else:
            groups.append([seq])
            longest = count
    return groups


def _decoding(model_input: ModelInput) -> dict[int, int]:
    """Sequences with one new token, and their contexts."""
    lens = zip(model_input.query_lens, model_input.kv_lens, strict=True)
    return {seq: context for seq, (count, context) in enumerate(lens) if count == 1}


def _plan_prefills(model_input: ModelInput, kv_cache: KVCache) -> list[PrefillPlan]:
    """Sequences with more than one new token."""
    starts, prefills = model_input.first_rows, []
    for seq, (count, context) in enumerate(zip(model_input.query_lens, model_input.kv_lens, strict=True)):
        if count > 1:
            blocks = model_input.block_tables[seq, : -(-context // kv_cache.block_size)]
            prefills.append(PrefillPlan(starts[seq], starts[seq] + count, context, kv_cache.rows_of(blocks)))
    return prefills


def _plan_decode(model_input: ModelInput, seqs: list[int], kv_cache: KVCache) -> DecodePlan:
    device, starts = model_input.block_tables.device, model_input.first_rows
    contexts = np.array([model_input.kv_lens[seq] for seq in seqs])
    num_blocks = -(-int(contexts.max()) // kv_cache.block_size)
    invalid = np.arange(num_blocks * kv_cache.block_size) >= contexts[:, None]
    sequence, position = (to_device(axis, device) for axis in invalid.nonzero())
    tables = model_input.block_tables[index_on(seqs, device), :num_blocks]
    rows = index_on([starts[seq] for seq in seqs], device)
    return DecodePlan(rows, kv_cache.rows_of(tables), to_device(invalid[:, None], device), (sequence, position))


def _attend_prefill(q: Tensor, kv_cache: KVCache, layer: int, plan: PrefillPlan) -> Tensor:
    """New tokens of one sequence over its whole context, the last of which they are.

    q        [n, heads, D]
    returns  [n, heads, D]
    """
    num_new, num_heads, head_dim = q.shape
    kv_heads = kv_cache.num_kv_heads
    gathered = kv_cache.gather(layer, plan.gather_rows)
    keys, values = (x.view(kv_heads, -1, head_dim).to(q.dtype) for x in gathered)
    num_old = plan.context_len - num_new
    grouped = (q * head_dim**-0.5).view(num_new, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    out = torch.empty_like(q)
    # Only the square where a tile's own keys are can lie in the future.
    size = min(num_new, QUERY_TILE)
    future = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    for start in range(0, num_new, QUERY_TILE):
        tile = grouped[:, :, start : start + QUERY_TILE]
        rows, visible = tile.shape[2], num_old + start + tile.shape[2]
        scores = torch.bmm(tile.flatten(1, 2), keys[:, :visible].transpose(1, 2))
        own = scores.view(*tile.shape[:3], visible)[..., visible - rows :]
        own.add_(future[:rows, :rows])  # many times as fast as masked_fill_ in rows that are not dense
        weights = torch.softmax(scores, dim=-1)  # in float32 inside, whatever the dtype
        mixed = torch.bmm(weights, values[:, :visible]).view(tile.shape)
        out[start : start + rows] = mixed.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
    return out


def _attend_decode(q: Tensor, kv_cache: KVCache, layer: int, plan: DecodePlan) -> Tensor:
    """One new token of each sequence over its context: q [d, heads, D] -> [d, heads, D]."""
    num_seqs, num_heads, head_dim = q.shape
    pairs = num_seqs * kv_cache.num_kv_heads
    gathered = kv_cache.gather(layer, plan.gather_rows)
    keys, values = (x.view(pairs, -1, head_dim).to(q.dtype) for x in gathered)
    sequence, position = plan.padding
    if len(sequence):
        # Beyond a context lie other sequences' values. Weight zero is not enough: zero times NaN is NaN.
        values.view(num_seqs, kv_cache.num_kv_heads, -1, head_dim)[sequence, :, position] = 0
    scores = torch.bmm((q * head_dim**-0.5).view(pairs, -1, head_dim), keys.transpose(1, 2))
    if len(sequence):
        scores.view(num_seqs, num_heads, -1).masked_fill_(plan.invalid, float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)


@dataclass(frozen=True)
class NativePlan:
    """A step, split by kind, with its tables, contexts and first rows.

    gathered    sequences with several new tokens, where no compiled kernel takes them
    prefilling  [p] int64  sequences with several new tokens, where one does
    decoding    [d] int64  sequences with one new token
    rows        [d] int64  its row
    """

    gathered: list[PrefillPlan]
    prefilling: Tensor
    decoding: Tensor
    rows: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor


class NativePagedAttention:
    """The compiled kernels, which read blocks where they lie; without AMX prefill is as in torch's form. CPU only."""

    name = "compiled"
    can_record = False

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._torch = TorchPagedAttention()

    def prepare(self, model_input: ModelInput, kv_cache: KVCache) -> NativePlan | TorchPlan:
        tables = (model_input.block_tables, model_input.context_lens, model_input.cu_seqlens_q)
        if not self._kernels.can_attend(kv_cache, *tables):
            return self._torch.prepare(model_input, kv_cache)
        starts, counts = model_input.first_rows, model_input.query_lens
        decoding = [seq for seq, count in enumerate(counts) if count == 1]
        prefilling = [seq for seq, count in enumerate(counts) if count > 1]
        gathered = []
        if prefilling and not self._kernels.can_attend_prefill(kv_cache):
            gathered, prefilling = _plan_prefills(model_input, kv_cache), []
        host = model_input.block_tables.device
        rows = index_on([starts[seq] for seq in decoding], host)
        return NativePlan(gathered, index_on(prefilling, host), index_on(decoding, host), rows, *tables)

    def attend(self, q: Tensor, kv_cache: KVCache, layer: int, plan: NativePlan | TorchPlan) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._torch.attend(q, kv_cache, layer, plan)
        q = q.contiguous()
        out = torch.empty_like(q)
        tables, contexts = plan.block_tables, plan.context_lens
        for prefill in plan.gathered:
            out[prefill.start : prefill.end] = _attend_prefill(q[prefill.start : prefill.end], kv_cache, layer, prefill)
        if len(plan.prefilling):
            self._kernels.attend_prefill(q, kv_cache, layer, tables, contexts, plan.cu_seqlens_q, plan.prefilling, out)
        if len(plan.rows):
            self._kernels.attend_decode(q, kv_cache, layer, tables, contexts, plan.decoding, plan.rows, out)
        return out


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
    can_record = True

    def __init__(self) -> None:
        self._varlen: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def prepare(self, model_input: ModelInput, kv_cache: KVCache) -> FlashPlan:
        cu_seqlens_k = torch.nn.functional.pad(model_input.context_lens.cumsum(0), (1, 0)).to(torch.int32)
        longest_q, longest_k = max(model_input.query_lens), max(model_input.kv_lens)
        return FlashPlan(model_input.cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, model_input.block_tables)

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


def select_attention(
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    kernels: TorchKernels | NativeKernels,
    kv_dtype: torch.dtype | None = None,
) -> PagedAttention:
    """flash-attn where it is installed and can run, the compiled kernel where it was built, else plain torch.

    Plain torch alone reads a cache of another dtype than the model's.
    """
    if kv_dtype not in (None, dtype):
        return TorchPagedAttention()
    if block_size % FLASH_BLOCK_MULTIPLE == 0 and _has_flash(device, dtype):
        return FlashPagedAttention()
    return NativePagedAttention(kernels) if isinstance(kernels, NativeKernels) else TorchPagedAttention()


def pick_block_size(
    asked: int, device: torch.device | str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> int:
    """Tokens of a block: what is asked for, or for 0 what lets the fastest attention of a device be chosen."""
    return asked or (FLASH_BLOCK_MULTIPLE if _has_flash(device, dtype) and kv_dtype in (None, dtype) else BLOCK_SIZE)


def _has_flash(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether flash-attn is installed and runs on a device and in a dtype."""
    can_run = torch.device(device).type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return can_run and importlib.util.find_spec("flash_attn") is not None
