"""The shapes of OpenAI's answers: a chat completion, the chunks of a streamed one, the list of models.

Pure functions from what happened to JSON values. Knows nothing of how they are sent.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.messages import TokenLogprobs
from gateway_svc.text.answer import AnswerDelta, Message
from gateway_svc.text.choice import LEAST_LOGPROB
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.tools import CallDelta


@dataclass(frozen=True)
class TokenCounts:
    """Usage of one request. Media tokens are part of the prompt's, reasoning tokens of the completion's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_media_tokens: int = 0
    encoded_media_tokens: int = 0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def usage(self, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's `usage` object, with our two counts of media tokens beside `cached_tokens`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cached_media_tokens": self.cached_media_tokens,
                "encoded_media_tokens": self.encoded_media_tokens,
            },
        }
        if reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage


@dataclass(frozen=True)
class CompletionHead:
    """What every chunk of one chat completion repeats."""

    completion_id: str
    model: str
    has_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, messages: Sequence[Message], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": message_fields(message),
                "logprobs": self._logprobs(message.logprobs),
                "finish_reason": message.finish_reason,
            }
            for index, message in enumerate(messages)
        ]
        return {**self._fields("chat.completion"), "choices": choices, "usage": usage}

    def role_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def delta_chunks(self, index: int, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """A chunk for each kind of news, then a finish chunk if this is the end."""
        logprobs = delta.logprobs
        for fields in _delta_fields(delta):
            yield self._chunk(index, fields, self._logprobs(logprobs), None)
            logprobs = ()
        if delta.finish_reason is not None:
            yield self._chunk(index, {}, None, delta.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: it has no choices."""
        return {**self._fields("chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._fields("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self.has_logprobs else None

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}


def message_fields(message: Message) -> dict[str, Any]:
    """An assistant's message. With calls and no text its content is null."""
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return fields


def _delta_fields(delta: AnswerDelta) -> Iterator[dict[str, Any]]:
    """The `delta` of each chunk."""
    if delta.reasoning:
        yield {"reasoning_content": delta.reasoning}
    if delta.content or (delta.logprobs and not delta.reasoning and not delta.calls):
        yield {"content": delta.content}
    for call in delta.calls:
        yield {"tool_calls": [_call_fields(call)]}


def _call_fields(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.call_id, "type": "function", "function": function}


def prompt_logprobs_field(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], table: TokenTable
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first, it and the likeliest ones by id."""
    fields: list[dict[str, Any] | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=False):
        ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top, start=1)]
        if all(other != token_id for other, _, _ in ranked):
            ranked.insert(0, (token_id, entry.logprob, None))  # type: ignore[arg-type]
        fields.append(
            {
                str(other): {
                    "logprob": max(logprob, LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": table.text_of([other]),
                }
                for other, logprob, rank in ranked
            }
        )
    return fields


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        "max_model_len": max_model_len,
    }
