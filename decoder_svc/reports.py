"""What the decoder tells a gateway of a sequence: its new tokens, how it ended, its counts and its times.

Pure: reads sequences and changes none. Used in the engine thread, and by the server for requests that never reached it
or that it dropped.
"""

import msgspec

from common.errors import TandemError
from common.messages import FinishReason, SequenceTimes, SequenceTokens, Usage
from common.wire import error_detail
from decoder_svc.sampler import SampledToken
from decoder_svc.sequence import Sequence


def without_tokens(
    request_id: str, attempt: int, reason: FinishReason, error: TandemError | None = None, *, choice: int = 0
) -> SequenceTokens:
    """The end of a choice without a token; an error, or a reason that sends it elsewhere, ends all its request."""
    return SequenceTokens(
        request_id=request_id,
        attempt=attempt,
        choice=choice,
        offset=0,
        tokens=[],
        finish_reason=reason,
        error=None if error is None else error_detail(error),
    )


def tokens_of(sequence: Sequence, token: SampledToken | None = None) -> SequenceTokens:
    """The report of a token that is about to be appended, or of none."""
    return SequenceTokens(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        choice=sequence.choice,
        offset=len(sequence.output_token_ids),
        tokens=[] if token is None else [token.token_id],
        logprobs=None if token is None or token.logprobs is None else [token.logprobs],
        prompt_logprobs=None if sequence.output_token_ids else sequence.prompt_logprobs,
    )


def ended(
    report: SequenceTokens, sequence: Sequence, reason: FinishReason, stop_token_id: int | None, now: float
) -> SequenceTokens:
    """A report that is the last of its sequence."""
    return msgspec.structs.replace(
        report,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        usage=usage_of(sequence, stop_token_id is not None),
        times=_times(sequence, now),
    )


def usage_of(sequence: Sequence, is_stop: bool) -> Usage:
    """Counts so far; the token that stopped it counts, as in vLLM."""
    return Usage(
        prompt_tokens=sequence.num_prompt_tokens,
        completion_tokens=len(sequence.output_token_ids) + int(is_stop),
        cached_tokens=sequence.num_cached_tokens or 0,
    )


def _times(sequence: Sequence, now: float) -> SequenceTimes:
    started = sequence.started_at or now
    first = sequence.first_token_at or now
    return SequenceTimes(
        queue_s=started - sequence.arrived_at,
        media_wait_s=sequence.media_wait_s,
        prefill_s=first - started,
        decode_s=max(0.0, now - first),
    )
