"""The one place where the tensors of a step are born: chunks of sequences in, a `ModelInput` out.

Owns packing: token ids, positions, slots, block tables, and the rows of the embeddings that the chunks at hand need.
Knows nothing of scheduling or sampling. Runs in the engine thread.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoder_svc.model_input import ModelInput
from decoder_svc.scheduler import Chunk


def build_model_input(
    chunks: Seq[Chunk], embeddings: Mapping[str, Tensor], block_size: int, device: torch.device
) -> ModelInput:
    """Pack the chunks of one step, in order.

    embeddings  [tokens, H*(1+L)] by media key: every item of which a chunk holds placeholder tokens
    """
    starts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
    vision_rows, vision_embeds = _vision(chunks, starts, embeddings)
    token_ids = [token for chunk in chunks for token in chunk.sequence.tokens(chunk.start, chunk.end)]

    def on_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ModelInput(
        input_ids=on_device(np.array(token_ids, np.int64)),
        positions=on_device(np.concatenate([_positions(chunk) for chunk in chunks], axis=1)),
        slot_mapping=on_device(np.concatenate([_slots(chunk, block_size) for chunk in chunks])),
        cu_seqlens_q=on_device(starts.astype(np.int32)),
        context_lens=on_device(np.array([chunk.end for chunk in chunks], np.int32)),
        block_tables=on_device(_block_tables(chunks, block_size)),
        vision_rows=on_device(vision_rows),
        vision_embeds=None if vision_embeds is None else vision_embeds.to(device, non_blocking=True),
        logits_rows=on_device(np.array([starts[i + 1] - 1 for i, c in enumerate(chunks) if c.gives_token], np.int64)),
    )


def _positions(chunk: Chunk) -> NDArray[np.int64]:
    """[3, tokens of the chunk]: the prompt's own positions, then index + delta on all axes."""
    prompt = chunk.sequence.prompt
    of_prompt = prompt.positions[:, chunk.start : chunk.end]
    first_output = max(chunk.start, chunk.sequence.num_prompt_tokens)
    of_output = np.arange(first_output, max(chunk.end, first_output), dtype=np.int64) + prompt.delta
    return np.concatenate([of_prompt, np.broadcast_to(of_output, (3, len(of_output)))], axis=1)


def _slots(chunk: Chunk, block_size: int) -> NDArray[np.int64]:
    """The KV slot of each token of the chunk."""
    index = np.arange(chunk.start, chunk.end, dtype=np.int64)
    blocks = np.array(chunk.sequence.block_table, np.int64)
    return blocks[index // block_size] * block_size + index % block_size


def _block_tables(chunks: Seq[Chunk], block_size: int) -> NDArray[np.int32]:
    """Blocks that hold each sequence's context, padded with the first one."""
    counts = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row] = chunk.sequence.block_table[0]
        tables[row, :count] = chunk.sequence.block_table[:count]
    return tables


def _vision(
    chunks: Seq[Chunk], starts: NDArray[np.int64], embeddings: Mapping[str, Tensor]
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
