"""One choice of a completion as it grows: its text so far, its log probabilities, how it ends.

Joins detokenizer and stop strings, and keeps log probabilities in step with the text: those of withheld text are
withheld, those of a stop string are never shown. Pure; one object per choice, fed by the request's task.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.messages import SequenceTokens, TokenLogprobs
from gateway_svc.schemas.sampling_fields import SamplingFields
from gateway_svc.text.detokenizer import Detokenizer, StopStrings, TokenTable

# JSON has no minus infinity; OpenAI's API has this value for "impossible".
LEAST_LOGPROB = -9999.0


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What one event added to a choice. Quick to make, since there is one for each token of each choice."""

    index: int
    text: str
    logprobs: Sequence[dict[str, Any]] = ()
    finish_reason: str | None = None
    num_tokens: int = 0


@dataclass(frozen=True)
class _PendingLogprobs:
    end: int  # characters of the choice's text up to and with this token
    entry: dict[str, Any]


@dataclass(frozen=True)
class StopRules:
    """What ends the text, and what of it is shown. Stop strings count once there are `min_tokens` tokens."""

    stops: Sequence[str] = ()
    min_tokens: int = 0
    is_stop_shown: bool = False
    keep_special: bool = False

    @classmethod
    def of(cls, fields: SamplingFields, more_stops: Sequence[str] = ()) -> "StopRules":
        """The rules of a request."""
        return cls(
            stops=[*(fields.stop or ()), *more_stops],
            min_tokens=fields.min_tokens or 0,
            is_stop_shown=bool(fields.include_stop_str_in_output),
            keep_special=fields.skip_special_tokens is False,
        )


class Choice:
    """The state of one choice."""

    def __init__(self, index: int, table: TokenTable, rules: StopRules) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._table = table
        self._detokenizer = Detokenizer(table, keep_special=rules.keep_special)
        self._stops = StopStrings(rules.stops, is_shown=rules.is_stop_shown)
        self._min_tokens = rules.min_tokens
        self._num_decoded = 0
        self._num_shown = 0
        self._pending: deque[_PendingLogprobs] = deque()

    def feed(self, event: SequenceTokens) -> ChoiceDelta:
        """Take new tokens, until a stop string is complete or the event itself is the end."""
        if event.usage is not None:
            self.num_cached_tokens = event.usage.cached_tokens
        shown = ""
        num_before = self.num_tokens
        logprobs = event.logprobs or ()
        for position, token_id in enumerate(event.tokens):
            shown += self._take(token_id, logprobs[position] if position < len(logprobs) else None)
            if self._stops.is_hit:
                break
        if event.finish_reason is not None and not self._stops.is_hit:
            shown += self._stops.feed(self._detokenizer.flush())
            shown += self._stops.flush()
            self.finish_reason = event.finish_reason
            self.num_tokens += event.stop_token_id is not None
        if self._stops.is_hit:
            self.finish_reason = "stop"
        self._num_shown += len(shown)
        num_tokens = self.num_tokens - num_before
        return ChoiceDelta(self.index, shown, self._released(), self.finish_reason, num_tokens)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        text = self._detokenizer.feed(token_id)
        self._num_decoded += len(text)
        self.num_tokens += 1
        if logprobs is not None:
            self._pending.append(_PendingLogprobs(self._num_decoded, self._entry(token_id, logprobs)))
        return text if self.num_tokens < self._min_tokens else self._stops.feed(text)

    def _released(self) -> list[dict[str, Any]]:
        """Log probabilities of the tokens whose text is now shown in full."""
        released: list[dict[str, Any]] = []
        while self._pending and self._pending[0].end <= self._num_shown:
            released.append(self._pending.popleft().entry)
        return released

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [token_entry(self._table, other_id, logprob) for other_id, logprob in logprobs.top]
        return {**token_entry(self._table, token_id, logprobs.logprob), "top_logprobs": top}


def token_entry(table: TokenTable, token_id: int, logprob: float) -> dict[str, Any]:
    """A token and its log probability, as OpenAI's API has them."""
    raw = table.bytes_of(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}
