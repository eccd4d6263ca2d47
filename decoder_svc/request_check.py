"""What a decoder refuses of a request before it is queued: everything that would break, or bend, the forward pass.

Owns the check of token ids, spans and sampling against this model. Pure: reads a request and raises InvalidRequest.
Used in the engine thread.
"""

import math
from collections.abc import Iterator

from common.errors import InvalidRequest
from common.messages import GenerateRequest, SamplingParams

# Entries of one report: a message has a limit, and so has what one request may have kept for it.
MAX_PROMPT_LOGPROB_ENTRIES = 1 << 18


def check_request(request: GenerateRequest, vocab_size: int, merge_size: int) -> None:
    """Refuse what cannot be run: everything that a span or a token id indexes. Raises InvalidRequest."""
    if any(token >= vocab_size for ids in _all_token_ids(request) for token in ids):
        raise InvalidRequest(f"a token id is outside the vocabulary of {vocab_size}")
    _check_choices(request)
    _check_sampling(request.sampling)
    _check_prompt_logprobs(request)
    _check_spans(request, merge_size)


def _all_token_ids(request: GenerateRequest) -> Iterator[list[int]]:
    sampling = request.sampling
    yield request.prompt_token_ids
    yield from request.outputs
    yield sampling.stop_token_ids
    yield list(sampling.logit_bias)
    yield sampling.allowed_token_ids or []
    yield from sampling.bad_words_ids


def _check_choices(request: GenerateRequest) -> None:
    n = request.sampling.n
    if len(request.outputs) not in (0, n):
        raise InvalidRequest(f"{len(request.outputs)} outputs so far were given for n = {n} choices")
    if any(choice >= n for choice in request.finished):
        raise InvalidRequest(f"choice {max(request.finished)} is said to be finished, but n = {n}")
    sampling = request.sampling
    is_generating = n > 1 or request.outputs or sampling.grammar_kind or sampling.num_prompt_logprobs is not None
    if request.pooling is not None and is_generating:
        raise InvalidRequest("a request for an embedding has one choice, no output, no grammar and no prompt_logprobs")


def _check_sampling(sampling: SamplingParams) -> None:
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequest("logit_bias holds a value that is not finite")
    if sampling.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids is empty: name at least one token", param="allowed_token_ids")
    if any(not word for word in sampling.bad_words_ids):
        raise InvalidRequest("bad_words holds a word without tokens: leave it out", param="bad_words")


def _check_prompt_logprobs(request: GenerateRequest) -> None:
    count = request.sampling.num_prompt_logprobs
    if count is None:
        return
    entries = (1 + count) * len(request.prompt_token_ids)
    if entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs {count} for {len(request.prompt_token_ids)} prompt tokens are {entries} values, above "
            f"the limit of {MAX_PROMPT_LOGPROB_ENTRIES}: ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def _check_spans(request: GenerateRequest, merge_size: int) -> None:
    end = 0
    for span in sorted((s for item in request.media for s in item.spans), key=lambda s: s.offset):
        t, h, w = span.grid
        if t * (h // merge_size) * (w // merge_size) != span.num_tokens:
            raise InvalidRequest(f"a media span of {span.num_tokens} tokens does not fit its grid {span.grid}")
        if span.offset < end or span.offset + span.num_tokens > len(request.prompt_token_ids):
            raise InvalidRequest(f"a media span at {span.offset} overlaps another or leaves the prompt")
        end = span.offset + span.num_tokens
    rows: dict[str, int] = {}
    if any(rows.setdefault(item.key, item.num_tokens) != item.num_tokens for item in request.media):
        raise InvalidRequest("one media item is in the prompt twice, with different numbers of tokens")
