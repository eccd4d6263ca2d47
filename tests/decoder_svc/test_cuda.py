"""The engine on a GPU. Skipped where there is none; docs/gpu.md says when these last ran."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder_svc.model.decode_graphs import GRAPH_STEPS, GraphRecorder
from decoder_svc.model.weights import load_text_model
from tests.decoder_svc.engines import Driver, make_engine, make_world, request_of
from tests.decoder_svc.model.pairs import make_pair
from tests.decoder_svc.requests import greedy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXT = [5, 17, 200, 33, 7, 90, 121]


def run_requests(directory: Path, device: str, **options: Any) -> Driver:
    """Text and pictures, chunked, on a device, in float32."""
    world = make_world(make_pair(directory, is_moe=False, is_tied=False))
    model = load_text_model(directory, dtype=torch.float32, device=device)
    run = Driver(make_engine(model, max_tokens_per_step=9, **options), world.embeddings.__getitem__)
    run.add(request_of(world, TEXT, request_id="text", sampling=greedy(12, num_logprobs=2)))
    run.add(request_of(world, TEXT, 1, [8, 9], request_id="picture", sampling=greedy(12, repetition_penalty=1.1)))
    return run


def test_an_engine_gives_the_tokens_of_cpu(tmp_path: Path) -> None:
    assert run_requests(tmp_path / "a", "cuda").run().outputs == run_requests(tmp_path / "b", "cpu").run().outputs


def test_overlapping_steps_give_the_tokens_of_steps_in_turn(tmp_path: Path) -> None:
    told = [run_requests(tmp_path / str(on), "cuda", overlaps_steps=on).run().outputs for on in (False, True)]
    assert told[0] == told[1]


def test_the_device_is_idle_while_nothing_runs(tmp_path: Path) -> None:
    run = run_requests(tmp_path, "cuda", overlaps_steps=True)
    began = time.monotonic()
    while run.engine.has_sequences:
        run.step()
        time.sleep(0.02)
    busy_s = run.engine._metrics._busy_s
    assert 0 < busy_s < 0.5 * (time.monotonic() - began)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("overlaps_steps", [False, True])
@pytest.mark.parametrize("compile_layers", [False, True])
def test_recorded_decode_steps_give_the_tokens_of_steps_that_are_not(
    tmp_path: Path, overlaps_steps: bool, compile_layers: bool
) -> None:
    """One sequence, whose sums are the same in either way of launching, and some that are padded beside it."""
    world = make_world(make_pair(tmp_path, is_moe=False, is_tied=False))
    model = load_text_model(
        tmp_path, dtype=torch.bfloat16, device="cuda", block_size=256, compile_layers=compile_layers
    )
    assert model.attention.can_record
    outputs = []
    for graphs in (False, True):
        recorder = GraphRecorder(model.device) if graphs else None
        engine = make_engine(model, block_size=256, overlaps_steps=overlaps_steps, record=recorder)
        run = Driver(engine, world.embeddings.__getitem__)
        run.add(*(request_of(world, [n], TEXT, request_id=f"r{n}", sampling=greedy(8 + n)) for n in range(3)))
        before = GRAPH_STEPS._value.get()
        run.run()
        assert (GRAPH_STEPS._value.get() > before) == graphs
        outputs.append(run.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_no_call_of_a_step_waits_for_the_device(tmp_path: Path, overlaps_steps: bool) -> None:
    """Torch knows which of its calls do; the wait for what is read back is an event's, which it does not count."""
    run = run_requests(tmp_path, "cuda", overlaps_steps=overlaps_steps)
    run.step()  # kernels are loaded on first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.ends["text", 0].error is None
    assert run.ends["picture", 0].error is None
