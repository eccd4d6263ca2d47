"""The engine with a tiny model: the reference's tokens, whatever comes late, is taken away, fails or leaves."""

import pytest

from common.messages import GenerateRequest, MediaItem, SamplingParams
from tests.decoder_svc.engines import Driver, LateDelivery, World, driver, request_of, solo
from tests.decoder_svc.requests import generate_request, greedy, key_of

pytestmark = pytest.mark.usefixtures("steps")
TEXT = [5, 17, 200, 33, 7, 90, 121]
MORE = [8, 9, 77]


def mixed_requests(world: World, max_tokens: int = 20, **sampling: object) -> list[GenerateRequest]:
    """Text, one picture, pictures between texts, the same text with another picture, one picture twice."""
    prompts: list[list[int | list[int]]] = [
        [TEXT],
        [[5], 2, TEXT],
        [TEXT, 0, MORE, 1, [4]],
        [TEXT, 1, MORE, 0, [4]],
        [[6], 0, MORE, 0, TEXT],
    ]
    return [
        request_of(world, *parts, request_id=f"r{i}", sampling=greedy(max_tokens, **sampling))
        for i, parts in enumerate(prompts)
    ]


def check_against_reference(world: World, requests: list[GenerateRequest], done: Driver) -> None:
    for request in requests:
        expected = world.reference(request.prompt_token_ids, request.media, request.sampling.max_tokens)
        assert len(set(expected)) >= 5, "the reference tells too little"
        assert done.outputs[request.request_id, 0] == expected, request.request_id
        end = done.ends[request.request_id, 0]
        assert (end.finish_reason, end.stop_token_id) == ("length", None)
        assert end.usage is not None
        assert end.usage.prompt_tokens == len(request.prompt_token_ids)
        assert end.usage.completion_tokens == request.sampling.max_tokens


def test_greedy_tokens_equal_the_reference_for_text_and_pictures_together(world: World) -> None:
    requests = mixed_requests(world)
    run = driver(world)
    run.add(*requests)
    run.run()
    assert run.engine.scheduler.num_preemptions == 0
    check_against_reference(world, requests, run)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_the_same_when_embeddings_come_late_and_blocks_run_out(world: World, seed: int) -> None:
    requests = mixed_requests(world)
    run = driver(world, deliver=LateDelivery(world, seed), num_blocks=15, max_tokens_per_step=9, max_sequences=3)
    run.add(*requests)
    run.run()
    assert run.engine.scheduler.num_preemptions > 0
    check_against_reference(world, requests, run)


def test_two_picture_requests_in_a_pool_for_one_and_a_half_give_their_solo_outputs(world: World) -> None:
    requests = [
        request_of(world, [number], 2, TEXT, 1, MORE, request_id=f"r{number}", sampling=greedy(16))
        for number in range(2)
    ]
    run = driver(world, num_blocks=18)
    run.add(*requests)
    run.run()
    assert run.engine.scheduler.num_preemptions > 0
    asked = [key for request_id, keys in run.wanted if request_id == "r1" for key in keys]
    assert len(asked) > 2, "a preempted request must ask again for embeddings that are gone"
    for request in requests:
        assert run.outputs[request.request_id, 0] == solo(world, request)[0]


def test_the_backlog_is_what_queued_prompts_take_at_the_measured_rate(world: World) -> None:
    run = driver(world, max_tokens_per_step=8)
    run.add(generate_request([*range(60)], request_id="first"))
    run.engine.measure_backlog()
    assert run.engine.backlog_s == 0.0, "no step has shown a rate yet"
    run.run()
    rate = run.engine._metrics._prefill.per_s
    assert rate > 0
    run.add(*(generate_request([*range(number, number + 40)], request_id=f"r{number}") for number in (100, 200)))
    run.engine.measure_backlog()
    assert run.engine.backlog_s == pytest.approx(80 / rate)
    run.run()
    run.engine.measure_backlog()
    assert run.engine.backlog_s == 0.0


@pytest.mark.parametrize("max_tokens_per_step", [1, 7, 16, 200])
def test_the_size_of_prefill_chunks_changes_no_token(world: World, max_tokens_per_step: int) -> None:
    request = request_of(world, TEXT, 2, MORE, sampling=greedy(8))
    run = driver(world, max_tokens_per_step=max_tokens_per_step)
    run.add(request)
    run.run()
    check_against_reference(world, [request], run)


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "prefix-hit"])
def test_no_size_of_prefill_chunks_changes_a_token_of_several_pictures(world: World, is_known: bool) -> None:
    request = request_of(world, TEXT, 0, MORE, 2, TEXT, 1, [4], sampling=greedy(8))
    shared = request_of(world, TEXT, 0, MORE, 2, MORE, request_id="before", sampling=greedy(1))
    length = len(request.prompt_token_ids)
    for max_tokens_per_step in range(1, length + 1):
        run = driver(world, max_tokens_per_step=max_tokens_per_step)
        if is_known:
            run.add(shared)
            run.run()
        run.add(request)
        run.run()
        check_against_reference(world, [request], run)
        usage = run.ends["r", 0].usage
        assert usage is not None
        assert (usage.cached_tokens > 0) == is_known


def test_every_choice_is_its_own_and_the_prompt_is_shared(world: World) -> None:
    request = request_of(world, TEXT, 0, MORE, sampling=SamplingParams(seed=5, max_tokens=12, temperature=1.5, n=4))
    run = driver(world)
    run.add(request)
    run.run()
    outputs = [run.outputs["r", choice] for choice in range(4)]
    assert all(len(output) == 12 for output in outputs)
    assert len({tuple(output) for output in outputs}) == 4
    assert run.wanted == [("r", [key_of(0)])]


@pytest.mark.parametrize(
    "sampling",
    [
        greedy(16),
        greedy(16, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(seed=9, max_tokens=16, temperature=1.2, top_p=0.9, n=2, frequency_penalty=0.7),
    ],
)
def test_a_request_that_is_resumed_with_its_outputs_so_far_goes_on_the_same(
    world: World, sampling: SamplingParams
) -> None:
    request = request_of(world, TEXT, 1, MORE, sampling=sampling)
    whole = solo(world, request)
    for cut in (1, 7, 15):
        run = driver(world)
        run.add(request_of(world, TEXT, 1, MORE, sampling=sampling, attempt=1, outputs=[o[:cut] for o in whole]))
        run.run()
        assert [run.outputs["r", choice] for choice in range(sampling.n)] == whole
        usage = run.ends["r", 0].usage
        assert usage is not None
        assert usage.completion_tokens == 16


def test_penalties_are_applied_and_change_the_greedy_answer(world: World) -> None:
    plain = solo(world, request_of(world, TEXT, sampling=greedy(24)))
    penalised = solo(world, request_of(world, TEXT, sampling=greedy(24, presence_penalty=20.0)))
    assert plain != penalised
    assert len(set(penalised[0])) == 24


def test_a_choice_that_had_ended_before_the_resumption_is_not_run_again(world: World) -> None:
    sampling = greedy(6, n=2)
    whole = solo(world, request_of(world, TEXT, sampling=sampling))
    run = driver(world, max_model_len=len(TEXT) + 6)
    run.add(request_of(world, TEXT, sampling=sampling, outputs=[whole[0], whole[1][:2]]))
    assert run.ends["r", 0].finish_reason == "length"
    assert run.ends["r", 0].tokens == []
    run.run()
    assert run.outputs["r", 1] == whole[1]


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(world: World) -> None:
    [whole] = solo(world, request_of(world, TEXT, sampling=greedy(20)))
    stop = whole[9]
    run = driver(world)
    run.add(request_of(world, TEXT, sampling=greedy(20, stop_token_ids=[stop])))
    run.run()
    end = run.ends["r", 0]
    assert run.outputs["r", 0] == whole[: whole.index(stop)]
    assert (end.finish_reason, end.stop_token_id, end.tokens) == ("stop", stop, [])
    assert end.usage is not None
    assert end.usage.completion_tokens == whole.index(stop) + 1


def test_the_end_token_stops_unless_it_is_ignored(world: World) -> None:
    [whole] = solo(world, request_of(world, TEXT, sampling=greedy(20)))
    eos = whole[5]
    run = driver(world, eos_token_ids=[eos])  # type: ignore[arg-type]
    run.add(request_of(world, TEXT, request_id="ends", sampling=greedy(20)))
    run.add(request_of(world, TEXT, request_id="ignores", sampling=greedy(20, ignore_eos=True)))
    run.add(request_of(world, TEXT, request_id="waits", sampling=greedy(20, min_tokens=8)))
    run.run()
    assert run.outputs["ends", 0] == whole[: whole.index(eos)]
    assert len(run.outputs["ignores", 0]) == 20
    assert eos not in run.outputs["ignores", 0]
    assert len(run.outputs["waits", 0]) >= 8


def test_the_context_length_ends_an_answer(world: World) -> None:
    run = driver(world, max_model_len=len(TEXT) + 5)
    run.add(request_of(world, TEXT, sampling=greedy(100)))
    run.run()
    assert len(run.outputs["r", 0]) == 5
    assert run.ends["r", 0].finish_reason == "length"


def test_log_probabilities_come_with_every_token(world: World) -> None:
    run = driver(world)
    run.add(request_of(world, TEXT, sampling=greedy(6, num_logprobs=3)))
    run.run()
    for token, logprobs in zip(run.outputs["r", 0], run.logprobs["r", 0], strict=True):
        assert logprobs.top[0][0] == token
        assert logprobs.top[0][1] == pytest.approx(logprobs.logprob)


def test_a_second_question_about_the_same_picture_needs_neither_embedding_nor_prefill(world: World) -> None:
    run = driver(world)
    run.add(request_of(world, TEXT, 2, [1, 2, 3, 4], MORE, request_id="first"))
    run.run()
    run.add(request_of(world, TEXT, 2, [1, 2, 3, 4], TEXT, request_id="second"))
    assert run.wanted[-1] == ("second", [])
    run.run()
    usage = run.ends["second", 0].usage
    assert usage is not None
    assert usage.cached_tokens == 20
    assert run.outputs["second", 0] == solo(world, request_of(world, TEXT, 2, [1, 2, 3, 4], TEXT))[0]


def test_another_picture_in_the_same_text_never_gets_the_first_ones_answer(world: World) -> None:
    world_of_two = {key_of(0): world.embeddings[key_of(0)], key_of(9): world.embeddings[key_of(0)].flip(0)}
    run = driver(world, deliver=world_of_two.__getitem__)
    answers = []
    for name, number in (("a", 0), ("b", 9), ("a again", 0)):
        media = [
            MediaItem(key=key_of(number), modality="image", grid=m.grid, spans=m.spans)
            for m in world.prompt(TEXT, 0, MORE)[1]
        ]
        run.add(generate_request(world.prompt(TEXT, 0, MORE)[0], media=media, request_id=name, sampling=greedy(12)))
        run.run()
        answers.append(run.outputs[name, 0])
    cached = [run.ends[name, 0].usage.cached_tokens for name in ("a", "b", "a again")]  # type: ignore[union-attr]
    assert answers[0] == answers[2] != answers[1]
    assert cached == [0, 4, 12]
