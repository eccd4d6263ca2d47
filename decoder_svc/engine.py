"""The engine: requests and embeddings in, tokens out, one step at a time.

Owns the sequences, the KV cache, the embeddings that sequences still need, and the order schedule → build → run →
sample → report. Knows nothing of sockets, Redis or HTTP. Everything here runs in the engine thread; `engine_thread`
carries commands in and events out.
"""

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import structlog
from torch import Tensor

from common.errors import DeadlineExceeded, InvalidRequest, ModelFailure, TandemError
from common.messages import GenerateRequest, SequenceTokens
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from decoder_svc.block_manager import BlockManager
from decoder_svc.embedding_pool import EmbeddingPool
from decoder_svc.input_builder import build_model_input
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.text import TextModel
from decoder_svc.reports import ended, tokens_of, usage_of, without_tokens
from decoder_svc.sampler import SampledToken, Sampler
from decoder_svc.scheduler import Chunk, Scheduler
from decoder_svc.sequence import Prompt, Sequence

logger = structlog.get_logger(__name__)

# Parts of the protocol that this engine does not do; silence would be a wrong answer.
UNSUPPORTED = ("allowed_token_ids", "bad_words_ids", "num_prompt_logprobs", "grammar_kind", "grammar")

STEP_SECONDS = Histogram("tandem_decoder_step_seconds", "Time of one engine step", buckets=SECONDS_BUCKETS)
STEP_TOKENS = Histogram(
    "tandem_decoder_step_tokens",
    "Tokens in one engine step",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
)
TOKENS = Counter("tandem_decoder_tokens_total", "Tokens that went through the language model", ["kind"])
PREEMPTIONS = Counter("tandem_decoder_preemptions_total", "Sequences put back to be recomputed")
RUNNING = Gauge("tandem_decoder_running", "Sequences that hold KV blocks and run")
WAITING = Gauge("tandem_decoder_waiting", "Sequences that wait to be started")
KV_BLOCKS = Gauge("tandem_decoder_kv_blocks", "KV blocks by state", ["state"])


@dataclass(frozen=True)
class MediaWanted:
    """Embeddings that a request needs and that are not here. Sent once for a request, and again when more are."""

    request_id: str
    attempt: int
    keys: list[str]


@dataclass(frozen=True)
class MediaBudget:
    """What became of the embeddings that were given to the engine.

    `released_bytes` of them are needed no more (negative: some that were kept are needed again), and `first_in_need` is
    the request that is the next to need any.
    """

    released_bytes: int
    first_in_need: str | None


Event = SequenceTokens | MediaWanted | MediaBudget


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine."""

    max_model_len: int
    max_tokens_per_step: int
    max_sequences: int
    max_waiting: int
    embedding_cache_bytes: int


class Engine:
    """All sequences of one decoder."""

    def __init__(
        self,
        model: TextModel,
        kv_cache: KVCache,
        limits: EngineLimits,
        *,
        eos_token_ids: Seq[int],
        spatial_merge_size: int,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = Sampler(eos_token_ids)
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._merge_size = spatial_merge_size
        self.blocks = BlockManager(kv_cache.num_blocks, kv_cache.block_size)
        self.pool = EmbeddingPool(limits.embedding_cache_bytes)
        self.scheduler = Scheduler(
            self.blocks,
            max_tokens_per_step=limits.max_tokens_per_step,
            max_sequences=limits.max_sequences,
            max_waiting=limits.max_waiting,
            max_model_len=limits.max_model_len,
            has_media=self.pool.__contains__,
        )
        self._wanted: dict[Sequence, set[str]] = {}  # asked for and not arrived, of those that have media
        self._first_in_need: str | None = None

    @property
    def has_sequences(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, request: GenerateRequest, now: float) -> list[Event]:
        """Queue all choices of a request; tells which embeddings they need, or why they cannot be served."""
        replaced = self.cancel(request.request_id)  # an older attempt, whose gateway lost sight of us for a while
        try:
            self._check(request)
            sequences = self._sequences_of(request, now)
            self._check_held(sequences[0])
            # A choice that had its last token before the request came here is not run again.
            full = [s for s in sequences if s.output_token_ids and self._is_full(s)]
            sequences = [s for s in sequences if s not in full]
            for sequence in sequences:
                self.scheduler.admit(sequence)
        except TandemError as error:
            replaced += self.cancel(request.request_id)
            return [*replaced, without_tokens(request.request_id, request.attempt, "error", error)]
        events: list[Event] = [ended(tokens_of(s), s, "length", None, now) for s in full]
        return replaced + events + self._want_media(sequences, always=True) + self._media_budget()

    def add_embedding(self, key: str, embedding: Tensor, now: float) -> list[Event]:
        """An embedding `[tokens, H*(1+L)]` has arrived, checked."""
        self.pool.add(key, embedding)
        misfits: dict[str, TandemError] = {}  # of the requests that another request's embedding does not fit
        for sequence, keys in self._wanted.items():
            if key in keys:
                keys.discard(key)
                sequence.media_wait_s = now - sequence.arrived_at
                try:
                    self._check_held(sequence)
                except TandemError as error:
                    misfits[sequence.request_id] = error
        events = [event for request_id, error in misfits.items() for event in self.fail(request_id, error)]
        return events + self._media_budget()

    def fail(self, request_id: str, error: TandemError) -> list[Event]:
        """End a request with an error."""
        sequences = self._of_request(request_id)
        for sequence in sequences:
            self._forget(sequence)
        events: list[Event] = [
            without_tokens(s.request_id, s.attempt, "error", error, choice=s.choice) for s in sequences
        ]
        return events + self._media_budget()

    def cancel(self, request_id: str) -> list[Event]:
        """Forget a request; nobody waits for an answer."""
        for sequence in self._of_request(request_id):
            self._forget(sequence)
        return self._media_budget()

    def step(self) -> tuple[list[Event], bool]:
        """Run one step; tells what happened and whether any token ran. An error ends its request, not the engine."""
        began = time.monotonic()
        events = self._expire(began)
        preemptions = self.scheduler.num_preemptions
        chunks = self.scheduler.schedule()
        PREEMPTIONS.inc(self.scheduler.num_preemptions - preemptions)
        if chunks:
            events += self._run_and_report(chunks)
            self._measure(chunks, time.monotonic() - began)
        events += self._want_media(self.scheduler.sequences, always=False)
        return events + self._media_budget(), bool(chunks)

    def _run_and_report(self, chunks: Seq[Chunk]) -> list[Event]:
        """Run chunks together, or each apart when that fails: only the request that cannot run ends with an error."""
        try:
            sampled = self._run(chunks)
        except Exception as exc:  # the engine lives: every request of the step is answered
            if len(chunks) > 1:
                logger.warning("a step failed; its sequences run apart", exc_info=exc, sequences=len(chunks))
                return self._run_apart(chunks)
            logger.error("a step failed", exc_info=exc, request_id=chunks[0].sequence.request_id)
            error = ModelFailure("the language model failed on this request: report it with the request id")
            return self.fail(chunks[0].sequence.request_id, error)
        return self._report(chunks, sampled)

    def _run_apart(self, chunks: Seq[Chunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            if chunk.sequence in self.scheduler.running:  # another choice of its request may just have failed
                events += self._run_and_report([chunk])
        return events

    def _run(self, chunks: Seq[Chunk]) -> list[SampledToken]:
        """The tokens of chunks. Until all has gone well no sequence changes, so the chunks may be run once more."""
        model_input = build_model_input(chunks, self.pool.tensors, self._kv_cache.block_size, self._model.device)
        logits = self._model(model_input, self._kv_cache)
        sequences = [chunk.sequence for chunk in chunks if chunk.gives_token]
        sampled = self._sampler.sample(logits, sequences) if sequences else []
        for chunk in chunks:
            self.scheduler.computed(chunk)
        return sampled

    def _report(self, chunks: Seq[Chunk], sampled: Seq[SampledToken]) -> list[Event]:
        now = time.monotonic()
        events: list[Event] = []
        for chunk in chunks:
            if chunk.sequence.started_at is None:
                chunk.sequence.started_at = now
        sequences = [chunk.sequence for chunk in chunks if chunk.gives_token]
        for sequence, token in zip(sequences, sampled, strict=True):
            if not token.is_finite:
                error = ModelFailure("the language model gave values that are not finite for this request")
                self.scheduler.distrust(sequence)
                events += self.fail(sequence.request_id, error)
            elif sequence in self.scheduler.running:  # another choice of its request may just have failed
                events.append(self._accept(sequence, token, now))
        return events

    def _accept(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceTokens:
        """Append a token, or end the sequence with it."""
        is_first = sequence.first_token_at is None
        if is_first:
            sequence.first_token_at = now
        sampling = sequence.sampling
        is_stop = token.token_id in sampling.stop_token_ids or (
            token.token_id in self._eos_token_ids and not sampling.ignore_eos
        )
        if is_stop:
            self._forget(sequence)
            return ended(tokens_of(sequence), sequence, "stop", token.token_id, now)
        report = tokens_of(sequence, token)
        sequence.output_token_ids.append(token.token_id)
        if not self._is_full(sequence):
            # With the first token, so that the cached tokens are known also if the gateway ends the request itself.
            return msgspec.structs.replace(report, usage=usage_of(sequence, False)) if is_first else report
        self._forget(sequence)
        return ended(report, sequence, "length", None, now)

    def _is_full(self, sequence: Sequence) -> bool:
        return (
            len(sequence.output_token_ids) >= sequence.sampling.max_tokens
            or sequence.num_tokens >= self._limits.max_model_len
        )

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what would break the forward pass: everything that a span or a token id indexes."""
        vocab_size = self._model.config.vocab_size
        sampling = request.sampling
        used = [request.prompt_token_ids, *request.outputs, sampling.stop_token_ids, list(sampling.logit_bias)]
        if any(token >= vocab_size for ids in used for token in ids):
            raise InvalidRequest(f"a token id is outside the vocabulary of {vocab_size}")
        if len(request.outputs) not in (0, sampling.n):
            raise InvalidRequest(f"{len(request.outputs)} outputs so far were given for n = {sampling.n} choices")
        if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
            raise InvalidRequest("logit_bias holds a value that is not finite")
        if unsupported := [name for name in UNSUPPORTED if getattr(sampling, name) not in (None, [])]:
            raise InvalidRequest(f"this decoder does not support {', '.join(unsupported)}")
        end = 0
        for span in sorted((s for item in request.media for s in item.spans), key=lambda s: s.offset):
            t, h, w = span.grid
            if t * (h // self._merge_size) * (w // self._merge_size) != span.num_tokens:
                raise InvalidRequest(f"a media span of {span.num_tokens} tokens does not fit its grid {span.grid}")
            if span.offset < end or span.offset + span.num_tokens > len(request.prompt_token_ids):
                raise InvalidRequest(f"a media span at {span.offset} overlaps another or leaves the prompt")
            end = span.offset + span.num_tokens
        rows: dict[str, int] = {}
        if any(rows.setdefault(item.key, item.num_tokens) != item.num_tokens for item in request.media):
            raise InvalidRequest("one media item is in the prompt twice, with different numbers of tokens")

    def _check_held(self, sequence: Sequence) -> None:
        """Refuse a sequence whose spans do not take exactly the rows of an embedding that is here for its key."""
        rows: dict[str, int] = {}
        for span in sequence.prompt.spans:
            rows[span.key] = max(rows.get(span.key, 0), span.row_offset + span.num_tokens)
        for key, num_tokens in rows.items():
            if (held := self.pool.tensors.get(key)) is not None and len(held) != num_tokens:
                raise InvalidRequest(
                    f"a media item has {num_tokens} tokens in the prompt, but {len(held)} rows in its embedding"
                )

    def _sequences_of(self, request: GenerateRequest, now: float) -> list[Sequence]:
        prompt = Prompt.of(request, self._merge_size)
        outputs = request.outputs or [[]] * request.sampling.n
        return [
            Sequence(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=choice,
                prompt=prompt,
                sampling=request.sampling,
                deadline=now + request.time_left_s,
                arrived_at=now,
                output_token_ids=list(output),
            )
            for choice, output in enumerate(outputs)
        ]

    def _want_media(self, sequences: Seq[Sequence], *, always: bool) -> list[Event]:
        """Ask for embeddings that were not asked for yet; a new request is answered also when it needs none.

        Runs after every step: what a sequence has computed it needs no more, and a preempted one needs it again.
        """
        wanted: dict[tuple[str, int], list[str]] = {}
        for sequence in sequences:
            if not sequence.prompt.spans and not always:
                continue
            self.pool.need(sequence, [span.key for span in sequence.spans_from(sequence.num_computed_tokens)])
            asked = self._wanted.setdefault(sequence, set())
            missing = [key for key in self.scheduler.missing_media(sequence) if key not in asked]
            asked.update(missing)
            if missing or always:
                wanted.setdefault((sequence.request_id, sequence.attempt), []).extend(missing)
        return [
            MediaWanted(request_id, attempt, list(dict.fromkeys(keys)))
            for (request_id, attempt), keys in wanted.items()
        ]

    def _expire(self, now: float) -> list[Event]:
        events: list[Event] = []
        for request_id in {s.request_id for s in self.scheduler.sequences if s.deadline <= now}:
            events += self.fail(request_id, DeadlineExceeded("the request's time ran out in the decoder"))
        return events

    def _of_request(self, request_id: str) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.sequences if sequence.request_id == request_id]

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.pool.need(sequence, ())
        self._wanted.pop(sequence, None)
        self._measure_load()

    def _media_budget(self) -> list[Event]:
        """Tells of released bytes and of who is the next to need some, when either has changed."""
        released, first = self.pool.take_released_bytes(), None
        if self.pool.has_needs:
            first = next(s.request_id for s in self.scheduler.sequences if self.pool.needs_of(s))
        if not released and first == self._first_in_need:
            return []
        self._first_in_need = first
        return [MediaBudget(released, first)]

    def _measure(self, chunks: Seq[Chunk], seconds: float) -> None:
        decoded = sum(1 for chunk in chunks if chunk.num_tokens == 1)
        STEP_SECONDS.observe(seconds)
        STEP_TOKENS.observe(sum(chunk.num_tokens for chunk in chunks))
        TOKENS.labels("decode").inc(decoded)
        TOKENS.labels("prefill").inc(sum(chunk.num_tokens for chunk in chunks) - decoded)
        self._measure_load()

    def _measure_load(self) -> None:
        """After each step, and when a sequence leaves: an idle engine runs no step that would say so."""
        RUNNING.set(len(self.scheduler.running))
        WAITING.set(len(self.scheduler.waiting))
        KV_BLOCKS.labels("used").set(self.blocks.num_used)
        KV_BLOCKS.labels("free").set(self.blocks.num_free)
