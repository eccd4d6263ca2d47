"""How a token is drawn from adjusted logits: one of the filtered distribution, instead of the most likely one.

Owns the filters and the randomness, which is keyed by (seed, choice, position): a stream that is resumed elsewhere
gives the same tokens. Rows are grouped by what they need, and no row's token depends on who else is in its group. Runs
in the engine thread, on the model's device. Legend: `R` rows, `K` candidates of a row, best first.
"""

import hashlib
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from decoder_svc.sequence import GREEDY_BELOW, Sequence
from decoder_svc.transfers import index_on, to_device


def draw_others(chosen: Tensor, scores: Tensor, sequences: Seq[Sequence]) -> None:
    """Put a drawn token in place of the most likely one where a sequence asks for it.

    chosen  [R] int64           the most likely token of each row, in place
    scores  [R, vocab] float32  rows may hold NaN; their token is any
    """
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.sampling.temperature > GREEDY_BELOW:
            groups.setdefault(_num_candidates(sequence, scores.shape[1]), []).append(row)
    for num_candidates, rows in groups.items():
        index = index_on(rows, scores.device)
        drawn = [sequences[row] for row in rows]
        if num_candidates == 0:
            chosen[index] = _draw_unfiltered(scores[index], drawn)
        else:
            chosen[index] = _draw_filtered(*_best(scores[index], num_candidates), drawn)


def _num_candidates(sequence: Sequence, vocab_size: int) -> int:
    """How many of the best tokens a row's filters look at; 0 when it has none, and needs no order."""
    sampling = sequence.sampling
    if 0 < sampling.top_k < vocab_size:
        return sampling.top_k
    return vocab_size if sampling.top_p < 1.0 or sampling.min_p > 0.0 else 0


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of each row [R, vocab], and their ids [R, K]: best first, the lower id first of equals."""
    if count == scores.shape[1]:
        ordered, tokens = scores.sort(dim=1, descending=True, stable=True)
        return ordered, tokens
    tokens = scores.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    ordered, order = scores.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    return ordered, tokens.gather(1, order)


def _draw_filtered(ordered: Tensor, tokens: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Draw from the best scores [R, K] of rows; filters in transformers' order: temperature, top_k, top_p, min_p."""
    # The largest becomes 0, so that no temperature overflows it.
    probabilities = ((ordered - ordered[:, :1]) / _column(sequences, "temperature", ordered)).softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    is_kept = (before < _column(sequences, "top_p", ordered)) & (
        probabilities >= _column(sequences, "min_p", ordered) * probabilities[:, :1]
    )
    is_kept[:, 0] = True
    return tokens.gather(1, _invert(torch.where(is_kept, probabilities, 0.0), sequences)).squeeze(1)


def _draw_unfiltered(scores: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Draw from all tokens of rows [R, vocab], in the order of their ids: sorting a vocabulary takes far longer."""
    # In float32, whose exponentials take half the time; the sums are exact enough in float64.
    temperatures = _column(sequences, "temperature", scores).float()
    scaled = (scores - scores.amax(dim=1, keepdim=True)) / temperatures
    return _invert(scaled.softmax(dim=1), sequences).squeeze(1)


def _column(sequences: Seq[Sequence], name: str, like: Tensor) -> Tensor:
    """A sampling parameter of each row, [R, 1] float64."""
    values = [getattr(sequence.sampling, name) for sequence in sequences]
    return to_device(np.array(values, np.float64), like.device)[:, None]


def _invert(probabilities: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """The index [R, 1] at which each row's cumulative sum passes its one uniform number. Weights [R, N], any float."""
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    uniform = to_device(np.array([_uniform(s) for s in sequences]), probabilities.device)
    total = cumulative[:, -1]
    # Below the total, also after rounding: the index found then has a weight above zero.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, threshold[:, None], right=True)
    return index.clamp_(max=probabilities.shape[1] - 1)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) that depends on the seed, the choice and the position of the token alone."""
    fields = (sequence.sampling.seed, sequence.choice, len(sequence.output_token_ids))
    digest = hashlib.blake2b(b"".join(f.to_bytes(8, "little", signed=True) for f in fields), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
