"""The shapes of OpenAI's answers: a completion, the chunks of a streamed one, the list of models.

Pure functions from what happened to JSON values. Knows nothing of how they are sent.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.choice import ChoiceDelta


@dataclass(frozen=True)
class TokenCounts:
    """Usage of one request. Media tokens are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_media_tokens: int
    encoded_media_tokens: int

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` object, with our two counts of media tokens beside `cached_tokens`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cached_media_tokens": self.cached_media_tokens,
                "encoded_media_tokens": self.encoded_media_tokens,
            },
        }


@dataclass(frozen=True)
class CompletionHead:
    """What every chunk of one completion repeats."""

    completion_id: str
    model: str
    num_choices: int
    has_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, deltas: Sequence[ChoiceDelta], counts: TokenCounts) -> dict[str, Any]:
        """The whole answer from all its deltas."""
        of_choice: list[list[ChoiceDelta]] = [[] for _ in range(self.num_choices)]
        for delta in deltas:
            of_choice[delta.index].append(delta)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(delta.text for delta in own)},
                "logprobs": self._logprobs([entry for delta in own for entry in delta.logprobs]),
                "finish_reason": own[-1].finish_reason,
            }
            for index, own in enumerate(of_choice)
        ]
        return {**self._fields("chat.completion"), "choices": choices, "usage": counts.usage()}

    def role_chunks(self) -> Iterator[dict[str, Any]]:
        """The first chunk of each choice."""
        for index in range(self.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def delta_chunks(self, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """A content chunk if there is anything to show, then a finish chunk if this is the end."""
        if delta.text or delta.logprobs:
            yield self._chunk(delta.index, {"content": delta.text}, self._logprobs(delta.logprobs), None)
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, {}, None, delta.finish_reason)

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: it has no choices."""
        return {**self._fields("chat.completion.chunk"), "choices": [], "usage": counts.usage()}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._fields("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self.has_logprobs else None

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        "max_model_len": max_model_len,
    }
