"""Everything that one step of the language model needs, packed.

Owns the shape contract between the engine, which builds it, and the model, which only reads it. Plain data: any
thread may hold it; its tensors lie on the model's device, and what the host must know of them stands beside them.
"""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class ModelInput:
    """One packed step of `S` sequences with `T` new tokens, `V` of them vision tokens.

    input_ids      [T] int64
    positions      [3, T] int64            time, row and column of each token (M-RoPE)
    slot_mapping   [T] int64               slot in the paged KV cache of each token: block * block_size + offset
    cu_seqlens_q   [S+1] int32             first row of each sequence, then T
    context_lens   [S] int32               tokens of each sequence in the KV cache after this step
    block_tables   [S, max_blocks] int32   blocks of each sequence in order; the rest of a row is any valid block
    vision_rows    [V] int64               rows of this step that are vision tokens, ascending
    vision_embeds  [V, H*(1+L)] or None    their payload rows: main embeddings, then L DeepStack levels
    logits_rows    [R] int64               rows whose logits are wanted
    query_lens     S integers on the host: new tokens of each sequence
    kv_lens        S integers on the host: what `context_lens` says
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor
    vision_rows: Tensor
    vision_embeds: Tensor | None
    logits_rows: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def first_rows(self) -> list[int]:
        """On the host, what `cu_seqlens_q` says."""
        return list(accumulate(self.query_lens, initial=0))
