"""The layout of weights in tiles: the same bits come back, in less memory, also through the compiled product."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decoder_svc.model import linear, tiles
from decoder_svc.model.amx import amx_library
from decoder_svc.model.linear import packed_linear
from decoder_svc.model.tiles import LOW_BYTES, RAW, SLOT_BYTES, TiledWeight, lay_out


def normal(out_size: int, in_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(out_size, in_size, generator=generator) * 0.02).bfloat16()


def any_bits(out_size: int, in_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**15), 2**15, (out_size, in_size), generator=generator).to(torch.int16).view(torch.bfloat16)


def wild(out_size: int, in_size: int) -> Tensor:
    """Numbers of any size whose sums with zeros are finite: none that is zero, not normal or not finite."""
    bits = any_bits(out_size, in_size).view(torch.int16)
    exponent = (bits >> 7) & 0xFF
    return torch.where((exponent > 0) & (exponent < 255), bits, torch.full_like(bits, 0x3F80)).view(torch.bfloat16)


def sparse(out_size: int, in_size: int) -> Tensor:
    return torch.where(torch.arange(in_size) % 3 == 0, normal(out_size, in_size), torch.zeros(()).bfloat16())


def one_outlier(out_size: int, in_size: int) -> Tensor:
    weight = normal(out_size, in_size)
    weight[out_size // 2, in_size // 2] = 1e30
    return weight


def constant(out_size: int, in_size: int) -> Tensor:
    return torch.full((out_size, in_size), -1.5, dtype=torch.bfloat16)


def zero(out_size: int, in_size: int) -> Tensor:
    return torch.zeros(out_size, in_size, dtype=torch.bfloat16)


def tiny(out_size: int, in_size: int) -> Tensor:
    return normal(out_size, in_size) * 2**-128


WEIGHTS = [normal, any_bits, wild, sparse, one_outlier, constant, zero, tiny]


def taken_apart(weight: TiledWeight) -> Tensor:
    """The plain weight, read byte by byte as the layout is described."""
    data = weight.data.tolist()
    num_tiles = weight.out_size // 32 * (weight.in_size // 32) * 2
    slots = -(-num_tiles // 64) * 64
    plain = torch.empty(weight.out_size, weight.in_size, dtype=torch.int32)
    for tile in range(num_tiles):
        panel, step, half = tile // 2 // (weight.in_size // 32), tile // 2 % (weight.in_size // 32), tile % 2
        slot, base = slots + tile * SLOT_BYTES, data[tile]
        place = int.from_bytes(bytes(data[slot + LOW_BYTES : slot + LOW_BYTES + 8]), "little")
        for line in range(16):
            for number in range(32):
                at = line // 2 * 64 + number // 8 * 16 + line % 2 * 8 + number % 8
                if base == RAW:
                    upper = data[place + at]
                else:
                    both = data[slot + LOW_BYTES + at // 128 * 64 + at % 64]
                    code = both >> 4 if at // 64 % 2 else both & 15
                    upper = code // 8 * 128 + base + code % 8
                plain[panel * 32 + half * 16 + number // 2, step * 32 + line * 2 + number % 2] = (
                    upper * 256 + data[slot + at]
                )
    return plain.to(torch.int16)


@pytest.mark.parametrize("size", [(32, 32), (64, 96)])
@pytest.mark.parametrize("make", WEIGHTS)
def test_every_bit_comes_back(make, size: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    weight = make(*size)
    assert torch.equal(taken_apart(lay_out(weight)), weight.view(torch.int16))


def test_a_weight_takes_a_fifth_less_memory_than_plain() -> None:
    weight = normal(512, 512)
    assert lay_out(weight).data.nbytes < 0.8 * weight.nbytes


@pytest.mark.parametrize("make", [normal, sparse])
def test_a_large_weight_is_laid_out_piece_by_piece_and_the_same(
    make,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = make(160, 64)
    whole = lay_out(weight)
    monkeypatch.setattr(tiles, "AT_ONCE", 5)
    assert torch.equal(lay_out(weight).data, whole.data)


@pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")
@pytest.mark.parametrize("at_once", [1, 16, 20, 32, 40, 64, 70, 96])
@pytest.mark.parametrize("make", [normal, wild, sparse, one_outlier, constant, zero])
def test_the_product_with_ones_gives_the_weight(make, at_once: int) -> None:  # type: ignore[no-untyped-def]
    weight = make(224, 96)
    rows = torch.eye(96).bfloat16().split(at_once)
    product = torch.cat([packed_linear(some, lay_out(weight)) for some in rows]).T
    assert torch.equal(product, weight)


def test_a_product_that_finds_no_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "amx_library", lambda: SimpleNamespace(tandem_linear_amx=lambda *_: 1))
    with pytest.raises(MemoryError, match="panels"):
        packed_linear(torch.zeros(1, 32).bfloat16(), lay_out(normal(32, 32)))
