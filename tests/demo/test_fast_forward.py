"""The training forward equals transformers' own forward on the same weights, question by question."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from demo import checkpoint_files, tokenizer
from demo.batches import BatchMaker
from demo.fast_forward import run_text, run_tower


@pytest.fixture(scope="module")
def maker() -> BatchMaker:
    return BatchMaker(tokenizer.build(), seed=1)


@pytest.fixture(scope="module")
def model(maker: BatchMaker) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(checkpoint_files.build_config(maker.tokenizer)).float().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0) if parameter.ndim > 1 else parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def media_of(batch: dict[str, Tensor], row: int, kind: str) -> dict[str, Tensor]:
    """transformers' pixel inputs for the pictures or the video of one row."""
    rows = batch["vision_rows"][row]
    used = sorted(set((rows[rows >= 0] // (batch["patches"].shape[1] // 4)).tolist()))
    values, grids = [], []
    for index in used:
        height, width = (2 * batch["grids"][index]).tolist()
        patches = batch["patches"][index, : height * width].float() / 127.5 - 1
        if patches.shape[1] == 768:
            patches = patches.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(patches), -1)
        values.append(patches)
        grids.append([1, height, width])
    if not used:
        return {}
    if kind == "video":
        grid = torch.tensor([[len(grids), *grids[0][1:]]])
        return {"pixel_values_videos": torch.cat(values), "video_grid_thw": grid}
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


@pytest.mark.parametrize("kind", ["one", "two", "video"])
def test_every_branch_equals_a_conversation_of_its_own(
    maker: BatchMaker, model: Qwen3VLForConditionalGeneration, kind: str
) -> None:
    batch = maker.make(0, 0, kind, (9216, 40000), 2)
    compared = 0
    with torch.inference_mode():
        levels = run_tower(model.model.visual, batch["patches"], batch["grids"])
        logits = run_text(model.model.language_model, batch, levels).hidden @ model.lm_head.weight.T
        for row in range(len(batch["prefix_ids"])):
            prefix = batch["prefix_ids"][row, : batch["prefix_lengths"][row]]
            for slot, segment in torch.cartesian_prod(torch.arange(2), torch.arange(1, 3)).tolist():
                chosen = batch["segments"][row, slot] == segment
                if not bool(chosen.any()):
                    continue
                ids = torch.cat((prefix, batch["slot_ids"][row, slot][chosen]))[None]
                types = (ids == maker.image_pad).int() + 2 * (ids == maker.video_pad).int()
                expected = model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    mm_token_type_ids=types,
                    **media_of(batch, row, kind),
                ).logits[0, len(prefix) :]
                error = (logits[row, slot][chosen] - expected).abs().max() / expected.abs().max()
                assert error < 2e-5
                compared += 1
    assert compared >= 4
