"""The engine when steps raise, embeddings are bad, time runs out, requests leave or can never be served."""

import random
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor

from common.messages import SequenceTokens, Usage
from decoder_svc.engine import Engine
from decoder_svc.sampler import Drawn
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import Readback
from tests.decoder_svc.engines import Driver, LateDelivery, World, driver, make_engine, request_of, solo
from tests.decoder_svc.requests import PAD_ID, generate_request, greedy, key_of, picture

pytestmark = pytest.mark.usefixtures("steps")
TEXT = [5, 17, 200, 33, 7, 90, 121]
MORE = [8, 9, 77]


class FailingModel(torch.nn.Module):
    """Raises in steps that contain a certain token."""

    def __init__(self, model: torch.nn.Module, bad_token: int) -> None:
        super().__init__()
        self.inner = model
        self.bad_token = bad_token
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.ranks, self.kernels, self.attention = model.ranks, model.kernels, model.attention

    def forward(self, model_input: object, kv_cache: object) -> Tensor:
        if self.bad_token in model_input.input_ids.tolist():  # type: ignore[attr-defined]
            raise RuntimeError("out of memory, say")
        result: Tensor = self.inner(model_input, kv_cache)
        return result


def test_a_step_that_raises_ends_the_guilty_request_alone(world: World) -> None:
    engine = make_engine(FailingModel(world.pair.model, 99))  # type: ignore[arg-type]
    run = Driver(engine, world.embeddings.__getitem__)
    mates = [
        request_of(world, MORE, request_id="text"),
        request_of(
            world, TEXT, 0, MORE, request_id="picture", sampling=greedy(6, n=2, temperature=1.0, logit_bias={99: -100})
        ),
        request_of(world, TEXT, request_id="late"),
    ]
    run.add(mates[0])
    for _ in range(3):
        run.step()
    run.add(mates[1], request_of(world, [99], request_id="bad", sampling=greedy(4, n=3)), mates[2])
    run.run()
    assert [run.ends["bad", choice].error.code for choice in range(3)] == ["model_failure"] * 3  # type: ignore[union-attr]
    for mate in mates:
        assert [run.outputs[mate.request_id, choice] for choice in range(mate.sampling.n)] == solo(world, mate)
        assert run.ends[mate.request_id, 0].finish_reason == "length"


def test_a_step_that_other_ranks_are_in_ends_the_engine_when_it_raises(world: World) -> None:
    """They wait for their part of it: no other step can be run with them."""
    model = FailingModel(world.pair.model, 99)
    model.ranks = SimpleNamespace(is_in_step=True)  # type: ignore[assignment]
    run = Driver(make_engine(model), world.embeddings.__getitem__)  # type: ignore[arg-type]
    run.add(request_of(world, [99], request_id="bad"))
    with pytest.raises(RuntimeError, match="out of memory"):
        run.engine.step()


def test_a_sampler_that_raises_leaves_the_others_as_they_were(world: World) -> None:
    run = driver(world)
    sampler = run.engine._runner.sampler
    draw = sampler.draw

    def failing(logits: Tensor, sequences: list[Sequence], masks: None, readback: Readback) -> Drawn:
        if any(sequence.request_id == "bad" for sequence in sequences):
            raise RuntimeError("an index out of range, say")
        return draw(logits, sequences, masks, readback)

    sampler.draw = failing  # type: ignore[method-assign,assignment]
    good = request_of(world, TEXT, 0, MORE, request_id="good")
    run.add(good, request_of(world, MORE, request_id="bad"))
    run.run()
    assert run.ends["bad", 0].error.code == "model_failure"  # type: ignore[union-attr]
    assert run.outputs["good", 0] == solo(world, good)[0]


def test_a_request_that_gives_a_held_item_other_rows_is_refused_alone(world: World) -> None:
    run = driver(world, embedding_cache_bytes=1 << 20)
    good = request_of(world, TEXT, 0, MORE, request_id="good")
    run.add(good)
    run.step()
    run.step()
    run.add(generate_request([PAD_ID] * 20, media=[picture(0, 0, (1, 4, 8))], request_id="bad"))
    assert "8 tokens in the prompt, but 4 rows" in run.ends["bad", 0].error.message  # type: ignore[union-attr]
    run.run()
    assert run.outputs["good", 0] == solo(world, good)[0]


def test_a_request_that_waits_for_an_item_with_other_rows_fails_alone_when_it_comes(world: World) -> None:
    run = driver(world)
    good = request_of(world, TEXT, 0, MORE, request_id="good")
    bad = generate_request([PAD_ID] * 20, media=[picture(0, 0, (1, 4, 8))], request_id="bad", sampling=greedy(4, n=2))
    run.add(bad, good)
    run.run()
    assert [run.ends["bad", choice].error.code for choice in range(2)] == ["invalid_request"] * 2  # type: ignore[union-attr]
    assert run.outputs["good", 0] == solo(world, good)[0]


def test_one_item_twice_with_different_rows_is_refused(world: World) -> None:
    run = driver(world)
    run.add(generate_request([PAD_ID] * 20, media=[picture(0, 0), picture(0, 6, (1, 4, 8))]))
    assert "twice, with different numbers of tokens" in run.ends["r", 0].error.message  # type: ignore[union-attr]
    run.check_idle()


def test_an_embedding_that_is_not_finite_ends_its_request_alone(world: World) -> None:
    poisoned = {**world.embeddings, key_of(1): world.embeddings[key_of(1)] * float("nan")}
    run = driver(world, deliver=poisoned.__getitem__)
    good = request_of(world, TEXT, 0, MORE, request_id="good")
    run.add(request_of(world, TEXT, 1, MORE, request_id="bad", sampling=greedy(8, n=2)), good)
    run.run()
    assert run.ends["bad", 0].error.code == "model_failure"  # type: ignore[union-attr]
    assert run.outputs["good", 0] == solo(world, good)[0]
    run.deliver = world.embeddings.__getitem__  # type: ignore[assignment]
    again = request_of(world, TEXT, 1, MORE, request_id="again")
    run.add(again)
    run.run()
    assert run.outputs["again", 0] == solo(world, again)[0], "what the failed request computed was shared"


def test_a_deadline_ends_a_sequence_that_waits_or_runs(world: World) -> None:
    run = driver(world, deliver=lambda key: None)
    run.add(request_of(world, TEXT, 0, MORE, request_id="waits", time_left_s=5.0), now=time.monotonic() - 10)
    run.add(request_of(world, TEXT, request_id="runs"))
    run.run()
    assert run.ends["waits", 0].error.code == "deadline_exceeded"  # type: ignore[union-attr]
    assert run.ends["runs", 0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(2))
def test_cancelling_at_any_moment_gives_back_every_block_and_byte(world: World, seed: int) -> None:
    chance = random.Random(seed)
    run = driver(world, deliver=LateDelivery(world, seed), num_blocks=20, max_tokens_per_step=5)
    for number in range(12):
        run.add(request_of(world, [number], 2, TEXT, 0, MORE, request_id=f"r{number}", sampling=greedy(12, n=2)))
        for _ in range(chance.randrange(12)):
            run.step()
        alive = [f"r{n}" for n in range(number + 1) if (f"r{n}", 0) not in run.ends]
        for request_id in chance.sample(alive, min(len(alive), chance.randrange(3))):
            run.note(run.engine.cancel(request_id))
            run.ends.pop((request_id, 1), None)
    for number in range(12):
        run.note(run.engine.cancel(f"r{number}"))
    run.check_idle()


def test_a_new_attempt_replaces_the_old_one(world: World) -> None:
    run = driver(world)
    run.add(request_of(world, TEXT, sampling=greedy(8)))
    for _ in range(3):
        run.step()
    given = list(run.outputs["r", 0])
    run.add(request_of(world, TEXT, sampling=greedy(8), attempt=1, outputs=[given]))
    run.run()
    assert run.ends["r", 0].attempt == 1
    assert run.outputs["r", 0] == solo(world, request_of(world, TEXT, sampling=greedy(8)))[0]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt_token_ids": [1, 300]}, "vocabulary of 300"),
        ({"outputs": [[300]]}, "vocabulary"),
        ({"outputs": [[1]], "sampling": greedy(n=2)}, "1 outputs so far were given for n = 2"),
        ({"outputs": [[1], [2]]}, "2 outputs so far were given for n = 1"),
        ({"sampling": greedy(stop_token_ids=[300])}, "vocabulary"),
        ({"sampling": greedy(logit_bias={300: 1.0})}, "vocabulary"),
        ({"sampling": greedy(logit_bias={3: float("nan")})}, "not finite"),
        ({"sampling": greedy(allowed_token_ids=[])}, "allowed_token_ids is empty"),
        ({"sampling": greedy(allowed_token_ids=[300])}, "vocabulary"),
        ({"sampling": greedy(bad_words_ids=[[3], []])}, "a word without tokens"),
        ({"sampling": greedy(bad_words_ids=[[3, 300]])}, "vocabulary"),
        ({"sampling": greedy(grammar_kind="regex", grammar="a")}, "tokenizer.json"),
        ({"sampling": greedy(num_prompt_logprobs=60_000)}, "above the limit"),
        ({"finished": [1]}, "choice 1 is said to be finished"),
        ({"pooling": "last", "sampling": greedy(n=2)}, "one choice"),
        ({"prompt_token_ids": list(range(200))}, "has 200 tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_and_the_next_is_served(
    world: World, fields: dict[str, object], word: str
) -> None:
    run = driver(world)
    run.add(generate_request(**{"token_ids": TEXT, **fields}, request_id="bad"))  # type: ignore[arg-type]
    error = run.ends["bad", 0].error
    assert error is not None
    assert word in error.message
    run.add(request_of(world, TEXT, request_id="good"))
    run.run()
    assert run.ends["good", 0].finish_reason == "length"


@pytest.mark.parametrize(
    ("offsets", "word"),
    [([0, 2], "overlaps"), ([len(TEXT)], "leaves the prompt"), ([1000], "leaves the prompt")],
)
def test_spans_that_overlap_or_leave_the_prompt_are_refused(world: World, offsets: list[int], word: str) -> None:
    run = driver(world)
    run.add(generate_request(TEXT, media=[picture(n, offset) for n, offset in enumerate(offsets)]))
    assert word in run.ends["r", 0].error.message  # type: ignore[union-attr]
    run.check_idle()


def test_more_choices_than_may_wait_are_refused_whole(world: World) -> None:
    run = driver(world, max_waiting=3)
    run.add(request_of(world, TEXT, 0, MORE, sampling=greedy(n=4)))
    assert run.ends["r", 0].error.code == "overloaded"  # type: ignore[union-attr]
    run.check_idle()


def test_a_request_larger_than_the_pool_is_refused_at_once_and_the_next_is_served(world: World) -> None:
    run = driver(world, num_blocks=8)
    run.add(
        request_of(world, TEXT, request_id="big", sampling=greedy(100)), request_of(world, TEXT, request_id="small")
    )
    assert "107 tokens of KV cache, but it holds 32" in run.ends["big", 0].error.message  # type: ignore[union-attr]
    run.run()
    assert run.ends["small", 0].finish_reason == "length"


def test_an_embedding_that_comes_twice_or_for_nobody_is_released_at_once(world: World) -> None:
    run = driver(world, embedding_cache_bytes=1 << 20)
    run.add(request_of(world, TEXT, 0, MORE))
    embedding = world.embeddings[key_of(0)]
    for _ in range(3):
        run.give(key_of(0), embedding)
    assert run.charged == embedding.nbytes
    run.give(key_of(2), world.embeddings[key_of(2)])
    assert run.charged == embedding.nbytes
    run.run()


def test_a_picture_that_stays_in_memory_is_not_asked_for_again(world: World) -> None:
    run = driver(world, embedding_cache_bytes=1 << 20)
    run.add(request_of(world, TEXT, 0, MORE, request_id="first"))
    run.run()
    run.add(request_of(world, MORE, 0, TEXT, request_id="second"))
    assert run.wanted[-1] == ("second", [])
    run.run()


def test_an_embedding_that_does_not_come_is_asked_for_once(world: World) -> None:
    run = driver(world, deliver=lambda key: None)
    run.add(request_of(world, TEXT, 0, MORE, sampling=greedy(4, n=2)))
    for _ in range(5):
        run.step()
    assert run.wanted == [("r", [key_of(0)])]


def test_the_request_that_is_next_in_need_is_told(world: World) -> None:
    engine: Engine = make_engine(world.pair.model)
    first: list[str | None] = []

    def note(events: object) -> None:
        first.extend(e.first_in_need for e in events if hasattr(e, "first_in_need"))  # type: ignore[attr-defined]

    note(engine.add(request_of(world, TEXT, request_id="text"), time.monotonic()))
    note(engine.add(request_of(world, TEXT, 0, request_id="a"), time.monotonic()))
    note(engine.add(request_of(world, TEXT, 1, request_id="b"), time.monotonic()))
    note(engine.cancel("a"))
    note(engine.cancel("b"))
    assert first == ["a", "b", None]


def test_placeholders_of_a_picture_are_within_reach_of_penalties(world: World) -> None:
    request = request_of(
        world, TEXT, 0, MORE, sampling=greedy(8, repetition_penalty=1.3, frequency_penalty=1.0, num_logprobs=1)
    )
    run = driver(world)
    run.add(request)
    run.run()
    assert PAD_ID in request.prompt_token_ids
    assert all(torch.isfinite(torch.tensor(logprobs.logprob)) for logprobs in run.logprobs["r", 0])


def test_the_first_token_tells_what_was_cached_for_requests_that_are_ended_from_outside(world: World) -> None:
    run = driver(world)
    request = request_of(world, list(range(1, 60)), request_id="first", sampling=greedy(4))
    run.add(request)
    run.run()
    again = msgspec.structs.replace(request, request_id="again")
    events = run.engine.add(again, now=time.monotonic())
    while not (tokens := [event for event in events if isinstance(event, SequenceTokens)]):
        events, _ = run.engine.step()
    assert tokens[0].finish_reason is None
    assert tokens[0].usage == Usage(prompt_tokens=59, completion_tokens=1, cached_tokens=56)
    run.engine.cancel("again")
