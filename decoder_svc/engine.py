"""The engine: requests and embeddings in, tokens out, one step at a time.

Owns the sequences, the KV cache, the embeddings that sequences still need, and the order schedule → run → report, in
which one step may overlap the next. Knows nothing of sockets, Redis or HTTP. Everything here runs in the engine thread;
`engine_thread` carries commands in and events out.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import structlog
import torch
from torch import Tensor

from common.errors import DeadlineExceeded, InvalidRequest, ModelFailure, TandemError
from common.messages import FinishReason, GenerateRequest, SequenceTokens
from decoder_svc.block_manager import BlockManager
from decoder_svc.choices import sequences_of
from decoder_svc.embedding_pool import EmbeddingPool
from decoder_svc.engine_metrics import EngineMetrics
from decoder_svc.grammar import Grammar
from decoder_svc.kv_cache import KVCache
from decoder_svc.media_needs import MediaBudget, MediaNeeds, MediaWanted
from decoder_svc.model.decode_graphs import DecodeGraphs
from decoder_svc.model.text import TextModel
from decoder_svc.reports import ended, tokens_of, usage_of, without_tokens
from decoder_svc.request_check import check_request
from decoder_svc.sampler import SampledToken, Sampler
from decoder_svc.scheduler import Chunk, Scheduler
from decoder_svc.sequence import Sequence
from decoder_svc.step_runner import Step, StepRunner

logger = structlog.get_logger(__name__)


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
        overlaps_steps: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """With `overlaps_steps` a step is launched before the one before is read, for a device that is not the host.

        The last block of the cache belongs to the `graphs`, if there are any.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._overlaps = overlaps_steps
        self._ahead: Step | None = None  # launched and sampled, and not read yet
        self._read_at = 0.0  # when the last step was
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._merge_size = spatial_merge_size
        self.blocks = BlockManager(kv_cache.num_blocks - (graphs is not None), kv_cache.block_size)
        self.pool = EmbeddingPool(limits.embedding_cache_bytes)
        self._media = MediaNeeds(self.pool)
        self.scheduler = Scheduler(
            self.blocks,
            max_tokens_per_step=limits.max_tokens_per_step,
            max_sequences=limits.max_sequences,
            max_waiting=limits.max_waiting,
            max_model_len=limits.max_model_len,
            has_media=self.pool.__contains__,
        )
        self._runner = StepRunner(model, kv_cache, Sampler(eos_token_ids, model.kernels), self.pool.tensors, graphs)
        self._metrics = EngineMetrics(self.scheduler, self.blocks)
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
            sequences = sequences_of(request, now, grammar, self._merge_size)
            if sequences:
                self._media.check_held(sequences[0])
            # A choice that had its last token before the request came here is not run again.
            ends = {s: reason for s in sequences if s.output_token_ids and (reason := self._end_of(s))}
            sequences = [s for s in sequences if s not in ends]
            for sequence in sequences:
                self.scheduler.admit(sequence)
        except TandemError as error:
            replaced += self.cancel(request.request_id)
            return [*replaced, without_tokens(request.request_id, request.attempt, "error", error)]
        events: list[Event] = [ended(tokens_of(s), s, reason, None, now) for s, reason in ends.items()]
        return replaced + events + self._media.want(sequences, always=True) + self._media_budget()

    def add_embedding(self, key: str, embedding: Tensor, now: float) -> list[Event]:
        """An embedding `[tokens, H*(1+L)]` has arrived, checked."""
        misfits = self._media.arrived(key, embedding, now)
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
                self._metrics.looked_at_tiles(*self._kv_cache.count_tiles())
                self._is_checked = True
            self._metrics.checked(embedding_bytes=self.pool.needed_bytes, needs=len(self._media.wanted))
        self._metrics.look_at_device(time.monotonic())
        return []

    def measure_backlog(self) -> list[Event]:
        """Note how long the queued prompts take. Not done with each step: it looks at every sequence."""
        self.backlog_s = self._metrics.measure_backlog()
        return []

    def step(self) -> tuple[list[Event], bool]:
        """Run one step; tells what happened and whether any token ran. An error ends its request, not the engine."""
        events = self._expire(time.monotonic())
        chunks = self.scheduler.schedule()
        has_work = bool(chunks) or self._ahead is not None
        if self._overlaps:
            events += self._run_ahead(chunks)
        elif chunks:
            events += self._run(chunks)
        if has_work:
            self._measure_load()
        events += self._media.want(self.scheduler.sequences)
        return events + self._media_budget(), has_work

    def _run(self, chunks: Seq[Chunk]) -> list[Event]:
        """Run a step from its launch to its end. Until all has gone well no sequence changes."""
        try:
            step = self._runner.launch(chunks)
            self._runner.sample(step)
            sampled = self._runner.read(step)
        except Exception as exc:  # the engine lives: every request of the step is answered
            return self._run_apart(chunks, exc)
        self.scheduler.launched(chunks)
        return self._report(step, sampled)

    def _run_ahead(self, chunks: Seq[Chunk]) -> list[Event]:
        """Launch a step, finish the one before while the device runs it, then have its tokens chosen.

        So the device is never without work while the host schedules, builds and reports. A sequence that ends with the
        step before has run one token in vain.
        """
        before, self._ahead = self._ahead, None
        step, failure, events = None, None, list[Event]()
        try:
            if chunks:
                step = self._runner.launch(chunks, before)
                self.scheduler.launched(chunks)
        except Exception as exc:  # what is wrong with this step does not concern the one before
            failure = exc
        if before is not None:
            try:
                sampled = self._runner.read(before)
            except Exception as exc:
                return self._lose(before, step, exc)
            events += self._report(before, sampled)
        try:
            if step is not None:
                self._runner.sample(step)
        except Exception as exc:
            self.scheduler.abandoned(chunks)
            failure = exc
        if failure is not None:
            return events + self._run_apart(chunks, failure)
        if step is not None:
            for sequence in step.sequences:
                sequence.num_unread_tokens = 1
        self._ahead = step
        return events

    def _run_apart(self, chunks: Seq[Chunk], exc: Exception) -> list[Event]:
        """Run the chunks of a step that raised each on its own: only the request that cannot run ends with an error."""
        self._check_can_go_on(exc)
        events: list[Event] = []
        if len(chunks) > 1:
            logger.warning("a step failed; its sequences run apart", exc_info=exc, sequences=len(chunks))
            for chunk in chunks:
                if not chunk.sequence.is_ended:  # another choice of its request may just have failed
                    events += self._run([chunk])
        elif not chunks[0].sequence.is_ended:
            logger.error("a step failed", exc_info=exc, request_id=chunks[0].sequence.request_id)
            events += self.fail(chunks[0].sequence.request_id, _model_failure())
        return events

    def _lose(self, step: Step, after: Step | None, exc: Exception) -> list[Event]:
        """End the requests of a step whose results cannot be had; what was launched upon it has still to run."""
        self._check_can_go_on(exc)
        logger.error("the results of a step are lost", exc_info=exc, sequences=len(step.chunks))
        for lost in (after, step):
            if lost is not None:
                self.scheduler.abandoned(lost.chunks)
        requests = dict.fromkeys(c.sequence.request_id for c in step.chunks if not c.sequence.is_ended)
        return [event for request_id in requests for event in self.fail(request_id, _model_failure())]

    def _check_can_go_on(self, exc: Exception) -> None:
        """Raise an error that ends this process, so that gateways go on elsewhere.

        Other ranks may wait in the middle of a step. A device that reported an error of its own refuses all further
        work, which running out of memory is not.
        """
        if self._model.ranks.is_in_step or isinstance(exc, torch.AcceleratorError):
            raise exc

    def _report(self, step: Step, sampled: Seq[SampledToken]) -> list[Event]:
        now = time.monotonic()
        events: list[Event] = []
        self.scheduler.computed(step.chunks)
        for chunk in step.chunks:
            if chunk.sequence.started_at is None:
                chunk.sequence.started_at = now
        for sequence in step.sequences:
            sequence.num_unread_tokens = 0
        device_s = step.readback.device_s
        self._metrics.stepped(step.chunks, now - max(step.launched_at, self._read_at) if device_s is None else device_s)
        self._read_at = now
        for sequence, token in zip(step.sequences, sampled, strict=True):
            if sequence.is_ended:  # while the step ran, or another choice of its request has just failed
                continue
            if (error := _error_of(sequence, token)) is not None:
                if not token.is_finite:
                    self.scheduler.distrust(sequence)
                events += self.fail(sequence.request_id, error)
            else:
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

    def _expire(self, now: float) -> list[Event]:
        events: list[Event] = []
        for request_id in {s.request_id for s in self.scheduler.sequences if s.deadline <= now}:
            events += self.fail(request_id, DeadlineExceeded("the request's time ran out in the decoder"))
        return events

    def _of_request(self, request_id: str) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.sequences if sequence.request_id == request_id]

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self._media.forget(sequence)
        self._measure_load()

    def _media_budget(self) -> list[Event]:
        return [*self._media.budget(self.scheduler.sequences)]

    def _measure_load(self) -> None:
        """After each step, and when a sequence leaves: an idle engine runs no step that would say so."""
        self._metrics.look(self._media.num_waiting)


def _model_failure() -> ModelFailure:
    return ModelFailure("the language model failed on this request: report it with the request id")


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
