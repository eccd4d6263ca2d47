"""The fused layers against the same layers one by one: equal to the last bit, and left out where they cannot run."""

import dataclasses
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from decoder_svc.model import fused as module
from decoder_svc.model.amx import amx_library
from decoder_svc.model.text import TextModel
from tests.decoder_svc.model.amx_models import HIDDEN, make_model
from tests.decoder_svc.model.packing import Chunk, PagedRun, Prompt

pytestmark = pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")


def make_prompts(*lengths: int, levels: int | None = None) -> list[Prompt]:
    """Prompts of random tokens; with `levels` all but the first three of each are vision tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in lengths:
        ids = torch.randint(0, 280, (length,), generator=generator)
        rows, embeds = torch.empty(0, dtype=torch.int64), None
        if levels is not None:
            rows = torch.arange(3, length)
            embeds = torch.randn(len(rows), HIDDEN * (1 + levels), generator=generator).to(torch.bfloat16)
        prompts.append(Prompt(ids, torch.arange(length).expand(3, -1), rows, embeds))
    return prompts


def both_ways(model: TextModel, prompts: list[Prompt], *steps: list[Chunk]) -> None:
    """Assert logits and cache of some steps equal with the fused layers and without, to the last bit."""
    fused = model._fused
    assert fused is not None
    results = []
    for form in (fused, None):
        model._fused = form
        run = PagedRun(model, prompts, seed=5, block_size=16)
        results.append(([logits for chunks in steps for logits in run.step(chunks)], run.cache))
    model._fused = fused
    (got, own_cache), (expected, other_cache) = results
    assert torch.equal(own_cache.pool.view(torch.int16), other_cache.pool.view(torch.int16))  # bits, where compressed
    assert own_cache.count_tiles() == other_cache.count_tiles()
    assert torch.equal(cast("Tensor", own_cache.bases), cast("Tensor", other_cache.bases))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert torch.cat(got).isfinite().all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_model(tmp_path_factory.mktemp("fused"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 17, 33])
def test_a_step_in_one_call_equals_the_layers_one_by_one(
    model: TextModel, count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    prompts = make_prompts(*[3 + 37 * idx % 90 for idx in range(count)])
    whole = [Chunk(idx, 0, len(prompt) - 2) for idx, prompt in enumerate(prompts)]
    singles = [
        [Chunk(idx, len(prompt) - back, len(prompt) - back + 1) for idx, prompt in enumerate(prompts)]
        for back in (2, 1)
    ]
    both_ways(model, prompts, whole, *singles)


@pytest.mark.parametrize("levels", [None, 0, 1, 3, 4])
def test_mixed_steps_and_deepstack_levels_are_equal_too(model: TextModel, levels: int | None) -> None:
    prompts = make_prompts(900, 40, 70, levels=levels)
    both_ways(
        model,
        prompts,
        [Chunk(0, 0, 1), Chunk(1, 0, 39)],
        [Chunk(0, 1, 849), Chunk(1, 39, 40), Chunk(2, 0, 3)],
        [Chunk(2, 3, 70), Chunk(0, 849, 900)],
    )


def test_layers_with_biases_are_equal_too(tmp_path: Path) -> None:
    prompts = make_prompts(40, 3)
    chunks = [[Chunk(0, 0, 39), Chunk(1, 0, 2)], [Chunk(0, 39, 40), Chunk(1, 2, 3)]]
    both_ways(make_model(tmp_path, attention_bias=True), prompts, *chunks)


def test_a_listener_between_layers_gets_them_one_by_one(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PagedRun(model, make_prompts(20), block_size=16)
    step = run.model_input([Chunk(0, 0, 20)])
    last, _ = model.hidden_states(step, run.cache)
    monkeypatch.setattr(model._fused, "run", None)
    again, taken = model.hidden_states(step, run.cache, before_layers=[1])
    assert torch.equal(again, last)
    assert list(taken) == [1]


def test_a_row_that_is_not_a_number_stays_alone(model: TextModel) -> None:
    run = PagedRun(model, make_prompts(3, 3), block_size=16)
    step = run.model_input([Chunk(0, 0, 1), Chunk(1, 0, 1)])
    poison = torch.full((1, HIDDEN), float("nan"))
    logits = model(dataclasses.replace(step, vision_rows=torch.tensor([1]), vision_embeds=poison), run.cache)
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def test_what_the_kernels_lack_is_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_model(tmp_path / "wide", dtype=torch.float32)._fused is None
    assert make_model(tmp_path / "experts", is_moe=True)._fused is None
    assert make_model(tmp_path / "other", hidden_act="gelu")._fused is None
    assert make_model(tmp_path / "odd", intermediate_size=80)._fused is None
    monkeypatch.setattr(module, "amx_library", lambda: None)
    assert make_model(tmp_path / "none")._fused is None
