"""Embedding mode: a prompt's last hidden state, scaled to length 1, in place of a first token.

Owns nothing: a function of a step's results. Which sequences are pooled, the request says. Runs in the engine thread.
"""

import dataclasses
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.sampler import SampledToken
from decoder_svc.sequence import Sequence


@torch.inference_mode()
def pool(sequences: Seq[Sequence], sampled: Seq[SampledToken], hidden: Tensor) -> list[SampledToken]:
    """The same results, with embeddings for the sequences that are pooled.

    hidden  [R, H]  last hidden state of each sequence, after the last norm
    """
    embeddings = F.normalize(hidden.float(), dim=1).tolist()
    return [
        dataclasses.replace(token, embedding=embedding) if sequence.is_pooled else token
        for sequence, token, embedding in zip(sequences, sampled, embeddings, strict=True)
    ]
