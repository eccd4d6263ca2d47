"""Log probabilities of prompts: the reference's, whatever the chunks, caches, preemptions and choices."""

import pytest
import torch

from common.messages import TokenLogprobs
from decoder_svc import scheduler
from tests.decoder_svc.engines import Driver, World, driver, request_of
from tests.decoder_svc.requests import greedy

pytestmark = pytest.mark.usefixtures("steps")
PROMPT = [5, 17, 200, 33, 7, 90, 121, 8, 9, 77, 60, 61, 62]


def reference(world: World, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = world.pair.reference(input_ids=torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(dim=1)
    return [float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1)]


def prompt_logprobs_of(run: Driver, request_id: str = "r") -> list[TokenLogprobs]:
    [found] = [event.prompt_logprobs for event in run.events[request_id] if event.prompt_logprobs is not None]
    return found


@pytest.mark.parametrize("max_tokens_per_step", [1, 5, 64])
def test_they_are_the_references_at_any_chunk_size(world: World, max_tokens_per_step: int) -> None:
    run = driver(world, max_tokens_per_step=max_tokens_per_step)
    run.add(request_of(world, PROMPT, sampling=greedy(3, num_prompt_logprobs=2, n=2)))
    run.run()
    found = prompt_logprobs_of(run)
    assert [entry.logprob for entry in found] == pytest.approx(reference(world, PROMPT), abs=1e-4)
    assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.logprob for entry in found)
    assert run.outputs["r", 0] == run.outputs["r", 1]


def test_a_cached_prompt_is_computed_again_for_them(world: World) -> None:
    run = driver(world)
    run.add(request_of(world, PROMPT, request_id="plain"))
    run.run()
    run.add(request_of(world, PROMPT, sampling=greedy(3, num_prompt_logprobs=0)))
    run.run()
    assert [e.logprob for e in prompt_logprobs_of(run)] == pytest.approx(reference(world, PROMPT), abs=1e-4)
    assert run.outputs["r", 0] == run.outputs["plain", 0][:3]


def test_chunks_are_bounded_by_the_rows_of_logits_that_they_need(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_LOGPROB_ROWS", 4)
    run = driver(world)
    run.add(request_of(world, PROMPT, sampling=greedy(2, num_prompt_logprobs=1)))
    run.step()
    assert run.engine.scheduler.running[0].num_computed_tokens == 4
    run.run()
    assert len(prompt_logprobs_of(run)) == len(PROMPT) - 1


def test_a_picture_in_the_prompt_and_a_preemption_change_nothing(world: World) -> None:
    request = request_of(world, PROMPT, 0, [3, 4, 5], sampling=greedy(14, num_prompt_logprobs=1))
    alone = driver(world)
    alone.add(request)
    alone.run()
    run = driver(world, num_blocks=12, max_tokens_per_step=6)
    run.add(request_of(world, [9, *PROMPT], request_id="older", sampling=greedy(30)), request)
    run.run()
    assert run.engine.scheduler.num_preemptions > 0
    found, expected = prompt_logprobs_of(run), prompt_logprobs_of(alone)
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected], abs=1e-4)


def test_a_resumed_request_does_not_tell_them_again(world: World) -> None:
    sampling = greedy(6, num_prompt_logprobs=1)
    run = driver(world)
    run.add(request_of(world, PROMPT, sampling=sampling, outputs=[[1, 2]]))
    run.run()
    assert all(event.prompt_logprobs is None for event in run.events["r"])
