"""Embedding mode and hidden states: the reference's, beside generation, at any chunk size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.messages import GenerateRequest
from decoder_svc.choices import sequences_of
from decoder_svc.input_builder import build_model_input
from decoder_svc.scheduler import Chunk
from tests.decoder_svc.engines import Driver, World, driver, make_engine, request_of, solo
from tests.decoder_svc.requests import MERGE_SIZE, PAD_ID, greedy

pytestmark = pytest.mark.usefixtures("steps")
TEXT = [5, 17, 200, 33, 7, 90, 121]
MORE = [8, 9, 77]


def reference(world: World, request: GenerateRequest) -> Any:
    ids = request.prompt_token_ids
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([[int(token == PAD_ID) for token in ids]]),
        "pixel_values": torch.cat([world.pixels[item.key] for item in request.media]),
        "image_grid_thw": torch.tensor([item.grid for item in request.media]),
    }
    with torch.inference_mode():
        return world.pair.reference.model(**arguments)


def embedding_of(run: Driver, request_id: str) -> Tensor:
    end = run.ends[request_id, 0]
    assert (end.finish_reason, end.tokens) == ("stop", [])
    assert end.usage is not None
    assert end.usage.completion_tokens == 0
    assert end.embedding is not None
    return torch.tensor(end.embedding)


@pytest.mark.parametrize("max_tokens_per_step", [3, 64])
def test_an_embedding_is_the_last_hidden_state_of_length_one(world: World, max_tokens_per_step: int) -> None:
    pooled = request_of(world, TEXT, 1, MORE, request_id="pooled", sampling=greedy(1), pooling="last")
    free = request_of(world, TEXT, 0, MORE, request_id="free")
    run = driver(world, max_tokens_per_step=max_tokens_per_step)
    run.add(pooled, free)
    run.run()
    expected = F.normalize(reference(world, pooled).last_hidden_state[0, -1], dim=0)
    assert torch.allclose(embedding_of(run, "pooled"), expected, atol=1e-5)
    assert run.outputs["free", 0] == solo(world, free)[0]


def test_a_cached_prompt_gives_the_same_embedding(world: World) -> None:
    run = driver(world)
    for name in ("first", "second"):
        run.add(request_of(world, TEXT, 1, MORE, request_id=name, sampling=greedy(1), pooling="last"))
        run.run()
    assert torch.allclose(embedding_of(run, "first"), embedding_of(run, "second"), atol=1e-5)
    assert run.ends["second", 0].usage.cached_tokens > 0  # type: ignore[union-attr]


def test_hidden_states_before_chosen_layers_are_the_references(world: World) -> None:
    request = request_of(world, TEXT, 1, MORE)
    engine = make_engine(world.pair.model)
    [sequence] = sequences_of(request, 0.0, None, MERGE_SIZE)
    sequence.block_table.extend(engine.blocks.try_take(engine.blocks.blocks_for(sequence.num_tokens)) or [])
    chunk = Chunk(sequence, 0, sequence.num_tokens)
    model_input = build_model_input([chunk], world.embeddings, engine.blocks.block_size, world.pair.model.device)
    last, taken = world.pair.model.hidden_states(model_input, engine._runner._kv_cache, (0, 1, 3))
    inputs: dict[int, Tensor] = {}
    hooks = [
        # What the reference calls hidden states lacks the DeepStack level that is added before the next layer.
        layer.register_forward_pre_hook(lambda module, args, index=index: inputs.update({index: args[0][0].clone()}))
        for index, layer in enumerate(world.pair.reference.model.language_model.layers)
    ]
    expected = reference(world, request)
    for hook in hooks:
        hook.remove()
    assert set(taken) == {0, 1, 3}
    for index, hidden in taken.items():
        assert torch.allclose(hidden, inputs[index], atol=1e-4), index
    assert torch.allclose(last[0], expected.last_hidden_state[0, -1], atol=1e-4)
