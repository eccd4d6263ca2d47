"""`/v1/completions`: prompts that are text or token ids, one or many, continued as they are.

Owns the older shapes of OpenAI's API: its body, its log probabilities, `echo`. A prompt here is rendered by the
client, so special tokens in it are what they say; it has no media. Each prompt is a run of its own, and they go on
side by side. Runs in the request's task.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from common.messages import TokenLogprobs
from gateway_svc.http.middleware import RequestIds
from gateway_svc.http.sse import Puller, collect
from gateway_svc.routes.api import Api, documented, json_response
from gateway_svc.routes.merged import merged
from gateway_svc.routes.openai_response import TokenCounts
from gateway_svc.routes.text_run import Drafted, RunSpec, TextRun, TextService
from gateway_svc.schemas.sampling_fields import MAX_TOP_LOGPROBS, NOT_SERVED, SamplingFields, TokenId
from gateway_svc.schemas.strict_model import NotServed, NotServedFields, check_count
from gateway_svc.text.choice import LEAST_LOGPROB, ChoiceDelta, token_entry
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.grammar import grammar_of
from gateway_svc.text.sampling import check_vocabulary

MAX_PROMPTS = 256
DEFAULT_TOKENS = 16


def prompt_kind(value: object) -> str:
    """Which of its four forms a prompt has."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "token_lists"
    return "tokens" if isinstance(value, list) else "text"


_Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[_Tokens, Tag("tokens")]
    | Annotated[list[_Tokens], Field(max_length=MAX_PROMPTS), Tag("token_lists")],
    Discriminator(prompt_kind),
]


class CompletionRequest(SamplingFields):
    """A completion. Without `max_tokens`, an answer has 16 tokens, as in OpenAI's API."""

    not_served: ClassVar[NotServedFields] = {**NOT_SERVED, "suffix": NotServed(("",))}

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """With `echo`, none at all may be wanted: then one is generated and left out."""
        return max(1, DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives at each position; None without log probabilities."""
        return self.logprobs

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts."""
        return prompts_of(self.prompt)

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        prompt = body.get("prompt")
        if prompt_kind(prompt) != "tokens":
            check_count(prompt, MAX_PROMPTS, "prompt")

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        if self.is_echo_alone and not self.echo:
            raise InvalidRequest("max_tokens is 0, which needs echo to be true", param="max_tokens")
        num_choices = len(self.prompts) * (self.n or 1)
        if num_choices > MAX_PROMPTS:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts with n {self.n or 1} are {num_choices} choices, above the limit of "
                f"{MAX_PROMPTS}: send fewer",
                param="prompt",
            )
        if self.echo and self.logprobs is not None and self.stream:
            raise InvalidRequest("echo with logprobs needs stream to be false", param="echo")
        return self


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of any of the four forms."""
    if isinstance(prompt, str):
        return [prompt]
    numbers = [item for item in prompt if isinstance(item, int)]
    return [numbers] if numbers else [item for item in prompt if not isinstance(item, int)]


@dataclass
class Logprobs:
    """OpenAI's older shape: lists side by side."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, token: str, logprob: float | None, top: dict[str, float] | None) -> None:
        """One more token."""
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.end)
        self.end += len(token)

    def add_entries(self, entries: Sequence[dict[str, Any]]) -> None:
        """Tokens of an answer."""
        for entry in entries:
            self.add(entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})

    def add_prompt(self, token_ids: Sequence[int], known: Sequence[TokenLogprobs], table: TokenTable) -> None:
        """Tokens of a prompt; nothing is known of the first."""
        self.add(table.text_of(token_ids[:1]), None, None)
        for token_id, logprobs in zip(token_ids[1:], known, strict=False):
            top = [token_entry(table, other, logprob) for other, logprob in logprobs.top]
            self.add(
                table.text_of([token_id]),
                max(logprobs.logprob, LEAST_LOGPROB),
                {entry["token"]: entry["logprob"] for entry in top},
            )

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


class Completion:
    """One request: a run for each prompt. Iterate `deltas` once. Raises InvalidRequest, ModelNotFound."""

    def __init__(self, service: TextService, request: CompletionRequest, ids: RequestIds) -> None:
        self._request = request
        self._table = service.table
        self._service = service
        self._prompts = request.prompts
        self._num_choices = request.n or 1
        self._head = {"id": f"cmpl-{ids.internal}", "object": "text_completion", "created": int(time.time())}
        self._runs = [self._run(index, ids) for index in range(len(self._prompts))]
        self._ends: dict[int, int] = {}  # characters so far of each choice

    def _run(self, index: int, ids: RequestIds) -> TextRun:
        request, prompt = self._request, self._prompts[index]
        fields: SamplingFields = request
        if request.echo and request.logprobs is not None:
            fields = request.model_copy(update={"prompt_logprobs": request.logprobs})
        param = "prompt" if len(self._prompts) == 1 else f"prompt[{index}]"

        def draft(max_model_len: int) -> Drafted:
            kept = request.max_prompt_tokens(max_model_len)
            prompts = self._service.prompts
            if isinstance(prompt, str):
                if not prompt:
                    raise InvalidRequest(f"{param} is empty: send at least one token", param=param)
                drafted = prompts.draft_text(prompt, max_model_len, max_prompt_tokens=kept)
            else:
                check_vocabulary(prompt, self._service.backend.vocab_size, param)
                drafted = prompts.draft_tokens(prompt, max_model_len, max_prompt_tokens=kept)
            return Drafted(drafted, grammar=grammar_of(request))

        request_id = ids.internal if len(self._prompts) == 1 else f"{ids.internal}-{index}"
        return self._service.run(RunSpec("completion", fields, draft, prompt_param=param), request_id, ids.label)

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """Number of the prompt and what was added, until all have ended. Raises TandemError."""
        async with aclosing(merged([run.deltas() for run in self._runs])) as deltas:
            async for item in deltas:
                yield item

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` object: all prompts together."""
        counts = sum((run.counts for run in self._runs), TokenCounts())
        if self._request.is_echo_alone:
            counts = TokenCounts(counts.prompt_tokens, 0, counts.cached_tokens)
        return counts.usage()

    def completion(self, deltas: Sequence[tuple[int, ChoiceDelta]]) -> dict[str, Any]:
        """The whole answer."""
        of_choice: list[list[ChoiceDelta]] = [[] for _ in range(len(self._runs) * self._num_choices)]
        for prompt, delta in deltas:
            of_choice[prompt * self._num_choices + delta.index].append(delta)
        choices = [self._choice(index, own) for index, own in enumerate(of_choice)]
        return {**self._fields(), "choices": choices, "usage": self.usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The prompts, where they are wanted back."""
        for index in range(len(self._runs) * self._num_choices if self._request.echo else 0):
            text = self._prompt_text(index // self._num_choices)
            self._ends[index] = len(text)
            yield self._chunk(index, text, None, None)

    def events(self, item: tuple[int, ChoiceDelta]) -> Iterator[dict[str, Any]]:
        """What a delta adds."""
        prompt, delta = item
        index = prompt * self._num_choices + delta.index
        text, logprobs = ("", []) if self._request.is_echo_alone else (delta.text, delta.logprobs)
        shown = None
        if self._request.logprobs is not None:
            shown = Logprobs(end=self._ends.get(index, 0))
            shown.add_entries(logprobs)
            self._ends[index] = shown.end
        if text or logprobs or delta.finish_reason is not None:
            yield self._chunk(index, text, None if shown is None else shown.fields(), delta.finish_reason)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The usage, where it was asked for."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._fields(), "choices": [], "usage": self.usage()}

    def _choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        prompt = index // self._num_choices
        text = self._prompt_text(prompt) if self._request.echo else ""
        logprobs = Logprobs()
        if self._request.echo and self._request.logprobs is not None:
            run = self._runs[prompt]
            assert run.prompt is not None
            logprobs.add_prompt(run.prompt.token_ids, run.prompt_logprobs or [], self._table)
        if not self._request.is_echo_alone:
            text += "".join(delta.text for delta in deltas)
            logprobs.add_entries([entry for delta in deltas for entry in delta.logprobs])
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._request.logprobs is None else logprobs.fields(),
            "finish_reason": deltas[-1].finish_reason,
        }

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        options = self._request.stream_options
        fields = {**self._fields(), "choices": [choice]}
        return {**fields, "usage": None} if options is not None and options.include_usage else fields

    def _prompt_text(self, prompt: int) -> str:
        given, run = self._prompts[prompt], self._runs[prompt]
        is_whole = isinstance(given, str) and self._request.truncate_prompt_tokens is None
        if is_whole:
            return str(given)
        return self._table.text_of(run.prompt.token_ids if run.prompt is not None else [])

    def _fields(self) -> dict[str, Any]:
        return {**self._head, "model": self._request.model}


def add_completion_route(api: Api) -> None:
    """`/v1/completions`."""

    @api.app.post(
        "/v1/completions", tags=["completions"], **documented(CompletionRequest, "The completion.", has_stream=True)
    )
    async def create_completion(request: Request) -> Response:
        """Continue prompts, as one JSON object or, with `stream`, as server-sent events."""
        body, ids = await api.read(request, CompletionRequest)
        completion = Completion(api.service, body, ids)
        puller = Puller(completion.deltas(), request.receive)
        if body.stream:
            return await api.stream(puller, completion, ids)
        return json_response(completion.completion(await collect(puller)))
