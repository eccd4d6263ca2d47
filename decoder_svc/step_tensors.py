"""A step's inputs as they travel, to the device and to other ranks: sizes, one row of integers, one payload.

Owns the layout; `ModelInput` says what the tensors mean. Knows nothing of how they travel. Pure tensor functions.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.model_input import ModelInput

_HEADER = struct.Struct("<6q")


@dataclass(frozen=True)
class StepSizes:
    """What the host knows of a step's tensors: their sizes, by the letters of `ModelInput`, and the sequences' lengths.

    `width` is 0 without a vision payload.
    """

    num_tokens: int
    max_blocks: int
    num_vision: int
    width: int
    num_logits: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @classmethod
    def of(cls, step: ModelInput) -> "StepSizes":
        """Those of a step."""
        width = 0 if step.vision_embeds is None else step.vision_embeds.shape[1]
        return cls(
            step.input_ids.shape[0],
            step.block_tables.shape[1],
            step.vision_rows.shape[0],
            width,
            step.logits_rows.shape[0],
            step.query_lens,
            step.kv_lens,
        )

    @classmethod
    def unpack(cls, header: bytes) -> "StepSizes":
        """From what `pack` gave."""
        num_sequences, num_tokens, max_blocks, num_vision, width, num_logits = _HEADER.unpack_from(header)
        lens = struct.unpack_from(f"<{2 * num_sequences}q", header, _HEADER.size)
        query_lens, kv_lens = lens[:num_sequences], lens[num_sequences:]
        return cls(num_tokens, max_blocks, num_vision, width, num_logits, query_lens, kv_lens)

    def pack(self) -> bytes:
        """As bytes, for another process."""
        sizes = (self.num_sequences, self.num_tokens, self.max_blocks, self.num_vision, self.width, self.num_logits)
        lens = (*self.query_lens, *self.kv_lens)
        return _HEADER.pack(*sizes) + struct.pack(f"<{len(lens)}q", *lens)

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        return len(self.query_lens)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the pieces of the row of integers."""
        return [
            self.num_tokens,
            3 * self.num_tokens,
            self.num_tokens,
            self.num_sequences + 1,
            self.num_sequences,
            self.num_sequences * self.max_blocks,
            self.num_vision,
            self.num_logits,
        ]


def pack_integers(step: ModelInput) -> Tensor:
    """All of a step but its vision payload: [sum of lengths] int64, on the step's device."""
    parts = (
        step.input_ids,
        step.positions,
        step.slot_mapping,
        step.cu_seqlens_q,
        step.context_lens,
        step.block_tables,
        step.vision_rows,
        step.logits_rows,
    )
    return torch.cat([part.reshape(-1).long() for part in parts])


def unpack_step(sizes: StepSizes, integers: Tensor, vision_embeds: Tensor | None) -> ModelInput:
    """The step that was packed, over the same device."""
    ids, positions, slots, starts, contexts, tables, vision_rows, logits_rows = torch.split(integers, sizes.lengths)
    return ModelInput(
        input_ids=ids,
        positions=positions.view(3, -1),
        slot_mapping=slots,
        cu_seqlens_q=starts.int(),
        context_lens=contexts.int(),
        block_tables=tables.int().view(sizes.num_sequences, sizes.max_blocks),
        vision_rows=vision_rows,
        vision_embeds=vision_embeds,
        logits_rows=logits_rows,
        query_lens=sizes.query_lens,
        kv_lens=sizes.kv_lens,
    )
