"""One choice of one request: its tokens, its media spans, its blocks and how far it has come.

Pure data with small questions about it. Knows no torch, sockets or clock; changed by the scheduler and the engine
alone, in the engine thread.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from common.messages import GenerateRequest, MediaItem, SamplingParams, TokenLogprobs
from decoder_svc.grammar import GrammarState
from decoder_svc.positions import MediaSpan, mrope_positions

# Temperatures that leave only the most likely token, as in vLLM.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class VisionSpan:
    """Placeholder tokens `[offset, end)` of the prompt, which take rows from `row_offset` of an item's embedding."""

    offset: int
    num_tokens: int
    key: str
    row_offset: int

    @property
    def end(self) -> int:
        """First position behind the span."""
        return self.offset + self.num_tokens


@dataclass(frozen=True)
class Prompt:
    """What all choices of a request share. `positions` is `[3, prompt]` int64; later tokens add `delta` to theirs."""

    token_ids: list[int]
    spans: tuple[VisionSpan, ...]
    positions: NDArray[np.int64]
    delta: int
    cache_salt: str | None

    @classmethod
    def of(cls, request: GenerateRequest, merge_size: int) -> "Prompt":
        """The prompt of a request whose spans were checked."""
        media_spans = sorted(
            (MediaSpan(span.offset, span.grid, merge_size) for item in request.media for span in item.spans),
            key=lambda span: span.offset,
        )
        positions, delta = mrope_positions(len(request.prompt_token_ids), media_spans)
        spans = sorted((span for item in request.media for span in _spans_of(item)), key=lambda span: span.offset)
        return cls(request.prompt_token_ids, tuple(spans), positions, delta, request.cache_salt)

    @cached_property
    def distinct_token_ids(self) -> NDArray[np.int64]:
        """Each token id of the prompt once."""
        return np.unique(np.asarray(self.token_ids, np.int64))


def _spans_of(item: MediaItem) -> list[VisionSpan]:
    spans, row = [], 0
    for span in item.spans:
        spans.append(VisionSpan(span.offset, span.num_tokens, item.key, row))
        row += span.num_tokens
    return spans


@dataclass(eq=False)
class Sequence:
    """A choice that is waiting, running or finished."""

    request_id: str
    attempt: int
    choice: int
    prompt: Prompt
    sampling: SamplingParams
    deadline: float
    arrived_at: float
    output_token_ids: list[int] = field(default_factory=list)
    block_table: "array[int]" = field(default_factory=lambda: array("i"))
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0  # also those that the device has been given and is computing
    num_unread_tokens: int = 0  # of the output, chosen on the device and not known here yet; 0 or 1
    is_ended: bool = False
    num_cached_tokens: int | None = None  # of the prompt, when it was first given blocks
    started_at: float | None = None
    first_token_at: float | None = None
    media_wait_s: float = 0.0
    priority: int = 0  # the lower, the earlier
    number: int = 0  # in the order of admission
    num_overtaken: int = 0  # how often one that was admitted later was put before it
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1, 2, ...; None when not wanted
    is_pooled: bool = False  # the answer is the last token's hidden state
    grammar: GrammarState | None = None
    _counts: Counter[int] = field(default_factory=Counter)
    _num_counted: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.prompt.token_ids)

    @cached_property
    def takes_most_likely(self) -> bool:
        """Whether each token is the model's most likely one, with nothing to adjust before and no more to tell of it.

        A grammar is not looked at.
        """
        sampling = self.sampling
        is_adjusted = (
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.logit_bias
            or sampling.allowed_token_ids is not None
            or sampling.min_tokens
            or sampling.ignore_eos
            or sampling.bad_words_ids
        )
        return sampling.temperature <= GREEDY_BELOW and sampling.num_logprobs is None and not is_adjusted

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, also those that are not read."""
        return len(self.output_token_ids) + self.num_unread_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output together, also what of it is not read."""
        return len(self.prompt.token_ids) + len(self.output_token_ids) + self.num_unread_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output together, as far as the ids are known."""
        return len(self.prompt.token_ids) + len(self.output_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_computed_tokens + 1 == self.num_tokens > len(self.prompt.token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids `[start, end)` of prompt and output, as far as they are known."""
        prompt, output = self.prompt.token_ids, self.output_token_ids
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)]
        return prompt[start:end] + output[: max(0, end - len(prompt))]

    @property
    def num_shareable_tokens(self) -> int:
        """Tokens that need not be computed if the cache holds them: not the newest, nor any whose logits are wanted."""
        if self.prompt_logprobs is None:
            return self.num_tokens - 1
        return min(self.num_tokens - 1, len(self.prompt_logprobs))

    def output_counts(self) -> Counter[int]:
        """How often each token is in the output; counts only what came since the last call."""
        self._counts.update(self.output_token_ids[self._num_counted :])
        self._num_counted = len(self.output_token_ids)
        return self._counts

    def distinct_token_ids(self) -> NDArray[np.int64]:
        """Each token id of prompt and output once."""
        output = np.fromiter(self.output_counts(), np.int64)
        return np.union1d(self.prompt.distinct_token_ids, output)

    def spans_from(self, position: int) -> Seq[VisionSpan]:
        """Spans that have tokens at or behind a position."""
        spans = self.prompt.spans
        return [span for span in spans if span.end > position] if spans else ()

    def hash_blocks(self, block_size: int) -> None:
        """Extend `block_hashes` to all full blocks of the tokens that are known."""
        while (len(self.block_hashes) + 1) * block_size <= self.num_known_tokens:
            start = len(self.block_hashes) * block_size
            previous = self.block_hashes[-1] if self.block_hashes else self._root_hash()
            self.block_hashes.append(self._hash_block(previous, start, start + block_size))

    def _root_hash(self) -> bytes:
        salt = self.prompt.cache_salt
        return b"" if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()

    def _hash_block(self, previous: bytes, start: int, end: int) -> bytes:
        """SHA-256 over the chain so far, the token ids, and for media the key, its place and its rows."""
        digest = hashlib.sha256(previous)
        digest.update(np.asarray(self.tokens(start, end), np.int64).tobytes())
        for span in self.spans_from(start):
            if span.offset >= end:
                break
            first, last = max(start, span.offset), min(end, span.end)
            where = np.asarray([first - start, last - start, span.row_offset + first - span.offset], np.int64)
            digest.update(bytes.fromhex(span.key) + where.tobytes())
        return digest.digest()
