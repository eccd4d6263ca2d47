"""Tiles of rows cover all rows, and the fused linear layer means what the two steps mean."""

import pytest
import torch
import torch.nn.functional as F

from encoder_svc.model.kernels import (
    ACTIVATIONS,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    Linear,
    has_fused_linear,
    row_tiles,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [1, MIN_TILE_ROWS, MAX_TILE_ROWS * 8 + 3])
@pytest.mark.parametrize("row_bytes", [2, 3072, 1 << 24])
def test_tiles_cover_every_row_once_within_their_limits(num_rows: int, row_bytes: int) -> None:
    tiles = list(row_tiles(num_rows, row_bytes, CPU))
    assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(num_rows))
    largest = max(tile.stop - tile.start for tile in tiles)
    assert largest <= MAX_TILE_ROWS * torch.get_num_threads()
    if num_rows > MIN_TILE_ROWS * torch.get_num_threads():
        assert largest >= MIN_TILE_ROWS


def test_wide_rows_come_in_smaller_tiles_on_a_cpu_and_at_once_on_a_gpu() -> None:
    narrow, wide = (len(list(row_tiles(10_000, row_bytes, CPU))) for row_bytes in (2048, 8192))
    assert narrow < wide
    assert list(row_tiles(10_000, 1 << 24, torch.device("cuda"))) == [slice(0, 10_000)]


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("is_packed", [False, True])
@torch.inference_mode()
def test_a_linear_layer_means_the_same_packed_or_not(
    name: str | None, dtype: torch.dtype, tolerance: float, is_packed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((37, 24), (40, 24), (40,)))
    layer = Linear(24, 40, ACTIVATIONS[name] if name else None).to(dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    if is_packed:
        layer.pack()
        assert (layer.weight is None) == has_fused_linear(dtype)
    got = layer(x)
    expected = F.linear(x.float(), weight.float(), bias.float())
    if name:
        expected = ACTIVATIONS[name].function(expected)
    assert got.dtype == dtype
    assert (got.float() - expected).abs().max() <= tolerance * expected.abs().max()


def test_float32_on_a_cpu_has_the_fused_kernel_of_this_torch_and_half_precision_only_natively() -> None:
    assert has_fused_linear(torch.float32)
    assert has_fused_linear(torch.bfloat16) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not has_fused_linear(torch.float16)
