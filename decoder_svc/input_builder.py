"""The one place where the tensors of a step are born: chunks of sequences in, a `ModelInput` out.

Owns packing: token ids, positions, slots, block tables, and the rows of the embeddings that the chunks at hand need.
Knows nothing of scheduling or sampling. Runs in the engine thread.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoder_svc.model_input import ModelInput
from decoder_svc.scheduler import Chunk
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import all_to_device, index_on


@dataclass(frozen=True)
class UnreadTokens:
    """Tokens that the step before chose: of these sequences, in this order, [n] int64 on the device."""

    sequences: Seq[Sequence]
    token_ids: Tensor


def build_model_input(
    chunks: Seq[Chunk],
    embeddings: Mapping[str, Tensor],
    block_size: int,
    device: torch.device,
    unread: UnreadTokens | None = None,
) -> ModelInput:
    """Pack the chunks of one step, in order.

    embeddings  [tokens, H*(1+L)] by media key: every item of which a chunk holds placeholder tokens
    unread      of every sequence that has a token whose id the host does not know
    """
    query_lens = tuple(chunk.num_tokens for chunk in chunks)
    kv_lens = tuple(chunk.end for chunk in chunks)
    starts = list(accumulate(query_lens, initial=0))
    vision_rows, vision_embeds = _vision(chunks, starts, embeddings)
    token_ids = [token for chunk in chunks for token in _token_ids(chunk)]
    tensors = all_to_device(
        [
            np.array(token_ids, np.int64),
            _positions(chunks, starts),
            _slots(chunks, starts, block_size),
            np.array(starts, np.int32),
            np.array(kv_lens, np.int32),
            _block_tables(chunks, block_size),
            vision_rows,
            _logits_rows(chunks, starts),
        ],
        device,
    )
    input_ids, positions, slot_mapping, cu_seqlens_q, context_lens, block_tables, rows, logits_rows = tensors
    if unread is not None:
        _fill_in(input_ids, chunks, starts, unread)
    return ModelInput(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=block_tables,
        vision_rows=rows,
        vision_embeds=None if vision_embeds is None else vision_embeds.to(device, non_blocking=True),
        logits_rows=logits_rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
    )


def _token_ids(chunk: Chunk) -> list[int]:
    """Token ids of a chunk; 0 in place of the one that is not known here."""
    if chunk.end <= chunk.sequence.num_known_tokens:
        return chunk.sequence.tokens(chunk.start, chunk.end)
    assert chunk.num_tokens == 1, "only the newest token is not known"
    return [0]


def _fill_in(input_ids: Tensor, chunks: Seq[Chunk], starts: Seq[int], unread: UnreadTokens) -> None:
    """Put tokens that only the device knows where they belong; `input_ids` [T] int64, in place."""
    places = {sequence: place for place, sequence in enumerate(unread.sequences)}
    found = [
        (row, places[chunk.sequence])
        for row, chunk in zip(starts, chunks, strict=False)
        if chunk.end > chunk.sequence.num_known_tokens
    ]
    if found:
        rows, taken = (index_on(list(axis), input_ids.device) for axis in zip(*found, strict=True))
        input_ids.index_copy_(0, rows, unread.token_ids.index_select(0, taken))


def _logits_rows(chunks: Seq[Chunk], starts: Seq[int]) -> NDArray[np.int64]:
    """Rows whose logits are wanted: of each chunk those for the prompt's log probabilities, then the newest token's."""
    rows: list[int] = []
    for chunk, start in zip(chunks, starts, strict=False):
        rows += range(start, start + chunk.num_prompt_rows)
        if chunk.gives_token:
            rows.append(start + chunk.num_tokens - 1)
    return np.array(rows, np.int64)


def _positions(chunks: Seq[Chunk], starts: Seq[int]) -> NDArray[np.int64]:
    """[3, T]: the prompt's own positions, then index + delta on all axes."""
    positions = np.empty((3, starts[-1]), np.int64)
    single_rows: list[int] = []  # and their positions, for one assignment: each microsecond is paid 64 times a step
    singles: list[int] = []
    for chunk, row in zip(chunks, starts, strict=False):
        prompt, prompt_len = chunk.sequence.prompt, chunk.sequence.num_prompt_tokens
        if chunk.num_tokens == 1 and chunk.start >= prompt_len:
            single_rows.append(row)
            singles.append(chunk.start + prompt.delta)
            continue
        split, end = row + max(0, min(chunk.end, prompt_len) - chunk.start), row + chunk.num_tokens
        positions[:, row:split] = prompt.positions[:, chunk.start : chunk.end]
        positions[:, split:end] = np.arange(chunk.start + split - row, chunk.end) + prompt.delta
    positions[:, single_rows] = singles
    return positions


def _slots(chunks: Seq[Chunk], starts: Seq[int], block_size: int) -> NDArray[np.int64]:
    """[T]: the KV slot of each token."""
    slots = np.empty(starts[-1], np.int64)
    for chunk, row in zip(chunks, starts, strict=False):
        table, first = chunk.sequence.block_table, chunk.start // block_size
        if chunk.num_tokens == 1:
            slots[row] = table[first] * block_size + chunk.start % block_size
            continue
        offsets = np.arange(chunk.start, chunk.end) - first * block_size
        blocks = np.array(table[first : -(-chunk.end // block_size)], np.int64)
        slots[row : row + chunk.num_tokens] = blocks[offsets // block_size] * block_size + offsets % block_size
    return slots


def _block_tables(chunks: Seq[Chunk], block_size: int) -> NDArray[np.int32]:
    """Blocks that hold each sequence's context, padded with the first one."""
    counts = [-(-chunk.end // block_size) for chunk in chunks]
    width, packed = max(counts), bytearray()
    for chunk, count in zip(chunks, counts, strict=True):
        table = chunk.sequence.block_table
        packed += table[:count] + table[:1] * (width - count)
    return np.frombuffer(packed, np.int32).reshape(-1, width)


def _vision(
    chunks: Seq[Chunk], starts: Seq[int], embeddings: Mapping[str, Tensor]
) -> tuple[NDArray[np.int64], Tensor | None]:
    """Rows of the step that are vision tokens, ascending, and their rows of the embeddings."""
    rows: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    parts: list[Tensor] = []
    for chunk, row in zip(chunks, starts, strict=False):
        for span in chunk.sequence.spans_from(chunk.start):
            if span.offset >= chunk.end:
                break
            first, last = max(span.offset, chunk.start), min(span.end, chunk.end)
            rows.append(np.arange(first, last, dtype=np.int64) - chunk.start + row)
            offset = span.row_offset - span.offset
            parts.append(embeddings[span.key][first + offset : last + offset])
    if not parts:
        return rows[0], None
    return np.concatenate(rows), parts[0] if len(parts) == 1 else torch.cat(parts)
