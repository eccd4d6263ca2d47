"""Steps that overlap: each is launched before the one before is read, and nobody can tell by the answers."""

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from common.messages import GenerateRequest, SamplingParams, SequenceTokens
from decoder_svc.scheduler import Chunk
from decoder_svc.step_runner import Step
from tests.decoder_svc.engines import Driver, LateDelivery, World, driver, request_of, solo
from tests.decoder_svc.grammars import EOS_ID, compiler
from tests.decoder_svc.requests import greedy, key_of

TEXT = [5, 17, 200, 33, 7, 90, 121]
MORE = [8, 9, 77]


def sampled(max_tokens: int = 14, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": max_tokens, "temperature": 1.0, **fields})


def mixed_requests(world: World) -> list[GenerateRequest]:
    """All that makes one token depend on those before it, beside what does not."""
    samplings = [
        greedy(20),
        sampled(20, n=3),
        sampled(top_p=0.9, top_k=40, repetition_penalty=1.3, num_logprobs=2),
        sampled(frequency_penalty=1.5, presence_penalty=0.5, n=2),
        greedy(bad_words_ids=[[number, other] for number in range(40) for other in range(40)], num_prompt_logprobs=1),
        greedy(min_tokens=6, stop_token_ids=list(range(0, 300, 2))),
        sampled(30, stop_token_ids=list(range(0, 300, 9)), n=3),
        sampled(24, grammar_kind="regex", grammar="([a-f]{2}-){3}[0-9]+", temperature=1.5, n=2),
    ]
    parts: list[list[int | list[int]]] = [[TEXT], [[5], 2, TEXT], [TEXT, 0, MORE, 1, [4]], [[6], 0, MORE, 0, TEXT]]
    return [
        request_of(world, *parts[number % len(parts)], request_id=f"r{number}", sampling=sampling)
        for number, sampling in enumerate(samplings)
    ]


def add(run: Driver, request: GenerateRequest) -> None:
    """As the server does: with the grammar compiled."""
    kind = request.sampling.grammar_kind
    grammar = None if kind is None else compiler().compile(kind, request.sampling.grammar)
    run.note(run.engine.add(request, time.monotonic(), grammar))


def told_of(run: Driver) -> dict[tuple[str, int], object]:
    """What a gateway hears of a choice, but for times, log probabilities and how it came in pieces."""
    return {
        name: (run.outputs[name], end.finish_reason, end.stop_token_id, end.usage.completion_tokens)
        for name, end in run.ends.items()
        if end.usage is not None
    }


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 200},
        {"num_blocks": 200, "max_tokens_per_step": 5, "max_sequences": 3},
        {"num_blocks": 22, "max_tokens_per_step": 9},
    ],
)
def test_answers_are_those_of_steps_in_turn(world: World, limits: dict[str, int]) -> None:
    told, logprobs = [], []
    for overlaps in (False, True):
        run = driver(world, deliver=LateDelivery(world, 1), eos_token_ids=[EOS_ID], overlaps_steps=overlaps, **limits)
        for request in mixed_requests(world):
            add(run, request)
        run.run()
        assert (run.engine.scheduler.num_preemptions > 0) == (limits["num_blocks"] < 50)
        told.append(told_of(run))
        logprobs.append([entry.logprob for entry in run.logprobs["r2", 0]])
    assert len(told[0]) == 14
    assert told[0] == told[1]
    assert len(logprobs[0]) == 14
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


class Watch:
    """The order in which an engine launches, reads and samples its steps, by the steps' numbers."""

    def __init__(self, run: Driver) -> None:
        runner = run.engine._runner
        self.order: list[tuple[str, int]] = []
        self.chunks: list[Chunk] = []
        numbers: dict[int, int] = {}
        launch, read, sample = runner.launch, runner.read, runner.sample

        def watched_launch(chunks: Any, before: Step | None = None) -> Step:
            step = launch(chunks, before)
            numbers[id(step)] = len(numbers)
            self.order.append(("launch", numbers[id(step)]))
            self.chunks += chunks
            self.steps.append(step)
            return step

        def watched(name: str, call: Any) -> Any:
            def wrapped(step: Step) -> Any:
                self.order.append((name, numbers[id(step)]))
                return call(step)

            return wrapped

        self.steps: list[Step] = []  # kept, so that no id comes twice
        runner.launch = watched_launch  # type: ignore[method-assign]
        runner.read = watched("read", read)  # type: ignore[method-assign]
        runner.sample = watched("sample", sample)  # type: ignore[method-assign]


def test_a_step_is_launched_before_the_one_before_is_read_and_sampled_after(world: World) -> None:
    run = driver(world, overlaps_steps=True)
    watch = Watch(run)
    run.add(request_of(world, TEXT, sampling=greedy(4)))
    run.run()
    assert watch.order == [
        ("launch", 0),
        ("sample", 0),
        *[event for n in range(1, 4) for event in (("launch", n), ("read", n - 1), ("sample", n))],
        ("read", 3),
    ]


@pytest.mark.parametrize(("stops", "in_vain"), [(True, 1), (False, 0)])
def test_an_end_that_nobody_foresees_costs_one_token_and_its_blocks_come_back(
    world: World, stops: bool, in_vain: int
) -> None:
    [whole] = solo(world, request_of(world, TEXT, sampling=greedy(12)))
    ends = {"stop_token_ids": [whole[-1]]} if stops else {}
    expected = whole[: whole.index(whole[-1])] if stops else whole
    run = driver(world, overlaps_steps=True)
    watch = Watch(run)
    run.add(request_of(world, TEXT, sampling=greedy(30 if stops else 12, **ends)))
    run.run()
    assert run.outputs["r", 0] == expected
    assert sum(chunk.num_tokens for chunk in watch.chunks) == len(TEXT) + len(expected) - (not stops) + in_vain


def test_choices_share_one_prefill_also_while_it_runs(world: World) -> None:
    run = driver(world, overlaps_steps=True)
    watch = Watch(run)
    run.add(request_of(world, TEXT, TEXT, TEXT, sampling=sampled(4, n=4)))
    run.run()
    prefills = [chunk.num_tokens for chunk in watch.chunks if chunk.num_tokens > 1]
    assert prefills == [21], "the other choices compute their last token alone"


@pytest.mark.parametrize("seed", range(3))
def test_cancels_between_launch_and_read_disturb_nobody(world: World, seed: int) -> None:
    chance = random.Random(seed)
    run = driver(world, deliver=LateDelivery(world, seed), num_blocks=24, max_tokens_per_step=6, overlaps_steps=True)
    kept: dict[str, GenerateRequest] = {}
    for number in range(14):
        request = request_of(
            world, [number], 2, TEXT, 0, MORE, request_id=f"r{number}", sampling=sampled(9, n=2, presence_penalty=0.4)
        )
        run.add(request)
        kept[request.request_id] = request
        for _ in range(chance.randrange(9)):
            run.step()
        if chance.random() < 0.4:
            gone = chance.choice(list(kept))
            run.note(run.engine.cancel(gone))
            del kept[gone]
    run.run()
    for request_id, request in kept.items():
        assert [run.outputs[request_id, choice] for choice in range(2)] == solo(world, request), request_id


def test_a_step_whose_results_are_lost_ends_its_requests_and_the_others_go_on(world: World) -> None:
    run = driver(world, overlaps_steps=True)
    old, new = request_of(world, TEXT, request_id="old"), request_of(world, MORE, 0, TEXT, request_id="new")
    run.add(old)
    run.step()
    read = run.engine._runner.read

    def failing(step: Step) -> Any:
        run.engine._runner.read = read  # type: ignore[method-assign]
        raise RuntimeError("a copy that failed, say")

    run.engine._runner.read = failing  # type: ignore[method-assign]
    run.add(new)
    run.step()
    assert run.ends["old", 0].error.code == "model_failure"  # type: ignore[union-attr]
    run.run()
    assert run.outputs["new", 0] == solo(world, new)[0]


def test_what_was_computed_for_an_old_attempt_never_touches_the_new_one(world: World) -> None:
    """The old attempt's embedding is not finite, which is seen after the new one has replaced it."""
    poisoned = {**world.embeddings, key_of(0): world.embeddings[key_of(0)] * float("nan")}
    run = driver(world, deliver=poisoned.__getitem__, overlaps_steps=True)
    run.add(request_of(world, TEXT, 0, MORE))
    run.step()
    assert run.engine._ahead is not None
    again = request_of(world, MORE, TEXT, attempt=1)
    run.add(again)
    run.run()
    assert run.ends["r", 0].attempt == 1
    assert run.outputs["r", 0] == solo(world, again)[0]


def test_what_waits_for_media_does_not_keep_the_last_tokens_from_being_told(world: World) -> None:
    arrived: dict[str, Tensor] = {}
    run = driver(world, deliver=arrived.get, overlaps_steps=True)
    run.add(request_of(world, [1], 0, MORE, request_id="waits"), request_of(world, TEXT, request_id="runs"))
    while ("runs", 0) not in run.ends:
        assert run.step(), "the engine sleeps although tokens are not read"
    arrived.update(world.embeddings)
    run.run()
    assert isinstance(run.ends["waits", 0], SequenceTokens)


def test_steps_in_turn_are_the_order_on_cpu_unless_it_is_told(world: World) -> None:
    run = driver(world)
    run.add(request_of(world, TEXT, sampling=greedy(2)))
    run.step()
    assert run.engine._ahead is None
    assert len(run.outputs["r", 0]) == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_error_of_the_device_itself_ends_the_engine(world: World, overlaps: bool) -> None:
    """After one no work can be given to it: the process ends, and gateways go on elsewhere."""
    run = driver(world, overlaps_steps=overlaps)

    def broken(*_: object) -> Step:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    run.engine._runner.launch = broken  # type: ignore[method-assign,assignment]
    run.add(request_of(world, TEXT))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        run.engine.step()
