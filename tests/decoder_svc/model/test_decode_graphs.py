"""Recorded decode steps: which sizes there are, what padding reaches, and an engine that replays them, eagerly."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from decoder_svc.kv_budget import make_kv_cache
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.attention import TorchPagedAttention
from decoder_svc.model.decode_graphs import DecodeGraphs, PaddedStep, Recorded, batch_sizes, smallest_that_holds
from decoder_svc.model.text import TextModel
from decoder_svc.model_input import ModelInput
from tests.decoder_svc.engines import BLOCK_SIZE, Driver, LateDelivery, World, make_engine, request_of, solo
from tests.decoder_svc.model.packing import Chunk, PagedRun, Prompt
from tests.decoder_svc.requests import greedy

TEXT = [5, 17, 200, 33, 7, 90, 121]
CPU = torch.device("cpu")


class LengthsOnDevice(TorchPagedAttention):
    """Takes contexts from the tensor that a recorded step is filled with, as flash-attn's kernel does."""

    def prepare(self, model_input: ModelInput, kv_cache: KVCache) -> Any:
        lens = tuple(model_input.context_lens.tolist())
        return super().prepare(dataclasses.replace(model_input, kv_lens=lens), kv_cache)


class Eager:
    """Replays by running the recorded pass again; counts, by the rows of logits that it gives."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, forward: Recorded) -> Recorded:
        def replay() -> Tensor:
            logits = forward()
            self.sizes.append(len(logits))
            return logits

        return replay


@pytest.fixture
def model(world: World, monkeypatch: pytest.MonkeyPatch) -> TextModel:
    monkeypatch.setattr(world.pair.model, "attention", LengthsOnDevice())
    return world.pair.model


@pytest.mark.parametrize(
    ("max_sequences", "expected"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_sizes_reach_from_one_to_what_can_run_together(max_sequences: int, expected: list[int]) -> None:
    assert batch_sizes(max_sequences) == expected


@pytest.mark.parametrize("max_sequences", [1, 2, 7, 64, 100, 256, 5000])
def test_every_batch_has_a_size_that_wastes_less_than_half_or_eight_rows(max_sequences: int) -> None:
    sizes = batch_sizes(max_sequences)
    assert sizes[-1] == min(max_sequences, 256)
    for num in range(1, sizes[-1] + 1):
        size = smallest_that_holds(num, sizes)
        assert num <= size
        assert size - num < max(8, num)


def decoding(model: TextModel, num: int, contexts: list[int]) -> tuple[PagedRun, ModelInput]:
    """Prompts that are prefilled but for their last token, and the step that runs those of the first `num`."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(torch.randint(0, 280, (n,), generator=generator), torch.arange(n).expand(3, n), torch.arange(0), None)
        for n in contexts
    ]
    run = PagedRun(model, prompts)
    for number, n in enumerate(contexts):
        run.step([Chunk(number, 0, n - 1)])
    return run, run.model_input([Chunk(number, n - 1, n) for number, n in enumerate(contexts[:num])])


def test_padded_rows_change_no_logits_and_write_to_the_spare_block_alone(model: TextModel) -> None:
    run, step = decoding(model, 3, [9, 5, 14, 7])
    spare = make_kv_cache(model, run.cache.num_blocks + 1, BLOCK_SIZE)
    spare.pool[:, :-1] = run.cache.pool
    before = spare.pool.clone()
    expected = model(step, run.cache)
    padded = PaddedStep(8, run.max_blocks, BLOCK_SIZE, run.cache.num_blocks, CPU)
    padded.fill(step)
    logits = model(padded.model_input, spare)
    assert logits.shape[0] == 8
    torch.testing.assert_close(logits[:3], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(spare.pool[:, :-1], run.cache.pool, rtol=1e-4, atol=1e-4)
    changed = (spare.pool != before).any(dim=-1).any(dim=3).any(dim=2).any(dim=0).any(dim=-1).nonzero().flatten()
    written = {int(slot) // BLOCK_SIZE for slot in step.slot_mapping}
    assert set(changed.tolist()) == written | {run.cache.num_blocks}


def test_rows_that_a_smaller_step_leaves_stand_for_nobody_again(model: TextModel) -> None:
    run, large = decoding(model, 4, [9, 5, 14, 7])
    _, small = decoding(model, 2, [9, 5, 14, 7])
    fresh, used = (PaddedStep(4, run.max_blocks, BLOCK_SIZE, run.cache.num_blocks, CPU) for _ in range(2))
    used.fill(large)
    for padded in (fresh, used):
        padded.fill(small)
    for field in ("input_ids", "positions", "slot_mapping", "context_lens"):
        there, here = getattr(fresh.model_input, field), getattr(used.model_input, field)
        assert torch.equal(there, here), field
    assert torch.equal(used.model_input.block_tables[2:], fresh.model_input.block_tables[2:])
    nobody = used.model_input.slot_mapping[2:] // BLOCK_SIZE
    assert nobody.tolist() == [run.cache.num_blocks] * 2


def test_prefills_and_steps_that_give_no_token_are_not_recorded_ones(model: TextModel) -> None:
    run, step = decoding(model, 2, [9, 5])
    graphs = DecodeGraphs(model, run.cache, max_sequences=2, max_model_len=14, record=Eager())
    assert graphs.can_run(step)
    assert not graphs.can_run(run.model_input([Chunk(0, 0, 2), Chunk(1, 4, 5)]))
    assert not graphs.can_run(dataclasses.replace(step, logits_rows=step.logits_rows[:1]))
    assert not graphs.can_run(dataclasses.replace(step, vision_embeds=torch.zeros(1, 64)))
    assert not graphs.can_run(decoding(model, 3, [9, 5, 6])[1]), "more than the largest size"


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_an_engine_with_recorded_steps_gives_the_same_tokens_and_never_gives_out_the_spare_block(
    model: TextModel, world: World, overlaps_steps: bool
) -> None:
    num_blocks, eager = 18, Eager()
    engine = make_engine(
        model,
        num_blocks=num_blocks,
        max_tokens_per_step=11,
        max_model_len=80,
        overlaps_steps=overlaps_steps,
        record=eager,
    )
    assert engine.blocks.num_blocks == num_blocks - 1
    engine._runner._kv_cache.pool[:, -1] = float("nan")
    run = Driver(engine, LateDelivery(world, 2))
    requests = [
        request_of(world, [number], number % 3, TEXT, request_id=f"r{number}", sampling=greedy(4 + 3 * number))
        for number in range(5)
    ]
    run.add(*requests)
    run.run()
    assert engine.scheduler.num_preemptions > 0
    assert len(set(eager.sizes)) >= 3, "batches of several sizes were replayed"
    for request in requests:
        assert run.outputs[request.request_id, 0] == solo(world, request)[0]
