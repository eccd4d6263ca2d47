"""A backend without peers: it answers with scripted tokens and remembers what it was asked.

`harness` builds the whole HTTP half around it, with the tiny tokenizer and the demo model's media limits.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from common.embedding import FleetFacts
from common.embedding_cache import Survey
from common.errors import DecoderUnavailable, TandemError
from common.messages import GenerateRequest, MediaOptions, SequenceTokens, TokenLogprobs, Usage, VideoFacts
from common.processor_config import ImageSettings, ProcessorConfig, VideoSettings
from gateway_svc.app import create_app
from gateway_svc.backend import GenerationEvent, MediaOutcome, MediaReport
from gateway_svc.http.middleware import Access
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.media.item import LoadedMedia
from gateway_svc.media.loader import MediaLimits, MediaLoader
from gateway_svc.routes.api import HttpLimits
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.prompt import PromptBuilder
from gateway_svc.text.sampling import SamplingDefaults
from tests.tiny_tokenizer import CHAT_TEMPLATE, media_token_ids, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = "tandem-demo"
_COMMON: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "rescale_factor": 1 / 255,
}
CONFIG = ProcessorConfig(
    image=ImageSettings(min_pixels=16_384, max_pixels=262_144, **_COMMON),
    video=msgspec.convert(
        {
            **_COMMON,
            "min_pixels": 4_096,
            "max_pixels": 1_572_864,
            "fps": 2.0,
            "min_frames": 4,
            "max_frames": 768,
            "cap_pixels_per_frame": False,
            "max_video_tokens": 768,
        },
        VideoSettings,
    ),
    tokens=media_token_ids(TOKENIZER),
)


@dataclass
class FakeBackend:
    """Each choice answers with `answers[choice % len(answers)]`, one token an event, the choices interleaved."""

    answers: Sequence[str] = ("Hello there.",)
    max_model_len: int = 2048
    vocab_size: int = 512
    finish_reason: str = "stop"
    media_outcome: MediaOutcome = "encoded"
    error: Exception | None = None
    error_after_tokens: int = 0
    ready: bool = True
    facts: VideoFacts | None = None
    before_token: Callable[[int], Any] | None = None  # awaited before each token, with its number
    requests: list[GenerateRequest] = field(default_factory=list)
    media: list[list[LoadedMedia]] = field(default_factory=list)
    probes: list[tuple[MediaOptions, int]] = field(default_factory=list)
    num_closed: int = 0
    has_cache: bool = True
    cached: set[str] = field(default_factory=set)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ended_choices: list[tuple[str, int]] = field(default_factory=list)

    def end_choice(self, request_id: str, choice: int) -> None:
        self.ended_choices.append((request_id, choice))

    async def wait_for_decoder(self, deadline: float) -> None:
        if not self.max_model_len:
            raise DecoderUnavailable("no decoder has been seen yet: try again later", retry_after_s=5.0)

    async def fleet_facts(self) -> FleetFacts:
        return FleetFacts("f" * 64, "float32")

    async def probe_video(self, key: str, options: MediaOptions, source: bytes, deadline: float) -> VideoFacts:
        self.probes.append((options, len(source)))
        assert self.facts is not None
        return self.facts

    async def warm(self, media: Sequence[LoadedMedia], facts: FleetFacts, deadline: float) -> dict[str, MediaOutcome]:
        self.media.append(list(media))
        outcomes: dict[str, MediaOutcome] = {
            item.key: "cache" if item.key in self.cached else "encoded" for item in media
        }
        self.cached.update(outcomes)
        return outcomes

    async def forget_media(self, key: str) -> bool | None:
        if not self.has_cache:
            return None
        is_here = key in self.cached
        self.cached.discard(key)
        return is_here

    async def survey_media(self, fingerprint: str, *, is_removed: bool) -> Survey | None:
        survey = Survey(len(self.cached), 1000 * len(self.cached))
        if is_removed:
            self.cached.clear()
        return survey if self.has_cache else None

    def is_ready(self) -> bool:
        return self.ready

    def status(self) -> dict[str, object]:
        return {"decoders": 1 if self.ready else 0, "encoders": 0, "redis": "absent"}

    async def generate(
        self, request: GenerateRequest, media: Sequence[LoadedMedia], deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.media.append(list(media))
        try:
            for item in {item.key: item for item in request.media}.values():
                yield MediaReport(item.key, self.media_outcome, item.num_tokens)
            for number, event in enumerate(self._events(request)):
                if self.before_token is not None:
                    await self.before_token(number)
                if self.error is not None and number >= self.error_after_tokens:
                    raise self.error
                yield event
        finally:
            self.num_closed += 1
            self.closed.set()

    def _events(self, request: GenerateRequest) -> list[SequenceTokens]:
        sampling = request.sampling
        answers = [self.answers[choice % len(self.answers)] for choice in range(sampling.n)]
        ids = [TOKENIZER.encode(answer, add_special_tokens=False).ids[: sampling.max_tokens] for answer in answers]
        events = []
        for offset in range(max(map(len, ids)) + 1):
            for choice, tokens in enumerate(ids):
                if offset > len(tokens):
                    continue
                is_last = offset == len(tokens)
                is_cut = len(tokens) == sampling.max_tokens
                events.append(
                    SequenceTokens(
                        request_id=request.request_id,
                        attempt=0,
                        choice=choice,
                        offset=offset,
                        tokens=[] if is_last else [tokens[offset]],
                        logprobs=None if sampling.num_logprobs is None or is_last else [self._logprobs(tokens, offset)],
                        finish_reason=("length" if is_cut else self.finish_reason) if is_last else None,
                        stop_token_id=TOKENIZER.token_to_id("<|im_end|>") if is_last and not is_cut else None,
                        usage=Usage(
                            prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(tokens), cached_tokens=3
                        )
                        if is_last
                        else None,
                    )
                )
        return events

    def _logprobs(self, tokens: list[int], offset: int) -> TokenLogprobs:
        return TokenLogprobs(
            logprob=-0.5 * (offset + 1), top=[(tokens[offset], -0.5), (offset, -2.0), (7, float("-inf"))]
        )


class VectorBackend(FakeBackend):
    """Answers with a vector of length 1 that begins with the prompt's size."""

    def _events(self, request: GenerateRequest) -> list[SequenceTokens]:
        size = float(len(request.prompt_token_ids))
        return [
            SequenceTokens(
                request_id=request.request_id,
                attempt=0,
                choice=0,
                offset=0,
                tokens=[],
                finish_reason="stop",
                embedding=[size, 3.0, 4.0, 0.5],
            )
        ]


# TLS settings take long to load, and most tests fetch nothing.
_SHARED_FETCHER = MediaFetcher(FetchLimits())


@dataclass
class Harness:
    """The application, its backend and a client in the same process."""

    app: FastAPI
    backend: FakeBackend
    client: httpx.AsyncClient
    registry: CollectorRegistry

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat completion with sensible defaults."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)


def harness(
    backend: FakeBackend | None = None,
    *,
    limits: HttpLimits | None = None,
    media_limits: MediaLimits | None = None,
    fetcher: MediaFetcher | None = None,
    defaults: SamplingDefaults | None = None,
    template: str = CHAT_TEMPLATE,
    access: Access | None = None,
    **settings: Any,
) -> Harness:
    """Everything of the HTTP half around a fake backend."""
    backend = backend or FakeBackend()
    registry = CollectorRegistry()
    app = create_app(
        backend,
        PromptBuilder(tiny_tokenizer(), ChatTemplate(template), CONFIG.tokens, merge_size=2),
        MediaLoader(backend, CONFIG, fetcher or _SHARED_FETCHER, media_limits or MediaLimits()),
        token_table=TokenTable(TOKENIZER),
        model_names=[MODEL, "alias"],
        version="1.2.3",
        sampling_defaults=defaults or SamplingDefaults(temperature=0.0),
        limits=limits,
        access=access,
        registry=registry,
        **settings,
    )
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")
    return Harness(app, backend, client, registry)


def overloaded(error: TandemError, retry_after_s: float) -> TandemError:
    """The error with a time to wait."""
    error.retry_after_s = retry_after_s
    return error
