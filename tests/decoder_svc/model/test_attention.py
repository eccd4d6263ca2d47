"""Paged attention against plain causal attention: mixed steps, long prompts over several tiles, padded batches."""

import importlib.util
import time

import pytest
import torch
from torch import Tensor

from decoder_svc.kv_cache import KVCache
from decoder_svc.model import attention as attention_module
from decoder_svc.model import kernels
from decoder_svc.model.amx import amx_library
from decoder_svc.model.attention import (
    QUERY_TILE,
    FlashPagedAttention,
    NativePagedAttention,
    PagedAttention,
    TorchPagedAttention,
    decode_groups,
    pick_block_size,
    select_attention,
)
from decoder_svc.model.kernels import NativeKernels, TorchKernels, compiled_library
from decoder_svc.model_input import ModelInput

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 8, 16
LIBRARY = compiled_library()
compiled = pytest.mark.skipif(LIBRARY is None, reason="the compiled kernels were not built at installation")
MIXED = [(1, 1), (16, 1), (17, 1), (300, 1), (70, 20), (90, 1), (5, 5), (128, 1), (129, 1)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last rows of causal attention: q [n, heads, D] are the end of k, v [m, kv_heads, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    future = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu_(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def run_step(
    lengths: list[tuple[int, int]],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: PagedAttention | None = None,
    sizes: tuple[int, int, int, int] = (HEADS, KV_HEADS, HEAD_DIM, BLOCK),
    kv_dtype: torch.dtype | None = None,
) -> None:
    """One step of sequences with (context, new tokens) each, in blocks dealt at random; compares with plain.

    What the cache holds beyond the contexts is NaN. `sizes` are heads, KV heads, head_dim and block size.
    """
    torch.manual_seed(0)
    num_heads, kv_heads, head_dim, block = sizes
    num_blocks = sum(-(-context // block) for context, _ in lengths)
    cache = KVCache(1, num_blocks, block, kv_heads, head_dim, kv_dtype or dtype, device)
    cache.pool.fill_(float("nan"))
    free = torch.randperm(num_blocks).tolist()
    tables = torch.zeros(len(lengths), max(-(-context // block) for context, _ in lengths), dtype=torch.int32)
    queries, expected, starts = [], [], [0]
    for seq, (context, new) in enumerate(lengths):
        count = -(-context // block)
        tables[seq, :count] = torch.tensor([free.pop() for _ in range(count)])
        k, v = torch.randn(2, context, kv_heads, head_dim)
        tokens = torch.arange(context)
        slots = tables[seq].long()[tokens // block] * block + tokens % block
        cache.write(0, slots.to(device), k.to(device, dtype), v.to(device, dtype))
        queries.append(torch.randn(new, num_heads, head_dim))
        expected.append(plain_attention(queries[-1], k, v))
        starts.append(starts[-1] + new)
    none = torch.empty(0, dtype=torch.int64)
    step = ModelInput(
        input_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor([context for context, _ in lengths], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        vision_rows=none,
        vision_embeds=None,
        logits_rows=none,
        query_lens=tuple(new for _, new in lengths),
        kv_lens=tuple(context for context, _ in lengths),
    )
    attention = attention or TorchPagedAttention()
    plan = attention.prepare(step, cache)
    got = attention.attend(torch.cat(queries).to(device, dtype), cache, 0, plan)
    tolerance = 1e-5 if cache.pool.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.float().cpu(), torch.cat(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(BLOCK, 1), (BLOCK + 1, 1), (5 * BLOCK + 3, 1), (200, 1)],
        [(40, 40)],
        [(2 * QUERY_TILE + 17, 2 * QUERY_TILE + 17)],
        [(3 * QUERY_TILE, QUERY_TILE + 1)],
        [(33, 1), (70, 20), (5, 5), (17, 1), (130, 2)],
    ],
)
def test_paged_attention_equals_plain_causal_attention(lengths: list[tuple[int, int]]) -> None:
    run_step(lengths)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_of_another_dtype_is_read_in_the_dtype_of_the_model(kv_dtype: torch.dtype) -> None:
    run_step([(33, 1), (70, 20), (17, 1), (40, 40)], kv_dtype=kv_dtype)
    for device in ("cpu", "cuda"):
        kernels = TorchKernels() if LIBRARY is None else NativeKernels(LIBRARY)
        assert select_attention(device, torch.float32, 256, kernels, kv_dtype).name == "torch"


def test_half_precision_stays_near() -> None:
    run_step([(33, 1), (70, 20), (17, 1)], dtype=torch.bfloat16)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 4, 16, 4), (6, 2, 32, 16), (8, 4, 64, 16), (20, 1, 128, 20), (2, 2, 96, 40)])
def test_compiled_decoding_equals_plain_causal_attention(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIBRARY is not None
    monkeypatch.setattr(kernels, "amx_library", lambda: None)
    run_step(MIXED, dtype=dtype, attention=NativePagedAttention(NativeKernels(LIBRARY)), sizes=sizes)


@compiled
@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 16), (128, 16), (64, 48), (128, 256)])
@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_with_amx_equals_plain_causal_attention(
    group: int, head_dim: int, block: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIBRARY is not None
    native = NativeKernels(LIBRARY)
    monkeypatch.setattr(native, "_library", None)  # which is not asked
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = (2 * group, 2, head_dim, block)
    run_step(MIXED, dtype=torch.bfloat16, attention=NativePagedAttention(native), sizes=sizes)


PREFILLS = [(1, 1), (2, 2), (15, 15), (16, 16), (17, 17), (64, 33), (70, 2), (300, 49), (20, 1), (530, 530), (700, 300)]


@compiled
@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 20])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 16), (128, 16), (64, 48), (128, 256)])
@pytest.mark.parametrize("threads", [1, 2])
def test_prefill_with_amx_equals_plain_causal_attention(
    group: int, head_dim: int, block: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIBRARY is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attention_module, "_attend_prefill", None)  # which is not asked
    sizes = (2 * group, 2, head_dim, block)
    run_step(PREFILLS, dtype=torch.bfloat16, attention=NativePagedAttention(NativeKernels(LIBRARY)), sizes=sizes)


@compiled
@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
def test_scores_that_grow_along_a_prompt_keep_their_weights() -> None:
    """Each later key outweighs all before it by far: what was summed up is scaled down again and again."""
    assert LIBRARY is not None
    cache = KVCache(1, 20, 16, 1, 64, torch.bfloat16, "cpu")
    cache.keys[0, :, 0, :, 0] = torch.arange(320.0).view(20, 16).to(torch.bfloat16)
    cache.values[0] = torch.randn(20, 1, 16, 64)
    q = torch.zeros(320, 1, 64, dtype=torch.bfloat16)
    q[:, 0, 0] = torch.linspace(-40, 40, 320)
    tables, contexts = torch.arange(20, dtype=torch.int32)[None], torch.tensor([320], dtype=torch.int32)
    out, starts = torch.empty_like(q), torch.tensor([0, 320], dtype=torch.int32)
    NativeKernels(LIBRARY).attend_prefill(q, cache, 0, tables, contexts, starts, torch.tensor([0]), out)
    keys, values = (x.reshape(320, 1, 64).float() for x in (cache.keys[0], cache.values[0]))
    torch.testing.assert_close(out.float(), plain_attention(q.float(), keys, values), rtol=0, atol=3e-2)


def decoded_with_amx(query_scale: float, value_scale: float) -> tuple[Tensor, Tensor, float]:
    """A token's attention over 512 others by the kernel and in plain, and the fewest seconds that the kernel took."""
    assert LIBRARY is not None
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(1, 32, 16, 2, 64, torch.bfloat16, "cpu")
    cache.keys[0] = torch.randn(cache.keys[0].shape, generator=generator)
    cache.values[0] = torch.randn(cache.values[0].shape, generator=generator) * value_scale
    q = (torch.randn(1, 4, 64, generator=generator) * query_scale).bfloat16()
    tables, contexts = torch.arange(32, dtype=torch.int32)[None], torch.tensor([512], dtype=torch.int32)
    out, first, seconds = torch.empty_like(q), torch.tensor([0]), []
    for _ in range(20):
        began = time.perf_counter()
        NativeKernels(LIBRARY).attend_decode(q, cache, 0, tables, contexts, first, first, out)
        seconds.append(time.perf_counter() - began)
    keys, values = (x.transpose(1, 2).reshape(512, 2, 64).float() for x in (cache.keys[0], cache.values[0]))
    return out.float(), plain_attention(q.float(), keys, values), min(seconds)


@compiled
@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize(("query_scale", "value_scale"), [(30.0, 1.0), (1.0, 2.0**-130)])
def test_weights_and_values_too_small_to_be_normal_take_no_longer(query_scale: float, value_scale: float) -> None:
    got, expected, seconds = decoded_with_amx(query_scale, value_scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-2)
    _, _, usual = decoded_with_amx(1.0, 1.0)
    assert seconds < 4 * usual  # it was 30 times as long


@compiled
@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize("poisoned", ["keys", "values"])
def test_a_token_that_is_not_a_number_reaches_those_behind_it(poisoned: str) -> None:
    assert LIBRARY is not None
    cache = KVCache(1, 8, 16, 1, 64, torch.bfloat16, "cpu")
    getattr(cache, poisoned)[0, 3, 0, 5] = float("nan")
    q, out = torch.randn(2, 128, 2, 64).to(torch.bfloat16)
    tables = torch.arange(8, dtype=torch.int32)[None]
    starts, contexts = torch.tensor([0, 128], dtype=torch.int32), torch.tensor([128], dtype=torch.int32)
    NativeKernels(LIBRARY).attend_prefill(q, cache, 0, tables, contexts, starts, torch.tensor([0]), out)
    assert out[3 * 16 + 5 :].isnan().all(dim=2).all()
    assert out[:32].isfinite().all()


@compiled
def test_a_value_that_is_not_a_number_in_a_context_reaches_the_result() -> None:
    assert LIBRARY is not None
    for poisoned in ("keys", "values"):
        cache = KVCache(1, 3, 16, 1, 64, torch.bfloat16, "cpu")
        getattr(cache, poisoned)[0, 1, 0, 3] = float("nan")
        q, out = torch.randn(2, 2, 64).to(torch.bfloat16), torch.zeros(2, 2, 64, dtype=torch.bfloat16)
        tables = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
        contexts, rows = torch.tensor([20, 20], dtype=torch.int32), torch.arange(2)
        NativeKernels(LIBRARY).attend_decode(q, cache, 0, tables, contexts, rows, rows, out)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


@compiled
def test_head_sizes_that_the_compiled_kernel_lacks_take_the_torch_path() -> None:
    assert LIBRARY is not None
    run_step([(33, 1), (70, 20)], attention=NativePagedAttention(NativeKernels(LIBRARY)))
    run_step([(33, 1)], dtype=torch.float16, attention=NativePagedAttention(NativeKernels(LIBRARY)))


def test_groups_share_a_tile_when_they_fit_and_are_of_similar_length() -> None:
    assert decode_groups({0: 4, 1: 4, 2: 3, 3: 4}, 12) == [[0, 1, 3], [2]]
    assert decode_groups({0: 1, 1: 8, 2: 4, 3: 3}, 100) == [[1, 2], [3], [0]]
    assert decode_groups({0: 50, 1: 50}, 10) == [[0], [1]]
    assert decode_groups({}, 10) == []


def test_cpu_takes_the_kernels_that_there_are_with_any_block_size() -> None:
    assert select_attention("cpu", torch.bfloat16, 256, TorchKernels()).name == "torch"
    assert select_attention("cuda", torch.float32, 256, TorchKernels()).name == "torch"
    assert select_attention("cuda", torch.bfloat16, 16, TorchKernels()).name == "torch"


def test_blocks_are_as_large_as_flash_attn_wants_them_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    for is_installed in (False, True):
        spec = object() if is_installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, s=spec: s if name == "flash_attn" else real(name))
        assert pick_block_size(0, "cuda", torch.bfloat16) == (256 if is_installed else 16)
        assert pick_block_size(32, "cuda", torch.bfloat16) == 32
        assert pick_block_size(0, "cuda", torch.float32) == 16
        assert pick_block_size(0, "cuda", torch.bfloat16, torch.float16) == 16
        assert pick_block_size(0, "cpu", torch.bfloat16) == 16


def test_cuda_without_flash_attn_takes_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else real(name))
    assert select_attention("cuda", torch.bfloat16, 256, TorchKernels()).name == "torch"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_torch_path_on_cuda_equals_plain_causal_attention() -> None:
    run_step([(33, 1), (70, 20), (5, 5), (17, 1), (300, 150)], device="cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("lengths", [[(300, 1), (17, 1), (512, 1)], [(33, 1), (600, 20), (5, 5), (257, 257)]])
def test_flash_attn_equals_plain_causal_attention(lengths: list[tuple[int, int]]) -> None:
    run_step(lengths, "cuda", torch.bfloat16, FlashPagedAttention(), sizes=(8, 2, 64, 256))
