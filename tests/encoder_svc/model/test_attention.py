"""Segmented attention: the batched form equals one segment at a time, and the choice of the backend."""

import importlib.util
from typing import Any

import pytest
import torch

from encoder_svc.model import attention, attention_choice
from encoder_svc.model.attention import AttentionBackend, SdpaAttention, TiledAttention
from encoder_svc.model.attention_choice import select_attention
from encoder_svc.model.attention_native import try_amx_attention

AMX = try_amx_attention()
needs_amx = pytest.mark.skipif(AMX is None, reason="no AMX here, or no compiled kernel")


def attend_one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = []
    for q_part, k_part, v_part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q_part, k_part) / q.shape[-1] ** 0.5
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v_part))
    return torch.cat(parts)


def qkv(lengths: list[int], heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[3, P, heads, head_dim], heads outside as the tower lays them out on a CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, heads, sum(lengths), head_dim, generator=generator).to(dtype).transpose(1, 2)


def attend(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> Any:
    return backend.attend(q, k, v, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), lengths)


@pytest.mark.parametrize("backend", [SdpaAttention(), TiledAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [4, 6, 4, 4, 6, 1], [3, 7, 2]])
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_segments_attend_within_themselves_alone(
    backend: AttentionBackend, lengths: list[int], is_contiguous: bool
) -> None:
    q, k, v = (x.contiguous() if is_contiguous else x for x in qkv(lengths))
    got = attend(backend, q, k, v, lengths)
    torch.testing.assert_close(got, attend_one_by_one(q, k, v, lengths), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[700], [100] * 7])
def test_tiles_and_groups_of_heads_that_do_not_divide_evenly(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    monkeypatch.setattr(attention, "TILE_BYTES_PER_THREAD", (150 << 10) // torch.get_num_threads())
    q, k, v = qkv(lengths, heads=5)
    got = attend(TiledAttention(), q, k, v, lengths)
    torch.testing.assert_close(got, attend_one_by_one(q, k, v, lengths), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("backend", "tolerance"), [(SdpaAttention(), 3e-3), (TiledAttention(), 1e-2)])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_bfloat16_stays_near_the_exact_result(backend: AttentionBackend, tolerance: float, head_dim: int) -> None:
    lengths = [600, 200, 200]
    q, k, v = qkv(lengths, head_dim=head_dim, dtype=torch.bfloat16)
    expected = attend_one_by_one(q.double(), k.double(), v.double(), lengths)
    error = (attend(backend, q, k, v, lengths).double() - expected).abs()
    assert error.max() <= tolerance


def test_float32_and_float16_on_a_cpu_take_sdpa() -> None:
    assert select_attention("cpu", torch.float32).name == "sdpa"
    assert select_attention("cpu", torch.float16).name == "sdpa"
    assert select_attention("cuda", torch.float32).name == "sdpa"


@needs_amx
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("lengths", "head_dim"), [([5], 64), ([33, 1, 300, 784], 72), ([257], 80), ([700], 128)])
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_compiled_kernel_equals_the_exact_result_at_every_remainder(
    lengths: list[int], head_dim: int, is_contiguous: bool, threads: int
) -> None:
    assert AMX is not None
    q, k, v = (x.contiguous() if is_contiguous else x for x in qkv(lengths, head_dim=head_dim, dtype=torch.bfloat16))
    expected = attend_one_by_one(q.double(), k.double(), v.double(), lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = attend(AMX, q, k, v, lengths).double()
    finally:
        torch.set_num_threads(before)
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 2.5e-3).all()


@needs_amx
def test_compiled_kernel_keeps_large_scores_apart_and_hides_no_nan() -> None:
    assert AMX is not None
    q, k, v = qkv([300], head_dim=64, dtype=torch.bfloat16) * 20
    expected = attend_one_by_one(q.double(), k.double(), v.double(), [300])
    got = attend(AMX, q, k, v, [300]).double()
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.999
    k[7, 1, 3] = torch.nan
    got = attend(AMX, q, k, v, [300])
    assert got[:, 1].isnan().all()
    assert not got[:, 0].isnan().any()


@needs_amx
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_compiled_kernel_answers_nan_for_a_query_or_value_that_is_none(value: float) -> None:
    assert AMX is not None
    q, k, v = qkv([90, 50], head_dim=64, dtype=torch.bfloat16)
    q[70, 0, 33] = value
    got = attend(AMX, q, k, v, [90, 50])
    assert got[70, 0].isnan().all()
    assert got.isnan().sum() == 64
    v[100, 1, 5] = torch.nan
    got = attend(AMX, q, k, v, [90, 50])
    assert got[90:, 1, 5].isnan().all()
    assert got.isnan().sum() == 64 + 50


@needs_amx
@pytest.mark.parametrize("gap", [1.0, 6.0, 20.0, 60.0, 1e4])
def test_compiled_kernel_follows_scores_that_rise_or_fall_by_any_gap(gap: float) -> None:
    assert AMX is not None
    q, k, v = qkv([256], head_dim=64, dtype=torch.bfloat16)
    ramp = torch.linspace(0, gap, 256)
    for order in (ramp, ramp.flip(0)):
        k[:, :, 0] = order[:, None]
        q[:, :, 0] = 8.0
        expected = attend_one_by_one(q.double(), k.double(), v.double(), [256])
        got = attend(AMX, q, k, v, [256]).double()
        assert ((got - expected).abs() <= 2**-7 * expected.abs() + 1e-2).all()


@pytest.mark.parametrize(("tiled_s", "name"), [(0.5, "tiled"), (0.95, "sdpa"), (2.0, "sdpa")])
def test_bfloat16_on_a_cpu_takes_the_tiled_kernel_only_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, tiled_s: float, name: str
) -> None:
    monkeypatch.setattr(attention_choice, "try_amx_attention", lambda: None)
    now = 0.0

    def takes(seconds: float) -> Any:
        def run(*_: Any) -> None:
            nonlocal now
            now += seconds

        return run

    monkeypatch.setattr(attention_choice.time, "perf_counter", lambda: now)
    monkeypatch.setattr(SdpaAttention, "attend", takes(1.0))
    monkeypatch.setattr(TiledAttention, "attend", takes(tiled_s))
    assert select_attention("cpu", torch.bfloat16).name == name


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
