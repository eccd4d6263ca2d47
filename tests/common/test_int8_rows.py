"""Embeddings as 8-bit integers: how far they are from what they were, and what becomes of damaged ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.int8_rows import pack_rows, scales_of, unpack_rows

LEVELS, HIDDEN = 3, 50


def embeddings(num_rows: int = 7, seed: int = 0) -> torch.Tensor:
    """Rows of very different ranges, and parts of a row too."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, 1 + LEVELS, HIDDEN, generator=generator)
    values *= 10 ** torch.linspace(-3, 3, num_rows)[:, None, None]
    values *= torch.tensor([1.0, 100.0, 0.01, 5.0])[:, None]
    return values.view(num_rows, -1)


@given(st.integers(0, 1 << 20), st.integers(1, 20))
def test_each_value_is_within_half_a_step_of_its_own_part(seed: int, num_rows: int) -> None:
    values = embeddings(num_rows, seed)
    parts = values.view(num_rows, 1 + LEVELS, HIDDEN)
    error = (unpack_rows(pack_rows(values, LEVELS), LEVELS, torch.float32).view_as(parts) - parts).abs()
    half_a_step = parts.abs().amax(dim=2, keepdim=True) / 254
    assert (error <= half_a_step * 1.0001).all()


def test_one_scale_for_a_whole_row_would_lose_its_small_parts() -> None:
    values = embeddings()
    small = values.view(-1, 1 + LEVELS, HIDDEN)[:, 2]

    def error(levels: int) -> float:
        back = unpack_rows(pack_rows(values, levels), levels, torch.float32).view(-1, 1 + LEVELS, HIDDEN)[:, 2]
        return float((back - small).norm() / small.norm())

    assert error(LEVELS) < 0.01
    assert error(0) > 0.9


def test_a_packed_row_is_its_scales_and_then_its_integers() -> None:
    packed = pack_rows(torch.tensor([[127.0, -63.4, 0.0, 0.0, 1e-3, -1e-3]]), 2)
    assert bytes(packed.numpy()) == (
        b"\x00\x00\x80?" + b"\0\0\0\0" + scales_of(packed, 2)[0, 2].numpy().tobytes() + b"\x7f\xc1\0\0\x7f\x81"
    )


def test_rows_that_were_packed_apart_are_those_packed_together() -> None:
    values = embeddings()
    apart = torch.cat([pack_rows(row, LEVELS) for row in values.split(2)])
    assert torch.equal(apart, pack_rows(values, LEVELS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_values_come_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    values = embeddings()[:4]
    back = unpack_rows(pack_rows(values.to(dtype), LEVELS), LEVELS, dtype)
    assert back.dtype == dtype
    torch.testing.assert_close(back.float(), values, rtol=0.02, atol=float(values.abs().max()) / 100)


def test_zeros_stay_zeros_and_the_smallest_values_do_not_become_infinite() -> None:
    values = torch.zeros(2, (1 + LEVELS) * HIDDEN)
    values[1, 0] = 1e-42
    back = unpack_rows(pack_rows(values, LEVELS), LEVELS, torch.float32)
    assert torch.equal(back[0], values[0])
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_in_the_scale_of_its_part_alone(value: float) -> None:
    values = embeddings()
    values[2, HIDDEN + 3] = value
    wrong = ~torch.isfinite(scales_of(pack_rows(values, LEVELS), LEVELS))
    assert wrong.nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize(("scale", "dtype"), [(float("nan"), torch.float32), (1e4, torch.float16)])
def test_a_scale_that_a_peer_made_up_gives_values_that_are_not_finite(scale: float, dtype: torch.dtype) -> None:
    packed = pack_rows(embeddings(), LEVELS)
    packed[:, :4] = torch.tensor([scale]).view(torch.uint8)
    assert not torch.isfinite(unpack_rows(packed, LEVELS, dtype)).all()
