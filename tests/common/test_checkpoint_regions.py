"""Pieces of stored tensors: together the ranks' shares are the whole parameter, from every layout."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoint_regions import Destination, Owned, pieces_of


def filled(shape: tuple[int, ...], owned: Owned, stored: dict[str, tuple[torch.Tensor, Destination]]) -> torch.Tensor:
    """A share, filled from stored tensors; what nothing fills is NaN."""
    own = list(shape)
    own[owned.axis] = owned.size
    share = torch.full(own, torch.nan)
    for tensor, destination in stored.values():
        for index, piece in pieces_of(destination, shape, owned):
            piece.view(share).copy_(tensor[index])
    return share


def expected(whole: torch.Tensor, owned: Owned) -> torch.Tensor:
    return torch.cat([whole.narrow(owned.axis, first, end - first) for first, end in owned.ranges], dim=owned.axis)


@given(st.data())
def test_a_share_of_fused_rows_comes_from_each_of_the_tensors_that_were_fused(data: Any) -> None:
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = torch.randn(sum(counts), 3)
    stored, start = {}, 0
    for number, count in enumerate(counts):
        region = (slice(start, start + count),)
        stored[str(number)] = (whole[start : start + count], Destination("p", region))
        start += count
    bounds = st.tuples(st.integers(0, start), st.integers(0, start)).map(lambda pair: (min(pair), max(pair)))
    owned = Owned(0, tuple(data.draw(st.lists(bounds, min_size=1, max_size=3))))
    torch.testing.assert_close(filled((start, 3), owned, stored), expected(whole, owned))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_share_of_experts_comes_from_one_tensor_in_either_orientation(axis: int, is_transposed: bool) -> None:
    whole = torch.randn(3, 8, 6)
    tensor = whole.transpose(1, 2).contiguous() if is_transposed else whole
    owned = Owned(axis, ((1, 3), (4, 6)))
    stored = {"x": (tensor, Destination("p", is_transposed=is_transposed))}
    torch.testing.assert_close(filled((3, 8, 6), owned, stored), expected(whole, owned))


def test_a_share_of_experts_comes_from_a_tensor_for_each_of_them() -> None:
    whole = torch.randn(2, 8, 5)
    owned = Owned(1, ((2, 4), (6, 8)))
    stored = {
        f"{expert}.{part}": (whole[expert, rows], Destination("p", (expert, rows)))
        for expert in range(2)
        for part, rows in (("gate", slice(0, 4)), ("up", slice(4, 8)))
    }
    torch.testing.assert_close(filled((2, 8, 5), owned, stored), expected(whole, owned))
    down = torch.randn(2, 5, 4)
    stored = {f"{expert}": (down[expert], Destination("p", (expert, slice(None)))) for expert in range(2)}
    torch.testing.assert_close(filled((2, 5, 4), Owned(2, ((1, 3),)), stored), down[:, :, 1:3])


def test_nothing_is_read_of_a_tensor_that_is_another_rank_s() -> None:
    owned = Owned(0, ((0, 4),))
    assert list(pieces_of(Destination("p", (slice(4, 8),)), (8, 2), owned)) == []
