"""The fused layers against the same layers one by one: equal to the last bit, and left out where they cannot run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoder_svc.model import fused as module
from decoder_svc.model.amx import amx_library
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from tests.decoder_svc.model.packing import Chunk, PagedRun, Prompt
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
HIDDEN = SIZES["hidden_size"]


def make_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, is_moe: bool = False, **text: Any) -> TextModel:
    config = tiny_config(is_moe=is_moe, text=SIZES | text, vision={"out_hidden_size": HIDDEN})
    save_checkpoint(tiny_model(config), folder)
    return load_text_model(folder, dtype=dtype, device="cpu")


def make_prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    nowhere = torch.empty(0, dtype=torch.int64)
    return [
        Prompt(torch.randint(0, 280, (n,), generator=generator), torch.arange(n).expand(3, -1), nowhere, None)
        for n in lengths
    ]


def run_prompts(model: TextModel, prompts: list[Prompt], is_fused: bool) -> tuple[list[Tensor], Tensor]:
    """Logits of two steps of single tokens behind a prefill, and the cache behind them."""
    kept = model._fused
    model._fused = kept if is_fused else None
    run = PagedRun(model, prompts, seed=5, block_size=16)
    if prefills := [Chunk(idx, 0, len(prompt) - 2) for idx, prompt in enumerate(prompts) if len(prompt) > 2]:
        run.step(prefills)
    logits = []
    for back in (2, 1):
        ends = [len(prompt) - back for prompt in prompts]
        logits += run.step([Chunk(idx, end, end + 1) for idx, end in enumerate(ends)])
    model._fused = kept
    return logits, run.cache.pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_model(tmp_path_factory.mktemp("fused"))


class Refusing:
    """In place of the fused layers: what they are asked, and nothing that they could run."""

    def __init__(self, real: module.FusedLayers) -> None:
        self.real = real
        self.answers: list[bool] = []

    def can_run(self, *arguments: Any) -> bool:
        self.answers.append(self.real.can_run(*arguments))
        return False


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 3, 17, 33])
def test_a_step_in_one_call_equals_the_layers_one_by_one(model: TextModel, count: int, threads: int) -> None:
    assert model._fused is not None
    prompts = make_prompts(*[2 + 37 * idx % 90 for idx in range(count)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (got, got_pool), (expected, expected_pool) = (run_prompts(model, prompts, fused) for fused in (True, False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got_pool, expected_pool)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert torch.stack(got).isfinite().all()


def test_layers_with_biases_are_equal_too(tmp_path: Path) -> None:
    biased = make_model(tmp_path, attention_bias=True)
    assert biased._fused is not None
    prompts = make_prompts(40, 3)
    (got, _), (expected, _) = (run_prompts(biased, prompts, fused) for fused in (True, False))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_steps_of_single_tokens_are_fused_and_others_are_not(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model._fused is not None
    spy = Refusing(model._fused)
    monkeypatch.setattr(model, "_fused", spy)
    run = PagedRun(model, make_prompts(20, 20), block_size=16)
    run.step([Chunk(0, 0, 19), Chunk(1, 0, 1)])
    assert spy.answers == [False]
    step = run.model_input([Chunk(0, 19, 20), Chunk(1, 1, 2)])
    model(step, run.cache)
    assert spy.answers == [False, True]
    # What vision or a listener needs happens between layers: these are not even asked.
    model.hidden_states(step, run.cache, before_layers=[1])
    row = torch.tensor([1])
    model(dataclasses.replace(step, vision_rows=row, vision_embeds=torch.randn(1, 2 * HIDDEN)), run.cache)
    assert spy.answers == [False, True]


def test_main_embeddings_alone_are_placed_before_the_fused_layers(model: TextModel) -> None:
    prompts = make_prompts(8)
    embeds = torch.randn(1, HIDDEN).to(torch.bfloat16)
    results = []
    for is_fused in (True, False):
        kept = model._fused
        model._fused = kept if is_fused else None
        run = PagedRun(model, prompts, block_size=16)
        step = run.model_input([Chunk(0, 0, 1)])
        results.append(model(dataclasses.replace(step, vision_rows=torch.tensor([0]), vision_embeds=embeds), run.cache))
        model._fused = kept
    assert torch.equal(*results)


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
