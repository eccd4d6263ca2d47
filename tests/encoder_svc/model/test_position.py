"""The interpolated position table and the rotary angles, against exact values and against transformers."""

import json

import pytest
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from encoder_svc.model.position import FrameTableCache, interpolate_positions, patch_coordinates, rotary_cos_sin
from tests.paths import SHARED, needs_shared

GRIDS = [(1, 4, 6), (2, 2, 4), (1, 34, 2), (3, 8, 10), (1, 4, 6), (1, 2, 2)]


@needs_shared
def test_position_table_hits_the_values_of_the_published_case() -> None:
    expected = json.loads((SHARED / "cases" / "MTH-07" / "expected.json").read_text())
    side = expected["side"]
    table = torch.arange(side * side, dtype=torch.float32)[:, None]
    assert interpolate_positions(table, 2, 2, 2).flatten().tolist() == expected["2x2"]
    assert expected["2x2"] != pytest.approx(expected["wrong_2x2_align_false"], abs=1)
    got = interpolate_positions(table, 6, 4, 2).flatten().tolist()
    assert got == pytest.approx(expected["6x4"], abs=expected["tolerance"])


def test_grid_of_the_tables_own_size_returns_the_table_in_merge_order() -> None:
    table = torch.arange(16.0)[:, None]
    assert interpolate_positions(table, 4, 4, 2).flatten().tolist() == [
        0,
        1,
        4,
        5,
        2,
        3,
        6,
        7,
        8,
        9,
        12,
        13,
        10,
        11,
        14,
        15,
    ]


@pytest.mark.parametrize("merge_size", [1, 2])
def test_positions_equal_the_reference(merge_size: int) -> None:
    table = torch.randn(12 * 12, 7, generator=torch.Generator().manual_seed(1))
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor(GRIDS), num_grid_per_side=12, align_corners=True, spatial_merge_size=merge_size
    )
    reference = (table[indices] * weights[:, :, None]).sum(1)
    got = torch.cat([interpolate_positions(table, h, w, merge_size).repeat(t, 1) for t, h, w in GRIDS])
    torch.testing.assert_close(got, reference, rtol=0, atol=2e-5)


def test_patch_coordinates_equal_the_reference() -> None:
    reference = get_vision_position_ids(torch.tensor(GRIDS), 2)
    got = torch.cat([patch_coordinates(h, w, 2, torch.device("cpu")).repeat(t, 1) for t, h, w in GRIDS])
    assert torch.equal(got, reference)


def test_rotary_angles_turn_the_first_half_by_row_and_the_second_by_column() -> None:
    cos, sin = rotary_cos_sin(torch.tensor([[3, 0], [0, 3]]), head_dim=16, theta=10000.0)
    row, column = torch.atan2(sin, cos)
    assert row.shape == (8,)
    assert row[0].item() == pytest.approx(3, abs=1e-6)
    assert torch.all(row[4:] == 0)
    assert torch.all(column[:4] == 0)
    assert torch.equal(row[:4], column[4:])


def cache(budget_bytes: int = 1 << 20) -> FrameTableCache:
    return FrameTableCache(merge_size=2, head_dim=8, theta=10000.0, budget_bytes=budget_bytes)


def test_a_frame_size_is_computed_once_for_all_items_of_it() -> None:
    tables, table = cache(), torch.randn(144, 6)
    first = tables.get(table, 4, 6)
    assert tables.get(table, 4, 6) is first
    assert tables.get(table, 6, 4) is not first
    torch.testing.assert_close(first.position, interpolate_positions(table, 4, 6, 2), rtol=0, atol=0)


def test_rotary_of_packed_items_repeats_each_frame_over_time() -> None:
    cos, sin = cache().rotary(torch.randn(144, 6), GRIDS)
    coordinates = torch.cat([patch_coordinates(h, w, 2, torch.device("cpu")).repeat(t, 1) for t, h, w in GRIDS])
    for got, expected in zip((cos, sin), rotary_cos_sin(coordinates, 8, 10000.0), strict=True):
        assert torch.equal(got[:, 0, 0], expected)


def test_cached_tables_stay_within_their_bytes_and_the_oldest_go_first() -> None:
    table = torch.randn(144, 6)
    one = cache().get(table, 4, 4).num_bytes
    tables = cache(budget_bytes=2 * one)
    kept = tables.get(table, 4, 4)
    tables.get(table, 2, 8)
    assert tables.get(table, 4, 4) is kept
    tables.get(table, 8, 2)  # in the place of 2 x 8
    assert tables.held_bytes == 2 * one
    assert tables.get(table, 4, 4) is kept
    assert tables.get(table, 8, 8).num_bytes > 2 * one  # never kept, and evicts nothing
    assert tables.held_bytes == 2 * one
    assert tables.get(table, 4, 4) is kept
