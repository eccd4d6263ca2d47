"""Drawing tokens at once, for tests that have no engine."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from decoder_svc.grammar_masks import GrammarMasks
from decoder_svc.sampler import SampledToken, Sampler
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import Readback


def sample_with(
    sampler: Sampler, logits: Tensor, sequences: Seq[Sequence], masks: GrammarMasks | None = None
) -> list[SampledToken]:
    """One token for each row of `logits` [R, vocab]."""
    readback = Readback(torch.device("cpu"))
    drawn = sampler.draw(logits, sequences, masks, readback)
    readback.start()
    return drawn.sampled(readback.wait())
