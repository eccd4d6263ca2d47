"""M-RoPE cosines and sines against transformers, and the split of the frequencies over the axes."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from decoder_svc.model.mrope import frequency_axes, inverse_frequencies, mrope_cos_sin
from tests.tiny_models import tiny_config


@pytest.mark.parametrize(("head_dim", "section"), [(16, [4, 2, 2]), (128, [24, 20, 20]), (64, [12, 10, 10])])
def test_cos_and_sin_equal_the_reference(head_dim: int, section: list[int]) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section}
    config = tiny_config(text={"head_dim": head_dim, "rope_parameters": rope}).text_config
    positions = torch.randint(0, 3000, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    axes, frequencies = frequency_axes(head_dim, section), inverse_frequencies(head_dim, 5e6)
    got = mrope_cos_sin(positions, frequencies, axes)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(torch.cat([ours, ours], dim=-1), theirs[0])


def test_axes_interleave_and_time_keeps_the_rest() -> None:
    axes = frequency_axes(128, [24, 20, 20])
    assert axes[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.bincount(axes).tolist() == [24, 20, 20]
    assert torch.all(axes[60:] == 0)
