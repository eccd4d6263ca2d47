"""The life of one generation in the HTTP half: prompt, media, sampling, tokens, counts.

Owns the order of these steps and the request's one log line, for every route that generates. A run is a stream of
deltas, whether the client wants it streamed or not; closing it cancels everything that goes on for the request. Knows
nothing of HTTP responses or of peers. Runs in the request's task; heavy work goes to threads.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from common.errors import InvalidRequest, ModelFailure, ModelNotFound, TandemError, error_info
from common.messages import GenerateRequest, MediaItem, Modality, SamplingParams, SequenceTokens, TokenLogprobs
from gateway_svc.backend import Backend, MediaOutcome, MediaReport
from gateway_svc.http.metrics import HttpMetrics
from gateway_svc.media.item import LoadedMedia, MediaReference
from gateway_svc.media.loader import MediaLoader
from gateway_svc.routes.openai_response import TokenCounts
from gateway_svc.schemas.sampling_fields import ProcessorKwargs, SamplingFields
from gateway_svc.text.choice import Choice, ChoiceDelta, StopRules
from gateway_svc.text.conversation import media_options
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.grammar import Grammar
from gateway_svc.text.prompt import Prompt, PromptBuilder, PromptDraft
from gateway_svc.text.sampling import SamplingDefaults, sampling_params, with_room

_MODALITIES: tuple[Modality, ...] = ("image", "video")
logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Drafted:
    """A prompt before its media, what these are, and what the answer must look like."""

    draft: PromptDraft
    references: Sequence[MediaReference] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True)
class RunSpec:
    """What a run is to do. `name` is that of its log line; `draft` is called with the context's length, in a thread."""

    name: str
    fields: SamplingFields
    draft: Callable[[int], Drafted]
    stops: Sequence[str] = ()
    processor_kwargs: ProcessorKwargs | None = None
    prompt_param: str = "messages"
    is_pooled: bool = False  # the answer is the prompt's embedding


@dataclass(frozen=True)
class TextService:
    """What every generation shares.

    `model_names[0]` is the name used inside the fleet. `text_threads` render and tokenize, and do nothing else, so
    that no name look-up or large file keeps a prompt waiting.
    """

    backend: Backend
    prompts: PromptBuilder
    media: MediaLoader
    table: TokenTable
    defaults: SamplingDefaults
    model_names: Sequence[str]
    metrics: HttpMetrics
    text_threads: Executor
    request_timeout_s: float
    is_embedding_model: bool = False

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name not in self.model_names:
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here: use {', '.join(self.model_names)}", param="model"
            )

    async def load_media(
        self,
        references: Sequence[MediaReference],
        processor_kwargs: ProcessorKwargs | None,
        *,
        fingerprint: str,
        cache_salt: str | None,
        deadline: float,
    ) -> list[LoadedMedia]:
        """All items, in order, with the options that the request gives for its media. Raises TandemError."""
        return await self.media.load(
            references,
            {modality: media_options(processor_kwargs, modality) for modality in _MODALITIES},
            fingerprint=fingerprint,
            cache_salt=cache_salt,
            deadline=deadline,
        )

    def run(self, spec: RunSpec, request_id: str, client_label: str | None) -> "TextRun":
        """One generation, not started. Raises ModelNotFound, and InvalidRequest where the model does not generate."""
        self.check_model(spec.fields.model)
        if self.is_embedding_model and not spec.is_pooled:
            raise InvalidRequest("the model is an embedding model: ask for /v1/embeddings", param="model")
        return TextRun(self, spec, request_id, client_label)


class TextRun:
    """One generation. Iterate `deltas` once; `counts` is right when they have ended."""

    def __init__(self, service: TextService, spec: RunSpec, request_id: str, client_label: str | None) -> None:
        self.prompt: Prompt | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.embedding: list[float] | None = None
        self._service = service
        self._spec = spec
        self._request_id = request_id
        self._client_label = client_label
        rules = StopRules.of(spec.fields, spec.stops)
        self._choices = [Choice(index, service.table, rules) for index in range(spec.fields.n or 1)]
        self._media: list[LoadedMedia] = []
        self._items: list[MediaItem] = []
        self._outcome_of_key: dict[str, MediaOutcome] = {}
        self._grammar: Grammar | None = None
        self._started = time.monotonic()
        self._deadline = self._started + min(service.request_timeout_s, spec.fields.timeout or math.inf)
        self._first_token_at: float | None = None

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Everything that is added to the choices, in order, until all have ended. Raises TandemError."""
        outcome = "cancelled"
        try:
            request = await self._prepare()
            async with aclosing(self._service.backend.generate(request, self._media, self._deadline)) as events:
                async for event in events:
                    if isinstance(event, MediaReport):
                        self._outcome_of_key.setdefault(event.key, event.outcome)
                    elif (delta := self._on_tokens(event)) is not None:
                        yield delta
                        if all(choice.finish_reason is not None for choice in self._choices):
                            break
                else:
                    raise ModelFailure("the decoder ended the request before all its choices were finished")
            outcome = "ok"
        except TandemError as error:
            outcome = error_info(error).code
            param = self._field_of(error)
            if param != error.param:
                raise type(error)(error.message, param=param, retry_after_s=error.retry_after_s) from error
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            self._finish(outcome)

    @property
    def counts(self) -> TokenCounts:
        """Token counts so far."""
        outcomes = self._media_outcomes()
        encoded = sum(num_tokens for _, outcome, num_tokens in outcomes if outcome == "encoded")
        reported = sum(num_tokens for _, outcome, num_tokens in outcomes if outcome is not None)
        return TokenCounts(
            prompt_tokens=len(self.prompt.token_ids) if self.prompt is not None else 0,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            # The first choice's: the others find in the cache what it has just computed.
            cached_tokens=self._choices[0].num_cached_tokens,
            cached_media_tokens=reported - encoded,
            encoded_media_tokens=encoded,
        )

    async def _prepare(self) -> GenerateRequest:
        """From the body to what a decoder takes. What can be refused without media is refused before its loading."""
        fields, service = self._spec.fields, self._service
        await service.backend.wait_for_decoder(self._deadline)
        max_model_len = service.backend.max_model_len
        run_in_threads = asyncio.get_running_loop().run_in_executor
        drafted, sampling = await run_in_threads(service.text_threads, self._draft, max_model_len)
        self._grammar = drafted.grammar
        facts = None
        if drafted.references:
            facts = await service.backend.fleet_facts()
            self._media = await service.load_media(
                drafted.references,
                self._spec.processor_kwargs,
                fingerprint=facts.fingerprint,
                cache_salt=fields.cache_salt,
                deadline=self._deadline,
            )
        prompt = await run_in_threads(
            service.text_threads, service.prompts.build, drafted.draft, self._media, max_model_len
        )
        self.prompt, self._items = prompt, prompt.media
        return GenerateRequest(
            request_id=self._request_id,
            model=service.model_names[0],
            fingerprint=facts.fingerprint if facts is not None else None,
            wire_dtype=facts.wire_dtype if facts is not None else None,
            prompt_token_ids=prompt.token_ids,
            media=prompt.media,
            sampling=with_room(sampling, max_model_len - len(prompt.token_ids)),
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            pooling="last" if self._spec.is_pooled else None,
            time_left_s=max(0.0, self._deadline - time.monotonic()),
        )

    def _draft(self, max_model_len: int) -> tuple[Drafted, SamplingParams]:
        """The prompt before its media, and the sampling. For a thread."""
        fields, service = self._spec.fields, self._service
        drafted = self._spec.draft(max_model_len)
        service.media.check_counts(drafted.references)
        return drafted, sampling_params(
            fields,
            service.defaults,
            room=max_model_len - drafted.draft.num_tokens,
            vocab_size=service.backend.vocab_size,
            grammar=drafted.grammar,
            bad_words_ids=service.prompts.bad_words_ids(fields.bad_words) if fields.bad_words else None,
        )

    def _field_of(self, error: TandemError) -> str | None:
        """The field to blame: of a refused constraint the one that asked for it, of a prompt the one of the route."""
        if type(error) is InvalidRequest and error.param is None and self._grammar is not None:
            return self._grammar.param
        return self._spec.prompt_param if error.param == "messages" else error.param

    def _media_outcomes(self) -> list[tuple[Modality, MediaOutcome | None, int]]:
        """Modality, outcome and tokens of each item. A picture that is there twice is encoded at most once."""
        seen: set[str] = set()
        outcomes: list[tuple[Modality, MediaOutcome | None, int]] = []
        for item in self._items:
            outcome = self._outcome_of_key.get(item.key)
            is_repeated = item.key in seen
            seen.add(item.key)
            outcomes.append((item.modality, "decoder" if is_repeated and outcome else outcome, item.num_tokens))
        return outcomes

    def _on_tokens(self, event: SequenceTokens) -> ChoiceDelta | None:
        """None for a choice that has ended by a stop string while others go on."""
        if event.choice >= len(self._choices):
            raise ModelFailure(f"the decoder answered for choice {event.choice} of {len(self._choices)}")
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._service.metrics.ttft_seconds.observe(self._first_token_at - self._started)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.embedding is not None:
            self.embedding = event.embedding
        choice = self._choices[event.choice]
        if choice.finish_reason is not None:
            return None
        delta = choice.feed(event)
        if delta.finish_reason is not None and event.finish_reason is None:
            self._service.backend.end_choice(self._request_id, event.choice)  # by a stop string
        return delta

    def _finish(self, outcome: str) -> None:
        now = time.monotonic()
        counts = self.counts
        metrics = self._service.metrics
        metrics.prompt_tokens.inc(counts.prompt_tokens)
        metrics.completion_tokens.inc(counts.completion_tokens)
        outcomes = self._media_outcomes()
        for modality, media_outcome, _ in outcomes:
            if media_outcome is not None:
                metrics.media_items.labels(modality, media_outcome).inc()
        longest = max(choice.num_tokens for choice in self._choices)
        if outcome == "ok" and self._first_token_at is not None and longest > 1:
            metrics.tpot_seconds.observe((now - self._first_token_at) / (longest - 1))
        ttft = None if self._first_token_at is None else round(self._first_token_at - self._started, 4)
        logger.info(
            self._spec.name,
            request_id=self._request_id,
            client_request_id=self._client_label,
            outcome=outcome,
            stream=bool(self._spec.fields.stream),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
            media_bytes=sum(item.source.num_bytes for item in self._media),
            media=[f"{modality}:{media_outcome or 'unknown'}" for modality, media_outcome, _ in outcomes],
            ttft_s=ttft,
            total_s=round(now - self._started, 4),
        )
