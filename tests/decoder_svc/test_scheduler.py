"""The scheduler: whatever arrives, leaves or is missing, each step is legal, and everybody gets to the end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import ContextTooLong, Overloaded
from decoder_svc.block_manager import BlockManager
from decoder_svc.scheduler import MAX_OVERTAKEN, Chunk, Scheduler
from decoder_svc.sequence import Sequence
from tests.decoder_svc.requests import PAD_ID, greedy, key_of, picture, sequence_of

BLOCK_SIZE = 4


def contents_of(sequence: Sequence) -> list[int]:
    """What the KV cache must hold at each position: it depends on all that stands before."""
    rows = {
        position: (span.key, span.row_offset + position - span.offset)
        for span in sequence.prompt.spans
        for position in range(span.offset, span.end)
    }
    contents: list[int] = []
    state = hash(sequence.prompt.cache_salt)
    tokens = [*sequence.tokens(0, sequence.num_tokens), *[next_token(sequence)] * sequence.num_unread_tokens]
    for position, token in enumerate(tokens):
        state = hash((state, token, rows.get(position)))
        contents.append(state)
    return contents


def next_token(sequence: Sequence) -> int:
    """What the model says next."""
    return len(sequence.output_token_ids) + 1000


class SimulatedEngine:
    """A scheduler with a KV cache of plain values, which checks each step while it runs it.

    With `overlaps_steps` the tokens of a step are known when the next was scheduled.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        max_tokens_per_step: int = 16,
        max_sequences: int = 4,
        max_waiting: int = 100,
        max_model_len: int = 1000,
        overlaps_steps: bool = False,
        stop_token: int | None = None,
    ) -> None:
        self.overlaps_steps = overlaps_steps
        self.before: list[Chunk] = []
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.media: set[str] = set()
        self.slots: dict[int, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.max_tokens_per_step = max_tokens_per_step
        self.max_sequences = max_sequences
        self.max_model_len = max_model_len
        self.stop_token = stop_token
        self.scheduler = Scheduler(
            self.blocks,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_model_len=max_model_len,
            has_media=self.media.__contains__,
        )

    def admit(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.admit(sequence)

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule()
        assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= self.max_sequences
        assert sum(chunk.num_tokens for chunk in chunks) <= self.max_tokens_per_step
        written: set[int] = set()
        for chunk in chunks:
            written |= self._run(chunk, written)
        self.scheduler.launched(chunks)
        if self.overlaps_steps:
            self._finish(self.before)
            self.before = chunks
            for chunk in chunks:
                chunk.sequence.num_unread_tokens = int(chunk.gives_token and not chunk.sequence.is_ended)
        else:
            self._finish(chunks)
        self.blocks.check()
        return chunks

    def _finish(self, chunks: list[Chunk]) -> None:
        self.scheduler.computed(chunks)
        for chunk in chunks:
            chunk.sequence.num_unread_tokens = 0
            if chunk.gives_token and not chunk.sequence.is_ended:
                self._sample(chunk.sequence)

    def _run(self, chunk: Chunk, written: set[int]) -> set[int]:
        sequence = chunk.sequence
        assert sequence in self.scheduler.running
        assert chunk.start == sequence.num_computed_tokens
        assert chunk.num_tokens > 0
        assert chunk.end <= sequence.num_tokens
        assert chunk.gives_token == (chunk.end == sequence.num_tokens)
        assert sequence.num_tokens < self.max_model_len
        assert len(sequence.output_token_ids) + sequence.num_unread_tokens < sequence.sampling.max_tokens
        for span in sequence.prompt.spans:
            assert span.end <= chunk.start or span.offset >= chunk.end or span.key in self.media, "embedding is absent"
        contents = contents_of(sequence)
        slots = [sequence.block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(chunk.end)]
        assert len(set(slots)) == len(slots)
        for position in range(chunk.start):
            assert self.slots[slots[position]] == contents[position], "the cache holds what is not this sequence's"
        mine = set(slots[chunk.start :])
        assert not mine & written, "two sequences write to one slot"
        for position in range(chunk.start, chunk.end):
            self.slots[slots[position]] = contents[position]
        return mine

    def _sample(self, sequence: Sequence) -> None:
        token = next_token(sequence)
        sequence.output_token_ids.append(token)
        is_full = len(sequence.output_token_ids) == sequence.sampling.max_tokens
        if is_full or sequence.num_tokens == self.max_model_len or token == self.stop_token:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        assert not sequence.block_table
        self.outputs[sequence.request_id] = sequence.output_token_ids

    def can_step(self) -> bool:
        """Run a step; whether one was launched or finished."""
        had_one_before = bool(self.before)
        return bool(self.step()) or had_one_before

    def run_to_the_end(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.sequences:
                break
            assert self.can_step(), "nothing runs although everything is here"
        assert not self.scheduler.sequences, "progress stopped"
        assert self.blocks.num_used == 0
        self.blocks.check()


def text(name: str, num_tokens: int, max_tokens: int = 3, first: int = 0) -> Sequence:
    return sequence_of(range(first, first + num_tokens), request_id=name, sampling=greedy(max_tokens))


def test_queued_is_what_may_run_before_all_that_is_here_can_be_decoded() -> None:
    engine = SimulatedEngine(40, max_tokens_per_step=4)
    engine.admit(text("a", 10, first=100), text("b", 6, first=200))
    assert engine.scheduler.count_queued_tokens() == 16
    engine.step()
    assert engine.scheduler.count_queued_tokens() == 12
    waits = sequence_of([*range(5), *[PAD_ID] * 4, 7], media=[picture(0, 5)], request_id="c")
    engine.admit(waits)
    assert engine.scheduler.count_queued_tokens() == 12 + 5, "what waits for an embedding is an encoder's work"
    engine.media.add(key_of(0))
    assert engine.scheduler.count_queued_tokens() == 12 + 10
    engine.run_to_the_end()
    assert engine.scheduler.count_queued_tokens() == 0


def test_choices_that_share_a_prompt_queue_it_once_and_decoding_is_no_queue() -> None:
    engine = SimulatedEngine(40)
    engine.admit(*(sequence_of(range(9), choice=choice, request_id="r") for choice in range(3)))
    assert engine.scheduler.count_queued_tokens() == 9
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == 3
    assert all(sequence.is_decoding for sequence in engine.scheduler.running)
    assert engine.scheduler.count_queued_tokens() == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with few different prompts and pictures, so that prefixes are shared and blocks run out."""

    overlaps_steps = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = SimulatedEngine(
            9,
            max_tokens_per_step=7,
            max_sequences=3,
            max_model_len=34,
            overlaps_steps=self.overlaps_steps,
            stop_token=1005,
        )
        self.number = 0
        self.finished_before: set[str] = set()

    @rule(
        first=st.integers(0, 1),
        lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        pictures=st.lists(st.integers(0, 2), max_size=2),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([None, None, "s"]),
    )
    def admit(
        self,
        first: int,
        lengths: list[int],
        pictures: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str | None,
    ) -> None:
        ids, media = [first], []
        for position, length in enumerate(lengths):
            ids += range(length)
            if position < len(pictures):
                media.append(picture(pictures[position], len(ids)))
                ids += [PAD_ID] * 4
        self.number += 1
        for choice in range(n):
            sequence = sequence_of(
                [*ids, 7],
                media=media,
                choice=choice,
                request_id=f"{self.number}.{choice}",
                sampling=greedy(max_tokens),
                cache_salt=salt,
            )
            sequence.priority = priority
            self.engine.admit(sequence)

    @rule(number=st.integers(0, 2))
    def embedding_arrives(self, number: int) -> None:
        self.engine.media.add(key_of(number))

    @rule(number=st.integers(0, 2))
    def embedding_that_nobody_needs_is_dropped(self, number: int) -> None:
        needed = {span.key for s in self.engine.scheduler.sequences for span in s.spans_from(s.num_computed_tokens)}
        self.engine.media -= {key_of(number)} - needed

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        sequences = self.engine.scheduler.sequences
        self.engine.scheduler.remove(sequences[index % len(sequences)])

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @invariant()
    def the_pool_is_whole(self) -> None:
        blocks = self.engine.blocks
        blocks.check()
        held = {block for s in self.engine.scheduler.sequences for block in s.block_table}
        assert blocks.num_used == len(held)

    @invariant()
    def someone_with_all_embeddings_is_never_kept_from_running(self) -> None:
        scheduler = self.engine.scheduler
        if any(not scheduler.missing_media(sequence) for sequence in scheduler.sequences):
            assert self.engine.can_step()

    def teardown(self) -> None:
        for _ in range(2000):
            self.engine.media |= {key_of(number) for number in range(3)}
            if not self.engine.scheduler.sequences:
                break
            assert self.engine.can_step(), "nothing runs although everything is here"
        assert not self.engine.scheduler.sequences
        assert self.engine.blocks.num_used == 0


class OverlappingMachine(SchedulerMachine):
    """The same while each step is scheduled before the tokens of the one before are known."""

    overlaps_steps = True


TestSchedulerMachine = SchedulerMachine.TestCase
TestOverlappingMachine = OverlappingMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestOverlappingMachine.settings = TestSchedulerMachine.settings


def test_a_request_that_can_never_fit_is_refused_with_numbers_and_the_next_is_served() -> None:
    engine = SimulatedEngine(16)
    with pytest.raises(ContextTooLong, match=r"need 103 tokens of KV cache, but it holds 64"):
        engine.admit(text("big", 100))
    engine.admit(text("small", 10))
    engine.run_to_the_end()
    assert len(engine.outputs["small"]) == 3


def test_a_prompt_that_fills_the_context_is_refused_with_numbers() -> None:
    engine = SimulatedEngine(100, max_model_len=20)
    with pytest.raises(ContextTooLong, match=r"has 20 tokens .* context is 20"):
        engine.admit(text("full", 20))
    engine.admit(text("almost", 19, max_tokens=1))


def test_too_many_waiting_requests_are_refused_as_overload() -> None:
    engine = SimulatedEngine(100, max_waiting=2)
    engine.admit(text("a", 4), text("b", 4))
    with pytest.raises(Overloaded) as refused:
        engine.admit(text("c", 4))
    assert refused.value.retry_after_s


def test_decodes_run_before_prompts_and_prompts_in_the_order_of_arrival() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=10)
    engine.admit(text("a", 4, max_tokens=9))
    engine.step()
    engine.admit(text("b", 12, first=100), text("c", 12, first=200))
    chunks = [(chunk.sequence.request_id, chunk.start, chunk.num_tokens) for chunk in engine.step()]
    assert chunks == [("a", 4, 1), ("b", 0, 9)]
    chunks = [(chunk.sequence.request_id, chunk.start, chunk.num_tokens) for chunk in engine.step()]
    assert chunks == [("a", 5, 1), ("b", 9, 3), ("c", 0, 6)]


def test_a_prompt_runs_up_to_the_first_span_whose_embedding_is_absent() -> None:
    engine = SimulatedEngine(100)
    sequence = sequence_of([0, 1, 2, *[PAD_ID] * 4, 3, *[PAD_ID] * 4, 4], media=[picture(1, 3), picture(2, 8)])
    engine.admit(sequence)
    assert [chunk.end for chunk in engine.step()] == [3]
    assert engine.step() == []
    assert engine.scheduler.missing_media(sequence) == [key_of(1), key_of(2)]
    engine.media.add(key_of(2))
    assert engine.step() == []
    engine.media.add(key_of(1))
    assert [chunk.end for chunk in engine.step()] == [13]


def test_one_that_waits_for_an_embedding_stops_nobody() -> None:
    engine = SimulatedEngine(100)
    waits = sequence_of([*[PAD_ID] * 4, 1], media=[picture(1, 0)], request_id="waits")
    engine.admit(waits, text("text", 5))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["text"]


def test_those_that_wait_for_embeddings_take_no_place_among_the_running() -> None:
    engine = SimulatedEngine(100, max_sequences=2)
    engine.admit(
        *(
            sequence_of([first, *[PAD_ID] * 4, 1], media=[picture(first, 1)], request_id=f"waits {first}")
            for first in range(2)
        )
    )
    engine.step()
    engine.admit(text("text", 5))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["text"]


def test_those_that_wait_for_embeddings_give_their_blocks_to_one_that_can_run() -> None:
    engine = SimulatedEngine(4)
    engine.admit(
        sequence_of(
            [*range(12), *[PAD_ID] * 2, 1], media=[picture(1, 12, (1, 2, 4))], sampling=greedy(1), request_id="w"
        )
    )
    engine.step()
    engine.admit(text("text", 8, first=100))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["text"]
    assert engine.scheduler.num_preemptions == 1
    engine.media.add(key_of(1))
    engine.run_to_the_end()
    assert len(engine.outputs["w"]) == 1


def test_two_that_wait_for_embeddings_do_not_take_blocks_from_each_other_for_ever() -> None:
    engine = SimulatedEngine(4)
    for number in range(2):
        engine.admit(
            sequence_of(
                [number, *range(11), *[PAD_ID] * 2, 1],
                media=[picture(number, 12, (1, 2, 4))],
                sampling=greedy(1),
                request_id=f"{number}",
            )
        )
    for _ in range(10):
        engine.step()
    assert engine.step() == []
    engine.media |= {key_of(0), key_of(1)}
    engine.run_to_the_end()


def test_when_blocks_run_out_the_youngest_is_put_back_and_still_finishes() -> None:
    engine = SimulatedEngine(8)
    engine.admit(text("old", 8, max_tokens=16), text("young", 8, max_tokens=16, first=100))
    engine.run_to_the_end()
    assert engine.scheduler.num_preemptions > 0
    assert list(engine.outputs) == ["old", "young"]
    assert engine.outputs["young"] == list(range(1000, 1016))


def test_the_last_token_is_always_computed_even_when_all_blocks_are_cached() -> None:
    engine = SimulatedEngine(100)
    for name in ("first", "again"):
        sequence = text(name, 8, max_tokens=1)
        engine.admit(sequence)
        engine.step()
    assert sequence.num_cached_tokens == 4


def test_a_prefix_that_was_computed_while_one_waited_is_shared_when_it_starts() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=12)
    late = text("late", 13, max_tokens=1)
    engine.admit(text("first", 12, max_tokens=5), late)
    engine.step()
    assert late.num_computed_tokens == 0
    assert [(c.sequence.request_id, c.start) for c in engine.step()] == [("first", 12), ("late", 12)]
    assert late.num_cached_tokens == 12


def test_the_same_picture_is_shared_and_another_one_in_the_same_text_is_not() -> None:
    engine = SimulatedEngine(100)
    engine.media |= {key_of(1), key_of(2)}
    cached = []
    for number in (1, 2, 1):
        ids = [*range(6), *[PAD_ID] * 4, *range(7)]
        sequence = sequence_of(ids, media=[picture(number, 6)], sampling=greedy(1), request_id=f"{number}")
        engine.admit(sequence)
        engine.run_to_the_end()
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 4, 16]


def test_prompts_under_other_salts_share_nothing() -> None:
    engine = SimulatedEngine(100)
    cached = []
    for salt in (None, "a", "b", "a"):
        sequence = sequence_of(range(9), cache_salt=salt, sampling=greedy(1))
        engine.admit(sequence)
        engine.run_to_the_end()
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 0, 0, 8]


def test_prefixes_that_waiting_sequences_hold_never_keep_the_first_from_starting() -> None:
    engine = SimulatedEngine(8, max_sequences=1)
    for first in (0, 100):
        engine.admit(text(f"warm {first}", 12, max_tokens=1, first=first))
        engine.run_to_the_end()
    engine.admit(text("big", 28, max_tokens=3, first=200))
    engine.admit(text("again 0", 13, max_tokens=3), text("again 100", 13, max_tokens=3, first=100))
    assert engine.blocks.num_used == 6
    engine.run_to_the_end()
    assert list(engine.outputs)[2:] == ["big", "again 0", "again 100"]


def test_what_a_distrusted_sequence_computed_is_shared_no_more() -> None:
    engine = SimulatedEngine(100)
    bad = text("bad", 9, max_tokens=5)
    engine.admit(bad)
    engine.step()
    engine.scheduler.distrust(bad)
    engine.scheduler.remove(bad)
    again = text("again", 9, max_tokens=1)
    engine.admit(again)
    engine.run_to_the_end()
    assert again.num_cached_tokens == 0


def of_priority(name: str, priority: int, num_tokens: int = 8, max_tokens: int = 3, first: int = 0) -> Sequence:
    sequence = text(name, num_tokens, max_tokens, first)
    sequence.priority = priority
    return sequence


def test_a_lower_priority_value_starts_first_and_equal_ones_in_the_order_of_arrival() -> None:
    engine = SimulatedEngine(100, max_sequences=1)
    names = [("late", 5), ("a", 0), ("urgent", -1), ("b", 0)]
    engine.admit(*(of_priority(name, priority, first=100 * i) for i, (name, priority) in enumerate(names)))
    engine.run_to_the_end()
    assert list(engine.outputs) == ["urgent", "a", "b", "late"]


def test_the_prompt_of_a_higher_priority_runs_before_one_that_was_begun_earlier() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=10)
    waits = sequence_of([*range(4), *[PAD_ID] * 4, *range(40)], media=[picture(1, 4)], request_id="long")
    waits.priority = 1
    engine.admit(waits)
    engine.step()
    engine.admit(of_priority("urgent", 0, num_tokens=32, first=100))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["urgent"]
    engine.media.add(key_of(1))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["urgent"]


def test_the_least_priority_gives_up_its_blocks_and_still_finishes() -> None:
    engine = SimulatedEngine(8)
    engine.admit(of_priority("low", 1, max_tokens=16), of_priority("high", 0, max_tokens=16, first=100))
    engine.run_to_the_end()
    assert engine.scheduler.num_preemptions > 0
    assert list(engine.outputs) == ["high", "low"]


def test_nobody_is_overtaken_for_ever() -> None:
    engine = SimulatedEngine(100, max_sequences=1, max_waiting=1000)
    engine.admit(of_priority("patient", 9))
    for number in range(MAX_OVERTAKEN + 20):
        engine.admit(of_priority(f"urgent {number}", 0))
    engine.run_to_the_end()
    assert list(engine.outputs).index("patient") == MAX_OVERTAKEN


def test_all_choices_of_a_request_share_one_prefill() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=16)
    engine.admit(*(sequence_of(range(41), choice=c, request_id=f"{c}", sampling=greedy(2)) for c in range(4)))
    num_tokens = 0
    while engine.scheduler.sequences:
        num_tokens += sum(chunk.num_tokens for chunk in engine.step() if not chunk.sequence.is_decoding)
    assert num_tokens <= 41 + 3 * BLOCK_SIZE + 4 * 2


def test_an_equal_prompt_waits_for_one_that_runs_but_not_when_that_waits_itself() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=8)
    ids = [*range(4), *[PAD_ID] * 4, *range(9)]
    engine.admit(sequence_of(ids, media=[picture(1, 4)], request_id="first"))
    assert [chunk.end for chunk in engine.step()] == [4]
    engine.admit(sequence_of([*range(4), *range(50, 63)], request_id="branches off"))
    assert [(chunk.sequence.request_id, chunk.start) for chunk in engine.step()] == [("branches off", 4)]
    engine.media.add(key_of(1))
    engine.run_to_the_end()


def test_an_equal_prompt_goes_on_when_the_one_that_it_waited_for_leaves() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=8)
    first = text("first", 30)
    engine.admit(first, text("second", 30))
    assert [chunk.sequence.request_id for chunk in engine.step()] == ["first"]
    engine.scheduler.remove(first)
    assert [(chunk.sequence.request_id, chunk.start) for chunk in engine.step()] == [("second", 8)]
    engine.run_to_the_end()


def test_every_token_before_a_late_span_is_computed_when_its_embedding_arrives() -> None:
    engine = SimulatedEngine(100, max_tokens_per_step=5)
    ids = [*range(7), *[PAD_ID] * 4, *range(13), *[PAD_ID] * 4, 1]
    sequence = sequence_of(ids, media=[picture(1, 7), picture(2, 24)])
    engine.media.add(key_of(1))
    engine.admit(sequence)
    while engine.step():
        pass
    assert sequence.num_computed_tokens == 24
    engine.media.add(key_of(2))
    assert [(chunk.start, chunk.end) for chunk in engine.step()] == [(24, 29)]


def test_hits_of_the_prefix_cache_are_counted_in_tokens() -> None:
    engine = SimulatedEngine(100)
    for name in ("first", "again"):
        engine.admit(text(name, 9, max_tokens=1))
        engine.run_to_the_end()
    assert (engine.scheduler.num_prefix_tokens, engine.scheduler.num_prefix_hit_tokens) == (18, 8)
