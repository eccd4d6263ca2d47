"""Log probabilities of a prompt's own tokens, chunk by chunk while it is prefilled.

Owns which rows of a step's logits are the prompt's and which give tokens. A sequence keeps its entries by position,
so a step that is run again, or a prompt that is computed again, changes nothing. Runs in the engine thread.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from decoder_svc.sampler import prompt_logprobs
from decoder_svc.scheduler import Chunk


@torch.inference_mode()
def take_prompt_logprobs(chunks: Seq[Chunk], logits: Tensor) -> Tensor:
    """Give the sequences of chunks what they want of their prompts; returns the rows that give tokens.

    logits   [R, vocab]  of each chunk its prompt rows, then one if it gives a token
    returns  [tokens, vocab]
    """
    if not any(chunk.num_prompt_rows for chunk in chunks):
        return logits
    row = 0
    for chunk in chunks:
        if count := chunk.num_prompt_rows:
            _take(chunk, logits[row : row + count])
        row += count + chunk.gives_token
    return logits[token_rows(chunks, logits.device)]


def token_rows(chunks: Seq[Chunk], device: torch.device) -> Tensor:
    """Which of a step's rows [R] give tokens: each chunk's last, if it gives one. [tokens] int64."""
    rows, row = [], 0
    for chunk in chunks:
        row += chunk.num_prompt_rows + chunk.gives_token
        if chunk.gives_token:
            rows.append(row - 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _take(chunk: Chunk, logits: Tensor) -> None:
    """Keep the entries of one chunk's rows [rows, vocab]."""
    sequence = chunk.sequence
    count = sequence.sampling.num_prompt_logprobs
    assert sequence.prompt_logprobs is not None
    assert count is not None
    end = chunk.start + len(logits)
    found = prompt_logprobs(logits, sequence.tokens(chunk.start + 1, end + 1), count)
    sequence.prompt_logprobs[chunk.start : end] = found
