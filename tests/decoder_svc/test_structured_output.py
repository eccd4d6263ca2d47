"""The engine with grammars: every answer that ends follows its grammar, also over a seam and beside free ones."""

import json
import threading
import time

import jsonschema_rs
import msgspec
import pytest
import torch

from common.messages import GenerateRequest, SamplingParams
from decoder_svc.grammar import GrammarKind
from decoder_svc.grammar_masks import GrammarMasker
from decoder_svc.model.kernels import select_kernels
from decoder_svc.sampler import Sampler
from tests.decoder_svc.engines import Driver, World, driver, make_engine, request_of, solo
from tests.decoder_svc.grammars import EOS_ID, VOCAB_SIZE, compiler, ids_of, schema_text, text_of, varied_schema
from tests.decoder_svc.requests import generate_request, greedy, sequence_of
from tests.decoder_svc.sampling import sample_with

TEXT = [5, 17, 200, 33, 7, 90, 121]


def sampling_of(kind: GrammarKind, text: str | None, max_tokens: int = 60, **fields: object) -> SamplingParams:
    wanted = {"seed": 3, "temperature": 1.0, "max_tokens": max_tokens, "grammar_kind": kind, "grammar": text, **fields}
    return msgspec.convert(wanted, SamplingParams)


def add(run: Driver, request: GenerateRequest) -> None:
    """As the server does: with the grammar compiled."""
    kind = request.sampling.grammar_kind
    grammar = None if kind is None else compiler().compile(kind, request.sampling.grammar)
    for choice, output in enumerate(request.outputs):
        run.outputs[request.request_id, choice] = list(output)
    run.note(run.engine.add(request, time.monotonic(), grammar))


def answer(world: World, sampling: SamplingParams, **fields: object) -> Driver:
    run = driver(world, eos_token_ids=[EOS_ID])  # type: ignore[arg-type]
    add(run, generate_request(TEXT, sampling=sampling, **fields))
    return run.run()


def drawn_answers(texts: list[str], num_steps: int) -> list[list[int] | None]:
    """Answers in JSON schemas, drawn from random logits; None for those that do not end."""
    masker, sampler = GrammarMasker(VOCAB_SIZE), Sampler([EOS_ID], select_kernels("cpu"))
    states = [compiler().compile("json_schema", text).begin([]) for text in texts]
    sequences = [sequence_of([1], sampling=sampling_of("json_schema", t, seed=i)) for i, t in enumerate(texts)]
    generator = torch.Generator().manual_seed(len(texts))
    answers: list[list[int] | None] = [None] * len(texts)
    for _ in range(num_steps):
        open_ones = [i for i, answer in enumerate(answers) if answer is None]
        logits = torch.randn(len(open_ones), VOCAB_SIZE, generator=generator)
        masks = masker.begin([states[i] for i in open_ones])
        for i, token in zip(
            open_ones, sample_with(sampler, logits, [sequences[i] for i in open_ones], masks), strict=True
        ):
            assert token.is_possible
            assert states[i].error is None
            if token.token_id != EOS_ID:
                sequences[i].output_token_ids.append(token.token_id)
                states[i].accept(token.token_id)
            if token.token_id == EOS_ID or states[i].is_complete:
                answers[i] = sequences[i].output_token_ids
    return answers


def test_every_answer_in_200_schemas_that_ends_is_valid() -> None:
    schemas = {schema_text(schema): schema for schema in map(varied_schema, range(240))}
    texts = list(schemas)[:200]
    assert len(texts) == 200
    num_ended = 0
    for first in range(0, 200, 40):
        batch = texts[first : first + 40]
        for text, answer in zip(batch, drawn_answers(batch, 130), strict=True):
            if answer is not None:
                num_ended += 1
                jsonschema_rs.validator_for(schemas[text]).validate(json.loads(text_of(answer)))
    assert num_ended > 160


def test_an_answer_that_can_grow_no_further_ends_with_its_last_token(world: World) -> None:
    run = answer(world, sampling_of("regex", "[0-9]{4}"))
    assert len(text_of(run.outputs["r", 0])) == 4
    assert text_of(run.outputs["r", 0]).isdigit()
    end = run.ends["r", 0]
    assert (end.finish_reason, end.stop_token_id, len(end.tokens)) == ("stop", None, 1)


def test_an_answer_may_end_where_its_grammar_may(world: World) -> None:
    ends = set()
    for seed in range(20):
        run = answer(world, sampling_of("regex", "a[ab]*", 12, seed=seed, logit_bias={EOS_ID: 2.0}))
        assert set(text_of(run.outputs["r", 0])) <= {"a", "b"}
        ends.add((run.ends["r", 0].finish_reason, run.ends["r", 0].stop_token_id))
    assert ("stop", EOS_ID) in ends


def test_an_ignored_end_does_not_keep_a_finished_grammar_from_ending(world: World) -> None:
    run = answer(world, sampling_of("choice", '["yes", "no"]', ignore_eos=True, min_tokens=40, max_tokens=60))
    assert text_of(run.outputs["r", 0]) in ("yes", "no")
    assert run.ends["r", 0].finish_reason == "stop"


def test_free_and_bound_answers_in_one_batch_are_as_they_are_alone(world: World) -> None:
    free = request_of(world, TEXT, request_id="free", sampling=greedy(12))
    bound = sampling_of("regex", "[a-f]{12}")
    run = driver(world)
    add(run, free)
    add(run, generate_request(TEXT, request_id="bound", sampling=bound))
    add(run, generate_request(TEXT, request_id="other", sampling=sampling_of("regex", "[0-9]{9}")))
    run.run()
    assert run.outputs["free", 0] == solo(world, free)[0]
    assert run.outputs["bound", 0] == answer(world, bound).outputs["r", 0]
    assert len(text_of(run.outputs["other", 0])) == 9


@pytest.mark.parametrize("cut", [0, 1, 9, 17])
def test_a_resumed_answer_goes_on_in_its_grammar_with_the_same_tokens(world: World, cut: int) -> None:
    sampling = sampling_of("regex", "[a-z]{6}-[0-9]{6}-[A-F]{4}", n=2, frequency_penalty=0.5)
    whole = answer(world, sampling)
    outputs = [whole.outputs["r", choice] for choice in range(2)]
    again = answer(world, sampling, attempt=1, outputs=[output[:cut] for output in outputs])
    assert [again.outputs["r", choice] for choice in range(2)] == outputs
    assert {again.ends["r", choice].finish_reason for choice in range(2)} == {"stop"}


def test_a_resumed_answer_that_was_complete_ends_at_once(world: World) -> None:
    run = driver(world)
    add(run, generate_request(TEXT, sampling=sampling_of("choice", '["yes"]'), outputs=[ids_of("yes")]))
    assert (run.ends["r", 0].finish_reason, run.ends["r", 0].tokens) == ("stop", [])
    run.check_idle()


def test_what_excludes_every_token_ends_that_request_alone(world: World) -> None:
    digits = ids_of("0123456789")
    run = driver(world, eos_token_ids=[EOS_ID])  # type: ignore[arg-type]
    add(run, generate_request(TEXT, request_id="free", sampling=greedy(6)))
    sampling = sampling_of("regex", "[0-9]{4}", bad_words_ids=[[digit] for digit in digits])
    add(run, generate_request(TEXT, request_id="bound", sampling=sampling))
    run.run()
    error = run.ends["bound", 0].error
    assert error is not None
    assert error.code == "invalid_request"
    assert "no token can come next" in error.message
    assert len(run.outputs["free", 0]) == 6


def test_a_grammar_without_a_compiler_is_refused(world: World) -> None:
    run = driver(world)
    run.add(generate_request(TEXT, sampling=sampling_of("json_object", None)))
    assert "tokenizer.json" in run.ends["r", 0].error.message  # type: ignore[union-attr]
    run.check_idle()


def test_preemption_does_not_lose_the_place_in_a_grammar(world: World) -> None:
    requests = [
        generate_request([n, *TEXT], request_id=f"r{n}", sampling=sampling_of("regex", "[a-z]{24}", 30))
        for n in range(3)
    ]
    run = driver(world, num_blocks=14)
    for request in requests:
        add(run, request)
    run.run()
    assert run.engine.scheduler.num_preemptions > 0
    assert all(len(text_of(run.outputs[request.request_id, 0])) == 24 for request in requests)


class WaitingModel(torch.nn.Module):
    """Its forward ends only once the masks of its step are there."""

    def __init__(self, model: torch.nn.Module, masks_are_there: threading.Event) -> None:
        super().__init__()
        self.inner, self.masks_are_there = model, masks_are_there
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.kernels, self.attention = model.kernels, model.attention
        self.num_waits = 0

    def forward(self, model_input: object, kv_cache: object) -> object:
        assert self.masks_are_there.wait(10), "the masks are not computed while the model runs"
        self.masks_are_there.clear()
        self.num_waits += 1
        return self.inner(model_input, kv_cache)


def test_masks_are_computed_while_the_model_runs(world: World) -> None:
    there = threading.Event()
    model = WaitingModel(world.pair.model, there)
    run = Driver(make_engine(model), world.embeddings.__getitem__)  # type: ignore[arg-type]
    banned = run.engine._runner.masker._banned

    def computed(states: object) -> object:
        result = banned(states)  # type: ignore[arg-type]
        there.set()
        return result

    run.engine._runner.masker._banned = computed  # type: ignore[method-assign,assignment]
    add(run, generate_request(TEXT, sampling=sampling_of("regex", "[0-9]{5}")))
    run.run()
    assert text_of(run.outputs["r", 0]).isdigit()
    assert model.num_waits == 5
