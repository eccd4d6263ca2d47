"""One step's inputs as they go from rank 0 to the other ranks: a header of sizes, one row of integers, one payload.

Owns the layout; `ModelInput` says what the tensors mean. Knows nothing of how they travel. Pure tensor functions.
"""

import struct
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from decoder_svc.model_input import ModelInput

_HEADER = struct.Struct("<6q")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step's tensors, by the letters of `ModelInput`; `width` is 0 without a vision payload."""

    num_tokens: int
    num_sequences: int
    max_blocks: int
    num_vision: int
    width: int
    num_logits: int

    @classmethod
    def of(cls, step: ModelInput) -> "StepSizes":
        """Those of a step, known on the host."""
        num_sequences, max_blocks = step.block_tables.shape
        width = 0 if step.vision_embeds is None else step.vision_embeds.shape[1]
        num_vision, num_logits = step.vision_rows.shape[0], step.logits_rows.shape[0]
        return cls(step.input_ids.shape[0], num_sequences, max_blocks, num_vision, width, num_logits)

    @classmethod
    def unpack(cls, header: bytes) -> "StepSizes":
        """From `HEADER_BYTES` bytes."""
        return cls(*_HEADER.unpack(header))

    def pack(self) -> bytes:
        """To `HEADER_BYTES` bytes."""
        return _HEADER.pack(*astuple(self))

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
    )
