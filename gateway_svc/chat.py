"""The life of one chat completion in the HTTP half: check, tokenize, load media, generate, count.

Owns the order of these steps and the request's one log line. A run is a stream of deltas, whether the client wants
it streamed or not; closing it cancels everything that goes on for the request. Knows nothing of HTTP responses or of
peers. Runs in the request's task; heavy work goes to threads.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from common.errors import ModelFailure, ModelNotFound, TandemError, error_info
from common.messages import GenerateRequest, MediaItem, Modality, SequenceTokens
from gateway_svc.backend import Backend, MediaOutcome, MediaReport
from gateway_svc.choice import Choice, ChoiceDelta
from gateway_svc.conversation import conversation_of, media_options
from gateway_svc.detokenizer import TokenTable
from gateway_svc.http_metrics import HttpMetrics
from gateway_svc.media import LoadedMedia, MediaReference
from gateway_svc.media_loader import MediaLoader
from gateway_svc.openai_response import CompletionHead, TokenCounts
from gateway_svc.openai_schema import ChatCompletionRequest
from gateway_svc.prompt import PromptBuilder, PromptDraft
from gateway_svc.sampling import SamplingDefaults, sampling_params, with_room

_MODALITIES: tuple[Modality, ...] = ("image", "video")
logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ChatService:
    """What every chat completion shares.

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

    def run(self, request: ChatCompletionRequest, request_id: str, client_label: str | None) -> "ChatRun":
        """One completion, not started. Raises ModelNotFound."""
        if request.model not in self.model_names:
            raise ModelNotFound(
                f"the model {request.model[:200]!r} is not served here: use {', '.join(self.model_names)}",
                param="model",
            )
        return ChatRun(self, request, request_id, client_label)


class ChatRun:
    """One completion. Iterate `deltas` once; `counts` is right when they have ended."""

    def __init__(
        self, service: ChatService, request: ChatCompletionRequest, request_id: str, client_label: str | None
    ) -> None:
        self.head = CompletionHead(
            completion_id=f"chatcmpl-{request_id}",
            model=request.model,
            num_choices=request.n or 1,
            has_logprobs=bool(request.logprobs),
        )
        self._service = service
        self._request = request
        self._request_id = request_id
        self._client_label = client_label
        self._choices = [Choice(index, service.table, request.stop or []) for index in range(request.n or 1)]
        self._media: list[LoadedMedia] = []
        self._items: list[MediaItem] = []
        self._outcome_of_key: dict[str, MediaOutcome] = {}
        self._num_prompt_tokens = 0
        self._started = time.monotonic()
        self._deadline = self._started + service.request_timeout_s
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
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=max(choice.num_cached_tokens for choice in self._choices),
            cached_media_tokens=reported - encoded,
            encoded_media_tokens=encoded,
        )

    async def _prepare(self) -> GenerateRequest:
        """From the body to what a decoder takes. What can be refused without media is refused before its loading."""
        request, service = self._request, self._service
        await service.backend.wait_for_decoder(self._deadline)
        max_model_len = service.backend.max_model_len
        run_in_threads = asyncio.get_running_loop().run_in_executor
        draft, references = await run_in_threads(service.text_threads, self._draft, max_model_len)
        sampling = sampling_params(
            request,
            service.defaults,
            room=max_model_len - draft.num_tokens,
            vocab_size=service.backend.vocab_size,
        )
        fingerprint = None
        if references:
            fingerprint = await service.backend.fingerprint()
            self._media = await self._load(references, fingerprint)
        prompt = await run_in_threads(service.text_threads, service.prompts.build, draft, self._media, max_model_len)
        self._num_prompt_tokens = len(prompt.token_ids)
        self._items = prompt.media
        return GenerateRequest(
            request_id=self._request_id,
            model=service.model_names[0],
            fingerprint=fingerprint,
            prompt_token_ids=prompt.token_ids,
            media=prompt.media,
            sampling=with_room(sampling, max_model_len - self._num_prompt_tokens),
            cache_salt=request.cache_salt,
            time_left_s=max(0.0, self._deadline - time.monotonic()),
        )

    def _draft(self, max_model_len: int) -> tuple[PromptDraft, list[MediaReference]]:
        """The prompt before its media, and what these are. For a thread."""
        conversation, references = conversation_of(self._request)
        self._service.media.check_counts(references)
        return self._service.prompts.draft(conversation, max_model_len), references

    async def _load(self, references: Sequence[MediaReference], fingerprint: str) -> list[LoadedMedia]:
        kwargs = self._request.mm_processor_kwargs
        return await self._service.media.load(
            references,
            {modality: media_options(kwargs, modality) for modality in _MODALITIES},
            fingerprint=fingerprint,
            cache_salt=self._request.cache_salt,
            deadline=self._deadline,
        )

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
        choice = self._choices[event.choice]
        return choice.feed(event) if choice.finish_reason is None else None

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
            "chat completion",
            request_id=self._request_id,
            client_request_id=self._client_label,
            outcome=outcome,
            stream=bool(self._request.stream),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
            media_bytes=sum(len(item.source) for item in self._media),
            media=[f"{modality}:{media_outcome or 'unknown'}" for modality, media_outcome, _ in outcomes],
            ttft_s=ttft,
            total_s=round(now - self._started, 4),
        )
