"""The compiled kernels against torch's form of each operation, and packed linear layers against plain ones."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from common.errors import ConfigError
from decoder_svc.kv_cache import KVCache
from decoder_svc.model import kernels as module
from decoder_svc.model import linear
from decoder_svc.model.amx import amx_library
from decoder_svc.model.kernels import (
    Heads,
    Kernels,
    NativeKernels,
    TorchCompiledKernels,
    TorchKernels,
    compiled_library,
    select_kernels,
)
from decoder_svc.model.linear import Linear

LIBRARY = compiled_library()
DTYPES = [torch.float32, torch.bfloat16]
compiled = pytest.mark.skipif(LIBRARY is None, reason="the compiled kernels were not built at installation")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def native() -> NativeKernels:
    assert LIBRARY is not None
    return NativeKernels(LIBRARY)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 512, 20])
def test_norms_agree_and_take_the_residual_in(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    hidden, delta = torch.randn(2, 5, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    ours, theirs = hidden.clone(), hidden.clone()
    for given in (None, delta):
        got = native().rms_norm(ours, weight, 1e-6, given)
        expected = TorchKernels().rms_norm(theirs, weight, 1e-6, given)
        torch.testing.assert_close(got, expected, **tolerance(dtype))
        assert torch.equal(ours, theirs)
    assert torch.equal(ours, hidden + delta)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_agree_from_end_to_end_of_the_range(dtype: torch.dtype) -> None:
    gate = torch.cat([torch.linspace(-100, 100, 60), torch.tensor([0.0, math.inf, -1e30, -3e38])])
    gate_up = torch.cat([gate, torch.full_like(gate, 0.5)])[None].to(dtype)
    got = native().gate(gate_up, F.silu)
    torch.testing.assert_close(got, TorchKernels().gate(gate_up, F.silu), **tolerance(dtype))


@compiled
def test_another_activation_takes_the_torch_path() -> None:
    gate_up = torch.randn(3, 64)
    assert torch.equal(native().gate(gate_up, F.gelu), F.gelu(gate_up[:, :32]) * gate_up[:, 32:])


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_a_number_stays_one(dtype: torch.dtype) -> None:
    for position in (0, 15, 16, 31):
        x = torch.ones(1, 32, dtype=dtype)
        x[0, position] = math.nan
        assert torch.isnan(native().rms_norm(x.clone(), torch.ones(32, dtype=dtype), 1e-6)).all()
        assert torch.isnan(native().gate(x, F.silu)).sum() == 1


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_rotated_heads_and_what_the_cache_gets_agree(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    q_norm, k_norm = torch.randn(2, head_dim).to(dtype)
    heads = Heads(6, 2, head_dim, q_norm, k_norm, 1e-6)
    qkv = torch.randn(7, 10 * head_dim).to(dtype)
    angles = torch.randn(7, head_dim // 2)
    slots = torch.randperm(5 * 4)[:7]
    results = []
    for form in (native(), TorchKernels()):
        cache = KVCache(2, 5, 4, 2, head_dim, dtype, "cpu")
        q = form.store_heads(qkv, heads, angles.cos(), angles.sin(), slots, cache, 1)
        assert not cache.pool[0].any()
        results.append((q, cache.pool))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **tolerance(dtype))
    assert torch.equal(results[0][1][:, :, :, 1], results[1][1][:, :, :, 1])


@compiled
def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    # Half a unit of the last place: ties, which go down and up in turn; then what overflows, and the smallest numbers.
    hidden = torch.cat([1 + torch.arange(14) * 2**-7, torch.tensor([3.38e38, 1e-40])])[None].to(torch.bfloat16)
    delta = torch.cat([torch.full((14,), 2**-8), torch.tensor([3.38e38, 1e-40])])[None].to(torch.bfloat16)
    expected = hidden + delta
    twice = hidden[:, :15].repeat(1, 3)[:, :32]  # as many as the kernels for AMX take at once, none too small for them
    native().rms_norm(hidden, torch.ones(16, dtype=torch.bfloat16), 1e-6, delta)
    assert torch.equal(hidden, expected)
    native().rms_norm(
        twice, torch.ones(32, dtype=torch.bfloat16), 1e-6, delta[:, :15].repeat(1, 3)[:, :32].contiguous()
    )
    assert torch.equal(twice, expected[:, :15].repeat(1, 3)[:, :32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 129, 700])
@pytest.mark.parametrize("form", [pytest.param(native, marks=compiled), TorchKernels], ids=["compiled", "torch"])
def test_the_most_likely_is_the_first_of_the_largest_wherever_it_stands(
    form: Callable[[], Kernels], size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    some_equal = torch.randint(-3, 4, (40, size)).to(dtype)
    largest = torch.full((size, size), -2.0).fill_diagonal_(-1.0).to(dtype)
    zeros = torch.zeros(2, size, dtype=dtype)
    zeros[1, 0] = -0.0
    logits = torch.cat([some_equal, largest, zeros, torch.randn(3, size).to(dtype) * 1e30])
    places, is_finite = form().most_likely(logits)
    assert places.tolist() == logits.double().argmax(dim=1).tolist()
    assert places.dtype == torch.int64
    assert is_finite.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [pytest.param(native, marks=compiled), TorchKernels], ids=["compiled", "torch"])
def test_a_row_with_one_number_that_is_not_finite_is_told(
    form: Callable[[], Kernels], bad: float, dtype: torch.dtype
) -> None:
    size = 150
    logits = torch.randn(size + 2, size).to(dtype).fill_diagonal_(bad)
    logits[size + 1] = bad
    places, is_finite = form().most_likely(logits)
    assert is_finite.tolist() == [False] * size + [True, False]
    assert places.min() >= 0
    assert places.max() < size


@compiled
def test_rows_that_are_not_dense_or_in_another_dtype_take_the_torch_path() -> None:
    wide = torch.randn(4, 100)
    expected = wide[:, :70].argmax(dim=1)
    assert torch.equal(native().most_likely(wide[:, :70])[0], expected)
    assert torch.equal(native().most_likely(wide[:, :70].double())[0], expected)


def test_without_a_library_or_on_another_device_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels("cuda").name == "torch"
    monkeypatch.setattr(module, "compiled_library", lambda: None)
    assert select_kernels("cpu").name == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_equal_plain_ones_for_any_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    rows = [torch.randn(count, 48).to(dtype) for count in (0, 1, 3, 64)]
    with torch.inference_mode():
        expected = [layer(x) for x in rows]
        layer.pack()
        layer.pack()
        for x, plain in zip(rows, expected, strict=True):
            torch.testing.assert_close(layer(x), plain, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)


@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(32, 32), (64, 416), (1536, 96)])
def test_products_in_our_tiles_equal_plain_ones_for_any_number_of_rows(in_size: int, out_size: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(in_size, out_size, bias=bias).to(torch.bfloat16).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    rows = [
        torch.randn(count, in_size).to(torch.bfloat16)
        for count in (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 700)
    ]
    with torch.inference_mode():
        expected = [layer(x) for x in rows]
        layer.pack()
        assert layer.is_in_tiles
        for x, plain in zip(rows, expected, strict=True):
            torch.testing.assert_close(layer(x), plain, rtol=2e-2, atol=2e-2 * in_size**0.5)
        # A row is the same whoever is beside it.
        assert torch.equal(layer(rows[-1])[:1], layer(rows[-1][:1]))
        for few in (20, 40, 60, 64):
            assert torch.equal(layer(rows[-1])[:few], layer(rows[-1][:few]))


def test_without_amx_weights_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "amx_library", lambda: None)
    layer = Linear(32, 32, bias=False).to(torch.bfloat16).requires_grad_(False)
    layer.pack()
    assert not layer.is_in_tiles


def test_packing_drops_the_plain_weight() -> None:
    layer = Linear(16, 16, bias=False).requires_grad_(False)
    layer.pack()
    assert layer.weight is None
    assert list(layer.parameters()) == []


def test_torch_compile_is_refused_on_cpu_with_a_reason() -> None:
    assert select_kernels("cuda", compile_layers=True).name == "torch.compile"
    with pytest.raises(ConfigError, match="--compile-layers is for CUDA"):
        select_kernels("cpu", compile_layers=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_forms_agree_and_are_compiled_once_for_any_number_of_tokens(dtype: torch.dtype) -> None:
    """Traced as for a GPU and run by torch's own operators: what a compiler makes of the trace is not ours."""
    fused, plain = TorchCompiledKernels(backend="aot_eager"), TorchKernels()
    heads = Heads(4, 2, 16, torch.rand(16).to(dtype), torch.rand(16).to(dtype), 1e-6)
    weight = torch.rand(32).to(dtype)

    def check(num_tokens: int) -> None:
        hidden, delta = torch.randn(2, num_tokens, 32).to(dtype)
        own = hidden.clone()
        for given in (None, delta):
            got, expected = (k.rms_norm(x, weight, 1e-6, given) for k, x in ((fused, own), (plain, hidden)))
            torch.testing.assert_close(got, expected, **tolerance(dtype))
        assert torch.equal(own, hidden), "the residual took the delta in"
        gate_up = torch.randn(num_tokens, 64).to(dtype)
        torch.testing.assert_close(fused.gate(gate_up, F.silu), plain.gate(gate_up, F.silu), **tolerance(dtype))
        qkv, angles = torch.randn(num_tokens, 8 * 16).to(dtype), torch.rand(num_tokens, 8)
        caches = [KVCache(1, 8, 4, 2, 16, dtype, "cpu") for _ in range(2)]
        queries = [
            kernels.store_heads(qkv, heads, angles.cos(), angles.sin(), torch.arange(num_tokens), cache, 0)
            for kernels, cache in zip((fused, plain), caches, strict=True)
        ]
        torch.testing.assert_close(*queries, **tolerance(dtype))
        torch.testing.assert_close(caches[0].pool, caches[1].pool, **tolerance(dtype))

    with torch.inference_mode():
        for num_tokens in (5, 1, 9):
            check(num_tokens)
        with torch.compiler.set_stance("fail_on_recompile"):
            for num_tokens in (2, 17, 31):
                check(num_tokens)
