"""From logits to tokens, for all sequences of a step together.

Owns penalties, bans, log probabilities and the one transfer to the host; how a token is drawn is `draw`'s. A row's
token depends on nothing but its own row, so a stream that is batched with others gives the same tokens. Runs in the
engine thread, on the model's device. Legend: `R` rows, one for each sequence that gets a token; `W` wanted rows.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.messages import TokenLogprobs
from decoder_svc.draw import choose
from decoder_svc.grammar_masks import GrammarMasks
from decoder_svc.sequence import Sequence


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. It is not to be trusted when the row's logits were unusable, or when no token was possible."""

    token_id: int
    is_finite: bool
    logprobs: TokenLogprobs | None
    is_possible: bool = True
    embedding: list[float] | None = None  # instead of the token, of a sequence that is pooled


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Seq[Sequence], masks: GrammarMasks | None = None) -> list[SampledToken]:
        """One token for each row of `logits` [R, vocab], any float dtype; float32 ones are overwritten."""
        scores = logits.float()
        # NaN is the largest and the smallest of a row that has one; looking at each number takes ten times as long.
        is_finite = torch.isfinite(scores.amax(dim=1)) & torch.isfinite(scores.amin(dim=1))
        counts = [sequence.sampling.num_logprobs for sequence in sequences]
        wanted = {row: count for row, count in enumerate(counts) if count is not None}
        raw = scores[list(wanted)].log_softmax(dim=1) if wanted else None
        is_adjusted = self._adjust(scores, sequences)
        if masks is not None:
            masks.apply(scores)
        chosen = choose(scores, sequences)
        is_possible = is_finite
        if is_adjusted or masks is not None:
            is_possible = scores.gather(1, chosen[:, None]).squeeze(1) > -torch.inf
        return _on_host(chosen, is_finite, is_possible, raw, wanted)

    def _adjust(self, scores: Tensor, sequences: Seq[Sequence]) -> bool:
        """Apply penalties, biases and bans to the rows [R, vocab], in place; whether there were any."""
        is_adjusted = False
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sampling.repetition_penalty != 1.0:
                _penalise_repetition(scores[row], sequence.distinct_token_ids(), sampling.repetition_penalty)
            if sampling.frequency_penalty or sampling.presence_penalty:
                counts = sequence.output_counts()
                times = _on_device(np.fromiter(counts.values(), np.float32), scores)
                ids = _on_device(np.fromiter(counts, np.int64), scores)
                scores[row, ids] -= sampling.frequency_penalty * times + sampling.presence_penalty
            if sampling.logit_bias:
                ids = _on_device(np.fromiter(sampling.logit_bias, np.int64), scores)
                scores[row, ids] += _on_device(np.fromiter(sampling.logit_bias.values(), np.float32), scores)
            if sampling.allowed_token_ids is not None:
                _keep_only(scores[row], _on_device(np.array(sampling.allowed_token_ids, np.int64), scores))
                is_adjusted = True
            if banned := list(self._banned(sequence)):
                scores[row, _on_device(np.array(banned, np.int64), scores)] = -torch.inf
                is_adjusted = True
        return is_adjusted

    def _banned(self, sequence: Sequence) -> Iterator[int]:
        """Token ids that cannot come next: ends that are too early or ignored, and the last tokens of bad words."""
        sampling, output = sequence.sampling, sequence.output_token_ids
        if len(output) < sampling.min_tokens:
            yield from self._eos_token_ids
            yield from sampling.stop_token_ids
        elif sampling.ignore_eos:
            yield from self._eos_token_ids
        for *beginning, last in sampling.bad_words_ids:
            if not beginning or output[-len(beginning) :] == beginning:
                yield last


def prompt_logprobs(logits: Tensor, next_token_ids: Seq[int], num_logprobs: int) -> list[TokenLogprobs]:
    """Log probabilities of the prompt's own tokens, each at the position before it.

    logits          [W, vocab] any float dtype
    next_token_ids  the prompt's token behind each row
    """
    logprobs = logits.float().log_softmax(dim=1)
    chosen = torch.tensor(next_token_ids, device=logits.device)
    found = _logprobs_of(logprobs, chosen, num_logprobs).tolist()
    return [_token_logprobs(row, num_logprobs) for row in found]


def _penalise_repetition(scores: Tensor, seen: NDArray[np.int64], penalty: float) -> None:
    """Divide the positive scores of tokens that were seen, and multiply the others; `scores` [vocab], in place."""
    ids = _on_device(seen, scores)
    values = scores[ids]
    scores[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _keep_only(scores: Tensor, ids: Tensor) -> None:
    """Make all but some tokens impossible; `scores` [vocab], in place."""
    kept = scores[ids]
    scores.fill_(-torch.inf)
    scores[ids] = kept


def _on_device(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _logprobs_of(logprobs: Tensor, chosen: Tensor, num_logprobs: int) -> Tensor:
    """[W, vocab] and [W] -> [W, 1 + 2k] float64: the chosen one's, the k best ones' ids, and theirs."""
    parts = [logprobs.gather(1, chosen[:, None]).double()]
    if count := min(num_logprobs, logprobs.shape[1]):
        top = logprobs.topk(count, dim=1)
        parts += [top.indices.double(), top.values.double()]
    return torch.cat(parts, dim=1)


def _token_logprobs(row: Seq[float], num_logprobs: int) -> TokenLogprobs:
    """What a row of `_logprobs_of` says."""
    count = min(num_logprobs, (len(row) - 1) // 2)
    pairs = zip(row[1 : 1 + count], row[-count:] if count else (), strict=True)
    return TokenLogprobs(logprob=row[0], top=[(int(token_id), value) for token_id, value in pairs])


def _on_host(
    chosen: Tensor, is_finite: Tensor, is_possible: Tensor, raw: Tensor | None, wanted: dict[int, int]
) -> list[SampledToken]:
    """Bring everything to the host at once: each transfer would wait for the device.

    chosen, is_finite, is_possible  [R]
    raw                             [W, vocab] log probabilities of the rows of `wanted`, or None
    """
    parts = [torch.stack([chosen.double(), is_finite.double(), is_possible.double()], dim=1).flatten()]
    most = max(wanted.values(), default=0)
    if raw is not None:
        rows = torch.tensor(list(wanted), device=chosen.device)
        parts.append(_logprobs_of(raw, chosen[rows], most).flatten())
    values = torch.cat(parts).tolist()
    num_rows = chosen.shape[0]
    width = 0 if raw is None else 1 + 2 * min(most, raw.shape[1])
    logprobs: dict[int, TokenLogprobs] = {}
    for index, (row, count) in enumerate(wanted.items()):
        found = values[3 * num_rows + index * width : 3 * num_rows + (index + 1) * width]
        all_of_them = _token_logprobs(found, most)
        logprobs[row] = TokenLogprobs(logprob=all_of_them.logprob, top=all_of_them.top[:count])
    return [
        SampledToken(
            token_id=int(values[3 * row]),
            is_finite=bool(values[3 * row + 1]),
            is_possible=bool(values[3 * row + 2]),
            logprobs=logprobs.get(row),
        )
        for row in range(num_rows)
    ]
