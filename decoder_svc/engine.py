"""The engine: requests and embeddings in, tokens out, one step at a time.

Owns the sequences, the KV cache, the embeddings that sequences still need, and the order schedule → build → run →
sample → report. Knows nothing of sockets, Redis or HTTP. Everything here runs in the engine thread; `engine_thread`
carries commands in and events out.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import structlog
from torch import Tensor

from common.errors import DeadlineExceeded, InvalidRequest, ModelFailure, TandemError
from common.messages import FinishReason, GenerateRequest, SequenceTokens
from decoder_svc.block_manager import BlockManager
from decoder_svc.embedding_pool import EmbeddingPool
from decoder_svc.engine_metrics import EngineMetrics
from decoder_svc.grammar import Grammar
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.text import TextModel
from decoder_svc.reports import ended, tokens_of, usage_of, without_tokens
from decoder_svc.request_check import check_request
from decoder_svc.sampler import SampledToken, Sampler
from decoder_svc.scheduler import Chunk, Scheduler
from decoder_svc.sequence import Prompt, Sequence
from decoder_svc.step_runner import StepRunner

logger = structlog.get_logger(__name__)


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
        self._runner = StepRunner(model, kv_cache, Sampler(eos_token_ids), self.pool.tensors)
        self._metrics = EngineMetrics(self.scheduler, self.blocks)
        self._wanted: dict[Sequence, set[str]] = {}  # asked for and not arrived, of those that have media
        self._first_in_need: str | None = None
        self._is_checked = False
        self.backlog_s = 0.0
        """How long the prompts that are queued take to compute, when it was last measured."""

    @property
    def has_sequences(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, request: GenerateRequest, now: float, grammar: Grammar | None = None) -> list[Event]:
        """Queue all choices of a request; tells which embeddings they need, or why they cannot be served.

        `grammar` is the request's, compiled.
        """
        self._is_checked = False
        replaced = self.cancel(request.request_id)  # an older attempt, whose gateway lost sight of us for a while
        try:
            check_request(request, self._model.config.vocab_size, self._merge_size)
            sequences = self._sequences_of(request, now, grammar)
            if sequences:
                self._check_held(sequences[0])
            # A choice that had its last token before the request came here is not run again.
            ends = {s: reason for s in sequences if s.output_token_ids and (reason := self._end_of(s))}
            sequences = [s for s in sequences if s not in ends]
            for sequence in sequences:
                self.scheduler.admit(sequence)
        except TandemError as error:
            replaced += self.cancel(request.request_id)
            return [*replaced, without_tokens(request.request_id, request.attempt, "error", error)]
        events: list[Event] = [ended(tokens_of(s), s, reason, None, now) for s, reason in ends.items()]
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

    def cancel(self, request_id: str, choice: int | None = None) -> list[Event]:
        """Forget a request, or one choice of it; nobody waits for an answer."""
        for sequence in self._of_request(request_id):
            if choice is None or sequence.choice == choice:
                self._forget(sequence)
        return self._media_budget()

    def check_idle(self) -> list[Event]:
        """Count what is held although nothing runs, and say so in a metric; asserts that the pool is whole."""
        if not self.has_sequences:
            if not self._is_checked:  # it takes a while with many blocks
                self.blocks.check()
                self._is_checked = True
            self._metrics.checked(embedding_bytes=self.pool.needed_bytes, needs=len(self._wanted))
        self._metrics.look_at_device(time.monotonic())
        return []

    def measure_backlog(self) -> list[Event]:
        """Note how long the queued prompts take. Not done with each step: it looks at every sequence."""
        self.backlog_s = self._metrics.measure_backlog()
        return []

    def step(self) -> tuple[list[Event], bool]:
        """Run one step; tells what happened and whether any token ran. An error ends its request, not the engine."""
        began = time.monotonic()
        events = self._expire(began)
        chunks = self.scheduler.schedule()
        if chunks:
            events += self._run_and_report(chunks)
            self._metrics.stepped(chunks, time.monotonic() - began)
            self._measure_load()
        events += self._want_media(self.scheduler.sequences, always=False)
        return events + self._media_budget(), bool(chunks)

    def _run_and_report(self, chunks: Seq[Chunk]) -> list[Event]:
        """Run chunks together, or each apart when that fails: only the request that cannot run ends with an error."""
        try:
            sampled = self._run(chunks)
        except Exception as exc:  # the engine lives: every request of the step is answered
            if self._model.ranks.is_in_step:
                raise  # the other ranks wait in the middle of it: this process ends, and gateways go on elsewhere
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
        step = self._runner.launch(chunks)
        self._runner.sample(step)
        sampled = self._runner.read(step)
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
            error = _error_of(sequence, token)
            if error is not None:
                if not token.is_finite:
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
        if token.embedding is not None:
            self._forget(sequence)
            report = msgspec.structs.replace(tokens_of(sequence), embedding=token.embedding)
            return ended(report, sequence, "stop", None, now)
        sampling = sequence.sampling
        is_stop = token.token_id in sampling.stop_token_ids or (
            token.token_id in self._eos_token_ids and not sampling.ignore_eos
        )
        if is_stop:
            self._forget(sequence)
            return ended(tokens_of(sequence), sequence, "stop", token.token_id, now)
        report = tokens_of(sequence, token)
        sequence.output_token_ids.append(token.token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token.token_id)
        reason = self._end_of(sequence)
        if reason is None:
            # With the first token, so that the cached tokens are known also if the gateway ends the request itself.
            return msgspec.structs.replace(report, usage=usage_of(sequence, False)) if is_first else report
        self._forget(sequence)
        return ended(report, sequence, reason, None, now)

    def _end_of(self, sequence: Sequence) -> FinishReason | None:
        """Why the tokens so far are the whole answer, if so: by its grammar, or for want of room."""
        grammar = sequence.grammar
        if grammar is not None and grammar.is_complete and grammar.error is None:
            return "stop"
        is_full = (
            len(sequence.output_token_ids) >= sequence.sampling.max_tokens
            or sequence.num_tokens >= self._limits.max_model_len
        )
        return "length" if is_full else None

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

    def _sequences_of(self, request: GenerateRequest, now: float, grammar: Grammar | None) -> list[Sequence]:
        """The choices that have not ended."""
        if request.sampling.grammar_kind is not None and grammar is None:
            raise InvalidRequest("this decoder has no tokenizer.json in its checkpoint, which structured output needs")
        prompt = Prompt.of(request, self._merge_size)
        outputs = request.outputs or [[]] * request.sampling.n
        has_prompt_logprobs = request.sampling.num_prompt_logprobs is not None
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
                priority=request.priority,
                prompt_logprobs=[] if has_prompt_logprobs and choice == 0 and not output else None,
                is_pooled=request.pooling is not None,
                grammar=None if grammar is None else grammar.begin(output),
            )
            for choice, output in enumerate(outputs)
            if choice not in request.finished
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

    def _measure_load(self) -> None:
        """After each step, and when a sequence leaves: an idle engine runs no step that would say so."""
        self._metrics.look(sum(1 for keys in self._wanted.values() if keys))


def _error_of(sequence: Sequence, token: SampledToken) -> TandemError | None:
    """Why a token cannot be used, if so."""
    if not token.is_finite:
        return ModelFailure("the language model gave values that are not finite for this request")
    if sequence.grammar is not None and (reason := sequence.grammar.error) is not None:
        return InvalidRequest(reason)
    if not token.is_possible:
        return InvalidRequest(
            "no token can come next: the request's grammar, allowed_token_ids, bad_words, logit_bias, min_tokens and "
            "ignore_eos exclude all together"
        )
    return None
