"""Runs the text model over packed steps with permuted blocks, as the engine does, for comparison in tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_svc.kv_budget import make_kv_cache
from decoder_svc.model.text import TextModel
from decoder_svc.model_input import ModelInput

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Prompt:
    """One sequence: ids [n], positions [3, n], and its vision tokens (prompt offsets [V], payload [V, H*(1+L)])."""

    input_ids: Tensor
    positions: Tensor
    vision_offsets: Tensor
    vision_embeds: Tensor | None

    def __len__(self) -> int:
        return self.input_ids.shape[0]


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, end)` of prompt number `prompt`."""

    prompt: int
    start: int
    end: int


class PagedRun:
    """A cache shared by some prompts, whose blocks are interleaved and out of order."""

    def __init__(
        self, model: TextModel, prompts: Sequence[Prompt], seed: int = 0, block_size: int = BLOCK_SIZE
    ) -> None:
        self.model, self.prompts, self.block_size = model, prompts, block_size
        self.max_blocks = max(-(-len(prompt) // block_size) for prompt in prompts)
        num_blocks = 1 + self.max_blocks * len(prompts)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.tables = order.view(len(prompts), self.max_blocks).to(torch.int32)
        self.cache = make_kv_cache(model, num_blocks, block_size)

    def model_input(self, chunks: Sequence[Chunk]) -> ModelInput:
        slots, rows, embeds, starts, block_size = [], [], [], [0], self.block_size
        for chunk in chunks:
            prompt, tokens = self.prompts[chunk.prompt], torch.arange(chunk.start, chunk.end)
            slots.append(self.tables[chunk.prompt].long()[tokens // block_size] * block_size + tokens % block_size)
            is_here = (prompt.vision_offsets >= chunk.start) & (prompt.vision_offsets < chunk.end)
            rows.append(prompt.vision_offsets[is_here] - chunk.start + starts[-1])
            if prompt.vision_embeds is not None:
                embeds.append(prompt.vision_embeds[is_here])
            starts.append(starts[-1] + chunk.end - chunk.start)
        parts = [(self.prompts[c.prompt], slice(c.start, c.end)) for c in chunks]
        return ModelInput(
            input_ids=torch.cat([prompt.input_ids[part] for prompt, part in parts]),
            positions=torch.cat([prompt.positions[:, part] for prompt, part in parts], dim=1),
            slot_mapping=torch.cat(slots),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
            block_tables=self.tables[[chunk.prompt for chunk in chunks]],
            vision_rows=torch.cat(rows),
            vision_embeds=torch.cat(embeds) if embeds else None,
            logits_rows=torch.arange(starts[-1]),
            query_lens=tuple(chunk.end - chunk.start for chunk in chunks),
            kv_lens=tuple(chunk.end for chunk in chunks),
        )

    def step(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Logits of every row, one tensor for each chunk."""
        logits = self.model(self.model_input(chunks), self.cache)
        return list(logits.split([chunk.end - chunk.start for chunk in chunks]))


def run_in_chunks(model: TextModel, prompt: Prompt, size: int, seed: int = 0) -> Tensor:
    """Logits [n, vocab] of a prompt that is prefilled `size` tokens at a time."""
    run = PagedRun(model, [prompt], seed)
    steps = [Chunk(0, start, min(start + size, len(prompt))) for start in range(0, len(prompt), size)]
    return torch.cat([run.step([chunk])[0] for chunk in steps])
