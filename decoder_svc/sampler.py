"""From logits to tokens, for all sequences of a step together.

Owns penalties, filters, log probabilities and the randomness, which is keyed by (seed, choice, position): a stream that
is resumed elsewhere, or batched with others, gives the same tokens. Runs in the engine thread, on the model's device.
Legend: `R` rows, one for each sequence that gets a token.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from common.messages import TokenLogprobs
from decoder_svc.sequence import Sequence

# Temperatures that leave only the most likely token, as in vLLM.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. `is_finite` is false when the row's logits were unusable: then there is no choice to trust."""

    token_id: int
    is_finite: bool
    logprobs: TokenLogprobs | None


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """One token for each row of `logits` [R, vocab], any float dtype; float32 ones are overwritten."""
        scores = logits.float()
        is_finite = torch.isfinite(scores).all(dim=1).tolist()
        raw = scores.clone() if any(s.sampling.num_logprobs is not None for s in sequences) else scores
        for row, sequence in enumerate(sequences):
            self._adjust(scores[row], sequence)
        chosen = scores.argmax(dim=1)
        random_rows = [
            row for row, s in enumerate(sequences) if s.sampling.temperature > GREEDY_BELOW and is_finite[row]
        ]
        if random_rows:
            index = torch.tensor(random_rows, device=scores.device)
            chosen[index] = _draw(scores[index], [sequences[row] for row in random_rows])
        return [
            SampledToken(token_id, is_finite[row], _logprobs(raw[row], token_id, sequences[row].sampling.num_logprobs))
            for row, token_id in enumerate(chosen.tolist())
        ]

    def _adjust(self, scores: Tensor, sequence: Sequence) -> None:
        """Apply penalties, biases and bans to one row [vocab], in place."""
        sampling, output = sequence.sampling, sequence.output_token_ids
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.tokens(0, sequence.num_tokens))), device=scores.device)
            values = scores[seen]
            penalty = sampling.repetition_penalty
            scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if output and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = Counter(output)
            ids = torch.tensor(list(counts), device=scores.device)
            times = torch.tensor(list(counts.values()), device=scores.device)
            scores[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
            scores[ids] += torch.tensor(list(sampling.logit_bias.values()), device=scores.device)
        if len(output) < sampling.min_tokens:
            scores[[*self._eos_token_ids, *sampling.stop_token_ids]] = -torch.inf
        elif sampling.ignore_eos:
            scores[self._eos_token_ids] = -torch.inf


def _draw(scores: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Draw from the filtered distributions of rows [R, vocab] by inverting their cumulative sums.

    One uniform number a row decides, so a token depends on its own row alone. Filters in transformers' order:
    temperature, top_k, top_p, min_p.
    """
    device = scores.device
    temperatures = torch.tensor([s.sampling.temperature for s in sequences], device=device)
    ordered, tokens = scores.sort(dim=1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / temperatures[:, None]  # the largest is 0, so no temperature overflows it
    top_k = torch.tensor([s.sampling.top_k or ordered.shape[1] for s in sequences], device=device)
    ordered[torch.arange(ordered.shape[1], device=device) >= top_k[:, None]] = -torch.inf
    probabilities = ordered.softmax(dim=1, dtype=torch.float64)
    before = probabilities.cumsum(dim=1) - probabilities
    top_p = torch.tensor([s.sampling.top_p for s in sequences], device=device, dtype=torch.float64)
    min_p = torch.tensor([s.sampling.min_p for s in sequences], device=device, dtype=torch.float64)
    is_kept = (before < top_p[:, None]) & (probabilities >= min_p[:, None] * probabilities[:, :1])
    is_kept[:, 0] = True
    cumulative = torch.where(is_kept, probabilities, 0.0).cumsum(dim=1)
    uniform = torch.tensor([_uniform(s) for s in sequences], device=device, dtype=torch.float64)
    index = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    index = torch.minimum(index, is_kept.sum(dim=1, keepdim=True) - 1)
    return tokens.gather(1, index).squeeze(1)


def _uniform(sequence: Sequence) -> float:
    """A number in [0, 1) that depends on the seed, the choice and the position of the token alone."""
    fields = (sequence.sampling.seed, sequence.choice, len(sequence.output_token_ids))
    digest = hashlib.blake2b(b"".join(f.to_bytes(8, "little", signed=True) for f in fields), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _logprobs(scores: Tensor, token_id: int, num_logprobs: int | None) -> TokenLogprobs | None:
    """Log probabilities of the unmodified distribution: of the chosen token and of the most likely ones."""
    if num_logprobs is None:
        return None
    logprobs = scores.log_softmax(dim=0)
    top = logprobs.topk(min(num_logprobs, logprobs.shape[0])) if num_logprobs else None
    pairs = [] if top is None else list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=pairs)
