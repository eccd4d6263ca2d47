"""The language model against transformers on tiny random weights: hidden states, logits, chunks, packing, DeepStack."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import CheckpointError, ModelFailure
from decoder_svc.model.text import TextModel
from tests.decoder_svc.model.packing import BLOCK_SIZE, Chunk, PagedRun, Prompt, run_in_chunks
from tests.decoder_svc.model.pairs import Case, Pair
from tests.tiny_models import tiny_config

TOLERANCE = 2e-5


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def whole(model: TextModel, prompt: Prompt) -> Tensor:
    return run_in_chunks(model, prompt, len(prompt))


def layer_inputs(layers: Any, last: Any, run: Any) -> list[Tensor]:
    """What enters each layer and the final norm while `run` runs: the hidden states after each layer and its level."""
    seen: list[Tensor] = []

    def keep(_module: Any, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].detach().clone().flatten(0, -2))

    hooks = [module.register_forward_pre_hook(keep) for module in [*layers, last]]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def hidden_states(model: TextModel, prompt: Prompt) -> list[Tensor]:
    return layer_inputs(model.layers, model.norm, lambda: whole(model, prompt))


def test_hidden_states_after_each_layer_equal_the_reference(pair: Pair, cases: list[Case]) -> None:
    text = pair.reference.model.language_model
    for case in cases:
        expected = layer_inputs(text.layers, text.norm, lambda case=case: pair.reference(**case.arguments))
        got = hidden_states(pair.model, case.prompt)
        assert len(got) == len(expected) == pair.model.config.num_hidden_layers + 1
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)


def test_logits_equal_the_reference(pair: Pair, cases: list[Case]) -> None:
    for case in cases:
        assert_close(whole(pair.model, case.prompt), pair.reference(**case.arguments).logits[0])


def test_tied_model_has_no_output_projection_of_its_own(pair: Pair) -> None:
    assert (pair.model.lm_head is None) == pair.reference.config.tie_word_embeddings


@pytest.mark.parametrize("size", [1, 7, 16])
def test_chunked_prefill_equals_the_whole_though_chunks_cut_images(pair: Pair, cases: list[Case], size: int) -> None:
    for case in cases[1:3]:
        assert_close(run_in_chunks(pair.model, case.prompt, size, seed=size), whole(pair.model, case.prompt))


def test_order_of_blocks_in_the_cache_changes_nothing(pair: Pair, cases: list[Case]) -> None:
    prompt = cases[2].prompt
    expected = run_in_chunks(pair.model, prompt, 5, seed=0)
    assert torch.equal(run_in_chunks(pair.model, prompt, 5, seed=99), expected)


def test_several_sequences_in_one_step_equal_each_alone(pair: Pair, cases: list[Case]) -> None:
    prompts = [case.prompt for case in cases]
    run = PagedRun(pair.model, prompts, seed=3)
    got: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    # Unequal paces mix whole prefills, chunks that cut images and single tokens in each step.
    for paces in ([99, 3, 7, 1], [1, 5, 1, 9], [1, 1, 99, 2], [1, 99, 1, 1], [1, 1, 1, 99]):
        chunks = [
            Chunk(idx, done[idx], min(done[idx] + pace, len(prompt)))
            for idx, (pace, prompt) in enumerate(zip(paces, prompts, strict=True))
            if done[idx] < len(prompt)
        ]
        for chunk, logits in zip(chunks, run.step(chunks), strict=True):
            got[chunk.prompt].append(logits)
            done[chunk.prompt] = chunk.end
    assert done == [len(prompt) for prompt in prompts]
    for parts, prompt in zip(got, prompts, strict=True):
        assert_close(torch.cat(parts), whole(pair.model, prompt))


def test_only_the_wanted_rows_get_logits(pair: Pair, cases: list[Case]) -> None:
    prompt = cases[1].prompt
    run = PagedRun(pair.model, [prompt])
    step = run.model_input([Chunk(0, 0, len(prompt))])
    wanted = torch.tensor([len(prompt) - 1, 2])
    got = pair.model(dataclasses.replace(step, logits_rows=wanted), run.cache)
    assert_close(got, whole(pair.model, prompt)[wanted])
    assert pair.model(dataclasses.replace(step, logits_rows=wanted[:0]), run.cache).shape == (0, 300)


def test_zeroed_deepstack_level_first_changes_what_follows_its_layer(pair: Pair, cases: list[Case]) -> None:
    prompt = cases[1].prompt
    assert prompt.vision_embeds is not None
    width = pair.model.config.hidden_size
    full = hidden_states(pair.model, prompt)
    num_levels = prompt.vision_embeds.shape[1] // width - 1
    assert num_levels == 3
    for level in range(num_levels):
        embeds = prompt.vision_embeds.clone()
        embeds[:, width * (1 + level) : width * (2 + level)] = 0
        states = hidden_states(pair.model, dataclasses.replace(prompt, vision_embeds=embeds))
        is_same = [torch.equal(a, b) for a, b in zip(full, states, strict=True)]
        # State i enters layer i, so it is the first to change after layer `level` when i = level + 1.
        assert is_same == [idx <= level for idx in range(len(full))]
        text_rows = torch.ones(len(prompt), dtype=torch.bool)
        text_rows[prompt.vision_offsets] = False
        assert torch.equal(states[level + 1][text_rows], full[level + 1][text_rows])


def test_all_levels_zero_differs_from_the_full_payload(pair: Pair, cases: list[Case]) -> None:
    prompt = cases[1].prompt
    assert prompt.vision_embeds is not None
    embeds = prompt.vision_embeds.clone()
    embeds[:, pair.model.config.hidden_size :] = 0
    zeroed = whole(pair.model, dataclasses.replace(prompt, vision_embeds=embeds))
    full = whole(pair.model, prompt)
    assert (zeroed - full).abs().max() > 0.1 * full.abs().max()


def test_payload_without_levels_is_embeddings_alone(pair: Pair, cases: list[Case]) -> None:
    prompt = cases[1].prompt
    assert prompt.vision_embeds is not None
    width = pair.model.config.hidden_size
    embeds = prompt.vision_embeds.clone()
    embeds[:, width:] = 0
    without = dataclasses.replace(prompt, vision_embeds=embeds[:, :width])
    assert_close(whole(pair.model, without), whole(pair.model, dataclasses.replace(prompt, vision_embeds=embeds)))


@pytest.mark.parametrize("columns", [47, 49, 48 * 6])
def test_payload_of_another_width_is_a_model_failure(pair: Pair, cases: list[Case], columns: int) -> None:
    prompt = cases[1].prompt
    embeds = torch.zeros(prompt.vision_offsets.shape[0], columns)
    with pytest.raises(ModelFailure, match=r"encoder serves another model|DeepStack levels"):
        whole(pair.model, dataclasses.replace(prompt, vision_embeds=embeds))


def test_stale_nan_in_shared_blocks_does_not_reach_another_sequence(pair: Pair, cases: list[Case]) -> None:
    prompts = [cases[0].prompt, cases[1].prompt]
    run = PagedRun(pair.model, prompts)
    run.cache.keys.fill_(float("nan"))
    run.cache.values.fill_(float("nan"))
    assert len(prompts[0]) % BLOCK_SIZE
    for token in range(len(prompts[0])):
        chunks = [Chunk(0, token, token + 1), Chunk(1, token, token + 1)]
        assert all(torch.isfinite(logits).all() for logits in run.step(chunks))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"hidden_act": "mish"}, "mish"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6, "factor": 2.0, "mrope_section": [4, 2, 2]}},
            "yarn",
        ),
    ],
)
def test_configuration_that_cannot_be_computed_is_refused(text: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        TextModel(tiny_config(text=text).text_config)
