"""From logits to tokens, for all sequences of a step together.

Owns penalties, bans and log probabilities; how a token is drawn is `draw`'s. What is chosen stays on the device until a
`Readback` brings it to the host. A row's token depends on nothing but its own row, so a stream that is batched with
others gives the same tokens. Runs in the engine thread, on the model's device. Legend: `R` rows, one for each sequence
that gets a token; `W` wanted rows.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.messages import TokenLogprobs
from decoder_svc.draw import draw_others
from decoder_svc.grammar_masks import GrammarMasks
from decoder_svc.model.kernels import Kernels
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import Readback, index_on, to_device


class SampledToken(NamedTuple):
    """A chosen token. It is not to be trusted when the row's logits were unusable, or when no token was possible."""

    token_id: int
    is_finite: bool
    logprobs: TokenLogprobs | None
    is_possible: bool = True
    embedding: list[float] | None = None  # instead of the token, of a sequence that is pooled


@dataclass(frozen=True)
class Drawn:
    """Tokens that were chosen on the device.

    token_ids  [R] int64         there
    state      parts of a readback [R]: the token, whether its row is finite, whether it is possible
    logprobs   part of a readback [W, 1 + 2k] of the rows of `wanted`, or None
    """

    token_ids: Tensor
    state: tuple[int, int, int]
    logprobs: int | None
    wanted: dict[int, int]

    def sampled(self, parts: Seq[Tensor]) -> list[SampledToken]:
        """The same on the host, once the readback's parts have arrived."""
        found: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            rows = parts[self.logprobs].tolist()
            found = {
                row: token_logprobs(values, count)
                for (row, count), values in zip(self.wanted.items(), rows, strict=True)
            }
        columns = (parts[part].tolist() for part in self.state)
        return [
            SampledToken(int(token), bool(is_finite), found.get(row), bool(is_possible))
            for row, (token, is_finite, is_possible) in enumerate(zip(*columns, strict=True))
        ]


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, eos_token_ids: Seq[int], kernels: Kernels) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._kernels = kernels

    def draw(self, logits: Tensor, sequences: Seq[Sequence], masks: GrammarMasks | None, readback: Readback) -> Drawn:
        """One token for each row of `logits` [R, vocab], any float dtype; float32 ones are overwritten."""
        most_likely, is_finite = self._kernels.most_likely(logits)
        if masks is None and all(sequence.takes_most_likely for sequence in sequences):
            return Drawn(most_likely, _add_state(readback, most_likely, is_finite, is_finite), None, {})
        return self._draw_adjusted(logits, is_finite, sequences, masks, readback)

    @torch.inference_mode()
    def _draw_adjusted(
        self,
        logits: Tensor,
        is_finite: Tensor,
        sequences: Seq[Sequence],
        masks: GrammarMasks | None,
        readback: Readback,
    ) -> Drawn:
        scores = logits.float()
        counts = [sequence.sampling.num_logprobs for sequence in sequences]
        wanted = {row: count for row, count in enumerate(counts) if count is not None}
        rows = index_on(list(wanted), scores.device)
        raw = scores.index_select(0, rows).log_softmax(dim=1) if wanted else None
        is_adjusted = self._adjust(scores, sequences)
        if masks is not None:
            masks.apply(scores)
        chosen, _ = self._kernels.most_likely(scores)
        draw_others(chosen, scores, sequences)
        is_possible = is_finite
        if is_adjusted or masks is not None:
            is_possible = scores.gather(1, chosen[:, None]).squeeze(1) > -torch.inf
        state = _add_state(readback, chosen, is_finite, is_possible)
        logprobs = None
        if raw is not None:
            logprobs = readback.add(logprobs_of(raw, chosen.index_select(0, rows), max(wanted.values())))
        return Drawn(chosen, state, logprobs, wanted)

    def _adjust(self, scores: Tensor, sequences: Seq[Sequence]) -> bool:
        """Apply penalties, biases and bans to the rows [R, vocab], in place; whether there were any."""
        is_adjusted = False
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sampling.repetition_penalty != 1.0:
                _penalise_repetition(scores[row], sequence.distinct_token_ids(), sampling.repetition_penalty)
            if sampling.frequency_penalty or sampling.presence_penalty:
                counts = sequence.output_counts()
                times = to_device(np.fromiter(counts.values(), np.float32), scores.device)
                ids = to_device(np.fromiter(counts, np.int64), scores.device)
                scores[row, ids] -= sampling.frequency_penalty * times + sampling.presence_penalty
            if sampling.logit_bias:
                ids = to_device(np.fromiter(sampling.logit_bias, np.int64), scores.device)
                scores[row, ids] += to_device(np.fromiter(sampling.logit_bias.values(), np.float32), scores.device)
            if sampling.allowed_token_ids is not None:
                _keep_only(scores[row], to_device(np.array(sampling.allowed_token_ids, np.int64), scores.device))
                is_adjusted = True
            if banned := list(self._banned(sequence)):
                scores[row, to_device(np.array(banned, np.int64), scores.device)] = -torch.inf
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


def _add_state(readback: Readback, *columns: Tensor) -> tuple[int, int, int]:
    token, is_finite, is_possible = (readback.add(column) for column in columns)
    return token, is_finite, is_possible


def _penalise_repetition(scores: Tensor, seen: NDArray[np.int64], penalty: float) -> None:
    """Divide the positive scores of tokens that were seen, and multiply the others; `scores` [vocab], in place."""
    ids = to_device(seen, scores.device)
    values = scores[ids]
    scores[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _keep_only(scores: Tensor, ids: Tensor) -> None:
    """Make all but some tokens impossible; `scores` [vocab], in place."""
    kept = scores[ids]
    scores.fill_(-torch.inf)
    scores[ids] = kept


def logprobs_of(logprobs: Tensor, chosen: Tensor, num_logprobs: int) -> Tensor:
    """[W, vocab] and [W] -> [W, 1 + 2k] float64: the chosen one's, the k best ones' ids, and theirs."""
    parts = [logprobs.gather(1, chosen[:, None]).double()]
    if count := min(num_logprobs, logprobs.shape[1]):
        top = logprobs.topk(count, dim=1)
        parts += [top.indices.double(), top.values.double()]
    return torch.cat(parts, dim=1)


def token_logprobs(row: Seq[float], num_logprobs: int) -> TokenLogprobs:
    """What a row of `logprobs_of` says, of its best `num_logprobs`."""
    most = (len(row) - 1) // 2
    pairs = zip(row[1 : 1 + most], row[1 + most :], strict=True)
    return TokenLogprobs(
        logprob=row[0], top=[(int(token_id), value) for token_id, value in islice(pairs, num_logprobs)]
    )
