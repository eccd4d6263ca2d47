"""Which tokens of which sequences run in the next step.

Owns the waiting and the running list and the rules: decodes first, then chunks of prompts by priority and in arrival
order up to the token budget, each up to the first vision span whose embedding has not arrived. What one computes now,
an equal prompt waits for. When blocks run out, the youngest sequence of the least priority is put back to be
recomputed, those that wait for media first. A step may be scheduled while the device still runs the one before: a
sequence then has a token whose id nobody knows yet. Pure: knows no torch, sockets or clock.
"""

import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.errors import ContextTooLong, Overloaded
from decoder_svc.block_manager import BlockManager
from decoder_svc.sequence import Sequence

# So often may later arrivals of a higher priority be put before a waiting sequence; then it is its turn.
MAX_OVERTAKEN = 64
# A row of logits is as long as the vocabulary: with log probabilities of the prompt, a chunk has only so many tokens.
MAX_PROMPT_LOGPROB_ROWS = 256


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens `[start, end)` of a sequence run in this step. Nobody changes it.

    `gives_token`: it reaches what was the newest token when it was scheduled, so that a next one can be sampled.
    `num_prompt_rows`: of how many tokens, from the first, logits are wanted for the log probabilities of the prompt.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    end: int = field(init=False)
    gives_token: bool = field(init=False)
    num_prompt_rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens
        self.gives_token = self.end == self.sequence.num_tokens
        if self.sequence.prompt_logprobs is not None:
            self.num_prompt_rows = max(0, min(self.end, self.sequence.num_prompt_tokens - 1) - self.start)


@dataclass
class _Step:
    """The chunks of a step, and how many more tokens and sequences it may have."""

    tokens_left: int
    sequences_left: int
    chunks: list[Chunk] = field(default_factory=list)
    being_computed: set[bytes] = field(default_factory=set)  # hashes of the blocks that running sequences will fill

    @property
    def budget(self) -> int:
        """Tokens that the next chunk may have."""
        return self.tokens_left if self.sequences_left else 0

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in."""
        self.chunks.append(chunk)
        self.tokens_left -= chunk.num_tokens
        self.sequences_left -= 1


class Scheduler:
    """Waiting and running sequences over one block manager."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_tokens_per_step: int,
        max_sequences: int,
        max_waiting: int,
        max_model_len: int,
        has_media: Callable[[str], bool],
    ) -> None:
        self._blocks = blocks
        self._max_tokens_per_step = max_tokens_per_step
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._max_model_len = max_model_len
        self._has_media = has_media
        self._launched: deque[Chunk] = deque()  # and not computed yet
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_tokens = 0
        """Prompt tokens of sequences when they were first started, and ..."""
        self.num_prefix_hit_tokens = 0
        """... those of them that the cache held."""
        self._numbers = itertools.count()

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished, in the order in which they were or will be started."""
        return [*self.running, *self.waiting]

    def count_queued_tokens(self) -> int:
        """Tokens that have to run, and may, before the sequences that are here can be decoded.

        What waits for embeddings is not counted, and what choices of a request share is counted once.
        """
        queued: dict[str, int] = {}
        for sequence in self.sequences:
            if not sequence.is_decoding:
                count = self._runnable(sequence, sequence.num_tokens)
                queued[sequence.request_id] = max(count, queued.get(sequence.request_id, 0))
        return sum(queued.values())

    def admit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ContextTooLong when it can never fit, Overloaded when too many wait."""
        if sequence.num_tokens >= self._max_model_len:
            raise ContextTooLong(
                f"the prompt has {sequence.num_tokens} tokens and leaves no room for an answer: this model's context "
                f"is {self._max_model_len} tokens; shorten the prompt or send fewer or smaller media"
            )
        longest = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len)
        needed = self._blocks.blocks_for(longest)
        if needed > self._blocks.num_blocks:
            raise ContextTooLong(
                f"the prompt and max_tokens need {longest} tokens of KV cache, but it holds "
                f"{self._blocks.num_blocks * self._blocks.block_size}: lower max_tokens or shorten the prompt"
            )
        if len(self.waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait in this decoder: try again later", retry_after_s=1.0)
        sequence.number = next(self._numbers)
        self._queue(sequence)
        self._share_prefix(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop_blocks(sequence)
        sequence.is_ended = True

    def schedule(self) -> list[Chunk]:
        """The next step: at most one chunk a sequence, within `max_tokens_per_step` and `max_sequences`."""
        step = _Step(self._max_tokens_per_step, self._max_sequences)
        preemptions_before = self.num_preemptions
        has_room = True
        for sequence in sorted(self.running, key=lambda s: (not s.is_decoding, s.priority)):
            if self.num_preemptions == preemptions_before or sequence in self.running:
                has_room &= self._add_chunk(sequence, step)
        if self.waiting:
            step.being_computed |= self._in_launched()
            for sequence in self.running:
                step.being_computed |= self._to_compute(sequence)
        # Who was preempted for others in this step does not start again in it, nor does anybody while one lacks room.
        while has_room and self.num_preemptions == preemptions_before:
            if not self._start_next(step):
                break
        if self.num_preemptions == preemptions_before:
            return step.chunks
        return [chunk for chunk in step.chunks if chunk.sequence in self.running]

    def distrust(self, sequence: Sequence) -> None:
        """Share nothing of what a sequence has computed: its values are not usable."""
        for block in sequence.block_table:
            self._blocks.unname(block)

    def launched(self, chunks: Seq[Chunk]) -> None:
        """Note that the device has been given a step: the next may be scheduled."""
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end
        self._launched.extend(chunks)

    def abandoned(self, chunks: Seq[Chunk]) -> None:
        """Note that the newest step that was launched, if it was, came to nothing: its chunks have still to run."""
        for chunk in reversed(chunks):
            if self._launched and self._launched[-1] is chunk:
                self._launched.pop()
            if chunk.sequence.num_computed_tokens == chunk.end:
                chunk.sequence.num_computed_tokens = chunk.start
            chunk.sequence.num_unread_tokens = 0

    def computed(self, chunks: Seq[Chunk]) -> None:
        """Note that the oldest step that was launched has run: its full blocks may now be shared."""
        for chunk in chunks:
            oldest = self._launched.popleft()
            assert oldest is chunk, "steps end in the order in which they were launched"
            if chunk.sequence.num_computed_tokens >= chunk.end:  # else it has left, or lost its blocks
                self._name_blocks(chunk)

    def _name_blocks(self, chunk: Chunk) -> None:
        sequence, size = chunk.sequence, self._blocks.block_size
        first, end = chunk.start // size, chunk.end // size
        if first < end:
            sequence.hash_blocks(size)
            for index in range(first, end):
                self._blocks.name(sequence.block_table[index], sequence.block_hashes[index])

    def missing_media(self, sequence: Sequence) -> list[str]:
        """Keys of the embeddings that a sequence still needs and that are not here, in the order of need."""
        spans = sequence.spans_from(sequence.num_computed_tokens)
        return list(dict.fromkeys(span.key for span in spans if not self._has_media(span.key)))

    def _start_next(self, step: "_Step") -> bool:
        """Start the first waiting sequence that has tokens to run; false when there is none, or no room for it.

        One that waits for embeddings is passed over when it has no token to run or no room, so it stops nobody; and so
        is one whose next block is being computed for another: all choices of a request share one prefill.
        """
        if not step.budget:
            return False
        for sequence in self.waiting:
            self._share_prefix(sequence)
            if self._next_block_is_coming(sequence, step):
                continue
            count = self._runnable(sequence, step.budget)
            if count == 0:
                continue
            needed = self._blocks.blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
            if not self._reclaim(needed, sequence):
                if self.missing_media(sequence):
                    continue
                return False
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._count_prefix(sequence)
            step.being_computed |= self._to_compute(sequence)
            return self._add_chunk(sequence, step)
        return False

    def _queue(self, sequence: Sequence) -> None:
        """Put a sequence among the waiting, by priority and then by admission; nobody is overtaken for ever."""
        position = len(self.waiting)
        while position and self._goes_before(sequence, self.waiting[position - 1]):
            position -= 1
            self.waiting[position].num_overtaken += self.waiting[position].number < sequence.number
        self.waiting.insert(position, sequence)

    @staticmethod
    def _goes_before(sequence: Sequence, other: Sequence) -> bool:
        if sequence.number > other.number and other.num_overtaken >= MAX_OVERTAKEN:
            return False
        return (sequence.priority, sequence.number) < (other.priority, other.number)

    def _to_compute(self, sequence: Sequence) -> set[bytes]:
        """Hashes of the blocks that a running sequence has still to fill, and can with the embeddings that are here."""
        if sequence.is_decoding:
            return set()
        start = sequence.num_computed_tokens
        end = start + self._runnable(sequence, sequence.num_tokens)
        return set(sequence.block_hashes[start // self._blocks.block_size : end // self._blocks.block_size])

    def _in_launched(self) -> set[bytes]:
        """Hashes of the blocks that the device fills now."""
        size = self._blocks.block_size
        return {
            block_hash
            for chunk in self._launched
            for block_hash in chunk.sequence.block_hashes[chunk.start // size : chunk.end // size]
        }

    def _next_block_is_coming(self, sequence: Sequence, step: "_Step") -> bool:
        index = sequence.num_computed_tokens // self._blocks.block_size
        usable = sequence.num_shareable_tokens // self._blocks.block_size
        return index < usable and sequence.block_hashes[index] in step.being_computed

    def _count_prefix(self, sequence: Sequence) -> None:
        """Note how much the cache held, at the first start."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.num_prefix_tokens += sequence.num_prompt_tokens
            self.num_prefix_hit_tokens += sequence.num_cached_tokens

    def _reclaim(self, needed: int, starting: Sequence) -> bool:
        """Make `needed` blocks free for a start, from those who do not run; false when they hold too few.

        Only one whose embeddings are all here may take blocks from those who wait for theirs: it will run to its end,
        while two that wait would take them from each other for ever.
        """
        idle = [s for s in reversed(self.waiting) if s.block_table and s is not starting]
        if not self.missing_media(starting):
            idle += [s for s in reversed(self.running) if self._runnable(s, 1) == 0]
        if needed > self._blocks.num_free + sum(len(s.block_table) for s in idle):
            return False
        for sequence in idle:
            if needed <= self._blocks.num_free:
                break
            self._preempt(sequence)
        return needed <= self._blocks.num_free

    def _add_chunk(self, sequence: Sequence, step: "_Step") -> bool:
        """Add what a running sequence can run, if anything; false when it lacks room."""
        count = self._runnable(sequence, step.budget)
        if count == 0:
            return True
        if not self._make_room(sequence, sequence.num_computed_tokens + count):
            return False
        step.add(Chunk(sequence, sequence.num_computed_tokens, count))
        return True

    def _runnable(self, sequence: Sequence, budget: int) -> int:
        """Tokens that may run now: within the budget and before the first span whose embedding is not here."""
        start = sequence.num_computed_tokens
        if sequence.num_unread_tokens and self._is_full(sequence):
            return 0
        end = min(sequence.num_tokens, start + budget)
        if sequence.prompt_logprobs is not None:
            end = min(end, start + MAX_PROMPT_LOGPROB_ROWS)
        for span in sequence.spans_from(start):
            if span.offset < end and not self._has_media(span.key):
                return max(span.offset, start) - start
        return end - start

    def _is_full(self, sequence: Sequence) -> bool:
        """Whether a token that is not read yet is the last one, whatever it is."""
        return (
            sequence.is_pooled
            or sequence.num_output_tokens >= sequence.sampling.max_tokens
            or sequence.num_tokens >= self._max_model_len
        )

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence blocks for `num_tokens`, preempting others; false when it is the one to give way.

        It then keeps what it has until an older one needs it: the oldest that can run always gets room.
        """
        needed = self._blocks.blocks_for(num_tokens) - len(sequence.block_table)
        if needed <= 0:
            return True
        while (taken := self._blocks.try_take(needed)) is None:
            victim = self._victim()
            if victim is sequence:
                return False
            self._preempt(victim)
        sequence.block_table.extend(taken)
        return True

    def _victim(self) -> Sequence:
        """Who gives up blocks.

        One that only waits (its shared prefix), one that waits for media, or the youngest of the least priority.
        """
        for sequence in reversed(self.waiting):
            if sequence.block_table:
                return sequence
        for sequence in reversed(self.running):
            if self._runnable(sequence, 1) == 0:
                return sequence
        return max(reversed(self.running), key=lambda sequence: sequence.priority)

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        if sequence in self.running:
            self.num_preemptions += 1
            self.running.remove(sequence)
            self._queue(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence.block_table)
        del sequence.block_table[:]
        sequence.num_computed_tokens = 0

    def _share_prefix(self, sequence: Sequence) -> None:
        """Take what the cache holds of a waiting sequence's beginning; the newest token is always computed."""
        sequence.hash_blocks(self._blocks.block_size)
        usable = sequence.num_shareable_tokens // self._blocks.block_size
        sequence.block_table.extend(self._blocks.share(sequence.block_hashes[len(sequence.block_table) : usable]))
        sequence.num_computed_tokens = len(sequence.block_table) * self._blocks.block_size
