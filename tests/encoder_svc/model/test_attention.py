"""Segmented attention: the batched form equals one segment at a time, and the choice of the backend."""

import importlib.util

import pytest
import torch

from encoder_svc.model.attention import SdpaAttention, select_attention


def attend_one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = []
    for q_part, k_part, v_part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q_part, k_part) / q.shape[-1] ** 0.5
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_part))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [4, 6, 4, 4, 6, 1], [3, 7, 2]])
def test_segments_attend_within_themselves_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, 8)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    got = SdpaAttention().attend(q, k, v, cu_seqlens, lengths)
    torch.testing.assert_close(got, attend_one_by_one(q, k, v, lengths), rtol=0, atol=1e-5)


def test_cpu_and_float32_take_sdpa() -> None:
    assert select_attention("cpu", torch.bfloat16).name == "sdpa"
    assert select_attention("cuda", torch.float32).name == "sdpa"


def test_cuda_in_half_precision_without_flash_attn_takes_the_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else real(name))
    assert select_attention("cuda", torch.bfloat16).name == "torch_varlen"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_selected_cuda_backend_equals_sdpa() -> None:
    lengths = [16, 64, 16, 100]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 4, 72, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    backend = select_attention("cuda", torch.bfloat16)
    assert backend.name != "sdpa"
    expected = attend_one_by_one(q.float(), k.float(), v.float(), lengths)
    torch.testing.assert_close(backend.attend(q, k, v, cu_seqlens, lengths).float(), expected, rtol=0, atol=2e-2)
