"""The size of the KV cache, from the bytes that it may take."""

import pytest
import torch

from common.errors import ConfigError
from decoder_svc.kv_budget import affordable_blocks, make_kv_cache
from decoder_svc.model.attention import TorchPagedAttention
from tests.decoder_svc.engines import World
from tests.decoder_svc.model.packing import BLOCK_SIZE, Chunk, PagedRun, Prompt


def test_the_cache_takes_the_bytes_that_it_is_given(world: World) -> None:
    model = world.pair.model
    cache = make_kv_cache(model, affordable_blocks(model, 100_000, 4), 4)
    assert 100_000 - cache.num_bytes / cache.num_blocks < cache.num_bytes <= 100_000


def test_a_cache_of_half_the_precision_holds_twice_the_tokens_and_the_model_runs_over_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = world.pair.model
    halves = affordable_blocks(model, 1 << 17, 4, torch.bfloat16)
    assert halves == 2 * affordable_blocks(model, 1 << 17, 4)
    monkeypatch.setattr(model, "attention", TorchPagedAttention())
    prompt = Prompt(torch.arange(30), torch.arange(30).expand(3, 30), torch.arange(0), None)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        run = PagedRun(model, [prompt])
        run.cache = make_kv_cache(model, run.cache.num_blocks, BLOCK_SIZE, dtype)
        assert run.cache.pool.dtype == dtype
        steps = [Chunk(0, 0, 11), Chunk(0, 11, 29), Chunk(0, 29, 30)]
        logits.append(torch.cat([run.step([chunk])[0] for chunk in steps]))
    torch.testing.assert_close(logits[0], logits[1], rtol=0.02, atol=0.02 * float(logits[0].abs().max()))
    assert not torch.equal(logits[0], logits[1])


def test_a_cache_too_small_for_two_blocks_stops_the_start_with_the_bytes_it_needs(world: World) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-bytes 100 .* give at least 8192"):
        affordable_blocks(world.pair.model, 100, 4)
