"""A step for the other ranks: every tensor of it arrives as it was."""

import dataclasses

import pytest
import torch

from decoder_svc.model_input import ModelInput
from decoder_svc.step_tensors import StepSizes, pack_integers, unpack_step


def step(num_vision: int, num_logits: int) -> ModelInput:
    """Two sequences of five tokens in all."""
    return ModelInput(
        input_ids=torch.arange(5),
        positions=torch.arange(15).view(3, 5),
        slot_mapping=torch.arange(5) + 100,
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
        context_lens=torch.tensor([3, 9], dtype=torch.int32),
        block_tables=torch.tensor([[1, 1, 1], [4, 2, 3]], dtype=torch.int32),
        vision_rows=torch.arange(num_vision),
        vision_embeds=torch.randn(num_vision, 8) if num_vision else None,
        logits_rows=torch.arange(num_logits) + 2,
        query_lens=(3, 2),
        kv_lens=(3, 9),
    )


@pytest.mark.parametrize(("num_vision", "num_logits"), [(0, 0), (0, 2), (3, 1)])
def test_a_step_arrives_as_it_was(num_vision: int, num_logits: int) -> None:
    sent = step(num_vision, num_logits)
    sizes = StepSizes.unpack(StepSizes.of(sent).pack())
    assert sizes == StepSizes.of(sent)
    arrived = unpack_step(sizes, pack_integers(sent), sent.vision_embeds)
    for field in dataclasses.fields(ModelInput):
        there, here = getattr(sent, field.name), getattr(arrived, field.name)
        if not isinstance(there, torch.Tensor):
            assert here == there, field.name
            continue
        assert (here.dtype, here.shape) == (there.dtype, there.shape), field.name
        assert torch.equal(here, there), field.name


def test_the_compiled_kernels_can_read_the_tables_that_arrive() -> None:
    sent = step(0, 1)
    arrived = unpack_step(StepSizes.of(sent), pack_integers(sent), None)
    assert all(tensor.is_contiguous() for tensor in (arrived.block_tables, arrived.context_lens, arrived.slot_mapping))
