"""Which tokens of which sequences run in the next step.

Owns the waiting and the running list and the rules: decodes first, then chunks of prompts in arrival order up to the
token budget, each up to the first vision span whose embedding has not arrived; when blocks run out, the youngest
sequence is put back to be recomputed, those that wait for media first. Pure: knows no torch, sockets or clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import ContextTooLong, Overloaded
from decoder_svc.block_manager import BlockManager
from decoder_svc.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of a sequence run in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """First token that does not run."""
        return self.start + self.num_tokens

    @property
    def gives_token(self) -> bool:
        """Whether the chunk reaches the newest token, so that a next one can be sampled."""
        return self.end == self.sequence.num_tokens


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
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished, in the order in which they were or will be started."""
        return [*self.running, *self.waiting]

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
        self.waiting.append(sequence)
        self._share_prefix(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop_blocks(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step: at most one chunk a sequence, at most `max_tokens_per_step` tokens in all."""
        chunks: list[Chunk] = []
        budget = self._max_tokens_per_step
        preemptions_before = self.num_preemptions
        for sequence in [s for s in self.running if s.is_decoding]:
            if budget and sequence in self.running and self._make_room(sequence, sequence.num_tokens):
                chunks.append(Chunk(sequence, sequence.num_computed_tokens, 1))
                budget -= 1
        for sequence in [s for s in self.running if not s.is_decoding]:
            if sequence in self.running:
                budget -= self._add_prefill(sequence, budget, chunks)
        # Who was preempted for others in this step does not start again in it.
        while budget and self.num_preemptions == preemptions_before and len(self.running) < self._max_sequences:
            if not (taken := self._start_next(budget, chunks)):
                break
            budget -= taken
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def computed(self, chunk: Chunk) -> None:
        """Note that a chunk has run: its full blocks may now be shared."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.end
        sequence.hash_blocks(self._blocks.block_size)
        first = chunk.start // self._blocks.block_size
        for index in range(first, chunk.end // self._blocks.block_size):
            self._blocks.name(sequence.block_table[index], sequence.block_hashes[index])

    def missing_media(self, sequence: Sequence) -> list[str]:
        """Keys of the embeddings that a sequence still needs and that are not here, in the order of need."""
        spans = sequence.spans_from(sequence.num_computed_tokens)
        return list(dict.fromkeys(span.key for span in spans if not self._has_media(span.key)))

    def _start_next(self, budget: int, chunks: list[Chunk]) -> int:
        """Start the first waiting sequence that has tokens to run; returns how many run now.

        A sequence whose very next token waits for its embedding is passed over, so it stops nobody.
        """
        for sequence in self.waiting:
            if not sequence.block_table:
                self._share_prefix(sequence)
            if self._runnable(sequence, budget) == 0:
                continue
            needed = self._blocks.blocks_for(sequence.num_computed_tokens + self._runnable(sequence, budget))
            if needed - len(sequence.block_table) > self._blocks.num_free:
                if self.running:
                    return 0
                self._take_prefixes_back(sequence)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            return self._add_prefill(sequence, budget, chunks)
        return 0

    def _take_prefixes_back(self, spared: Sequence) -> None:
        """Free what waiting sequences share, when they alone keep one from starting."""
        for sequence in self.waiting:
            if sequence is not spared:
                self._drop_blocks(sequence)

    def _add_prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        count = self._runnable(sequence, budget)
        if count == 0 or not self._make_room(sequence, sequence.num_computed_tokens + count):
            return 0
        chunks.append(Chunk(sequence, sequence.num_computed_tokens, count))
        return count

    def _runnable(self, sequence: Sequence, budget: int) -> int:
        """Tokens that may run now: within the budget and before the first span whose embedding is not here."""
        start = sequence.num_computed_tokens
        end = min(sequence.num_tokens, start + budget)
        for span in sequence.spans_from(start):
            if span.offset < end and not self._has_media(span.key):
                return max(span.offset, start) - start
        return end - start

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence blocks for `num_tokens`, preempting others; false when it was preempted itself."""
        while True:
            needed = self._blocks.blocks_for(num_tokens) - len(sequence.block_table)
            taken = self._blocks.try_take(max(needed, 0))
            if taken is not None:
                sequence.block_table.extend(taken)
                return True
            victim = self._victim()
            self._preempt(victim)
            if victim is sequence:
                return False

    def _victim(self) -> Sequence:
        """Who gives up blocks: one that only waits (its shared prefix), one that waits for media, or the youngest."""
        for sequence in reversed(self.waiting):
            if sequence.block_table:
                return sequence
        for sequence in reversed(self.running):
            if self._runnable(sequence, 1) == 0:
                return sequence
        return self.running[-1]

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        if sequence in self.running:
            self.num_preemptions += 1
            self.running.remove(sequence)
            self.waiting.appendleft(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def _share_prefix(self, sequence: Sequence) -> None:
        """Take the blocks of the prompt's beginning that are in the cache; the newest token is always computed."""
        sequence.hash_blocks(self._blocks.block_size)
        usable = (sequence.num_tokens - 1) // self._blocks.block_size
        sequence.block_table = self._blocks.share(sequence.block_hashes[:usable])
        sequence.num_computed_tokens = len(sequence.block_table) * self._blocks.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
