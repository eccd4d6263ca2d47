"""Log probabilities of a prompt's own tokens, chunk by chunk while it is prefilled.

Owns which rows of a step's logits are the prompt's and which give tokens. A sequence keeps its entries by position,
so a step that is run again, or a prompt that is computed again, changes nothing. Runs in the engine thread.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from decoder_svc.sampler import logprobs_of, token_logprobs
from decoder_svc.scheduler import Chunk
from decoder_svc.transfers import Readback, index_on


@dataclass(frozen=True)
class PromptLogprobs:
    """What a step tells of its prompts: chunks, and the part of its readback [rows, 1 + 2k] for each."""

    parts: list[tuple[Chunk, int]]

    @classmethod
    def of(cls, chunks: Seq[Chunk], logits: Tensor, readback: Readback) -> "PromptLogprobs":
        """From the logits of a step: of each chunk its prompt rows, then one if it gives a token. [R, vocab]."""
        parts, row = [], 0
        for chunk in chunks:
            if count := chunk.num_prompt_rows:
                parts.append((chunk, readback.add(_entries(chunk, logits[row : row + count]))))
            row += count + chunk.gives_token
        return cls(parts)

    def keep(self, arrived: Seq[Tensor]) -> None:
        """Give the sequences their entries, once the readback's parts have arrived."""
        for chunk, part in self.parts:
            sequence, rows = chunk.sequence, arrived[part].tolist()
            count = sequence.sampling.num_prompt_logprobs
            assert sequence.prompt_logprobs is not None
            assert count is not None
            sequence.prompt_logprobs[chunk.start : chunk.start + len(rows)] = [
                token_logprobs(row, count) for row in rows
            ]


def token_rows(chunks: Seq[Chunk]) -> list[int]:
    """Which rows of a step's logits give tokens: each chunk's last, if it gives one."""
    rows, row = [], 0
    for chunk in chunks:
        row += chunk.num_prompt_rows + chunk.gives_token
        if chunk.gives_token:
            rows.append(row - 1)
    return rows


def _entries(chunk: Chunk, logits: Tensor) -> Tensor:
    """Of a chunk's rows [rows, vocab] the prompt's own next tokens, and the best: [rows, 1 + 2k] float64."""
    next_token_ids = chunk.sequence.tokens(chunk.start + 1, chunk.start + len(logits) + 1)
    num_logprobs = chunk.sequence.sampling.num_prompt_logprobs
    assert num_logprobs is not None
    return logprobs_of(logits.float().log_softmax(dim=1), index_on(next_token_ids, logits.device), num_logprobs)
