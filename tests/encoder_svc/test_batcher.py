"""Batches: in order, within both limits, nothing lost and nothing twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.batcher import Batcher


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 50)), max_size=60),
    st.integers(1, 60),
    st.integers(1, 6),
)
def test_batches_keep_order_and_limits_whatever_arrives(
    steps: list[int | None], max_patches: int, max_items: int
) -> None:
    """A number adds an item of that size; None takes a batch."""
    batcher: Batcher[tuple[int, int]] = Batcher(max_patches, max_items)
    waiting: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []
    added = 0
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            waiting.append((added, step))
            batcher.add((added, step), step)
            added += 1
            continue
        batch = batcher.next_batch()
        assert batch == waiting[: len(batch)]
        assert bool(batch) == bool(waiting)
        patches = sum(size for _, size in batch)
        assert len(batch) <= max_items
        assert patches <= max_patches or len(batch) == 1
        rest = waiting[len(batch) :]
        if rest and len(batch) < max_items:
            assert patches + rest[0][1] > max_patches
        waiting, taken = rest, taken + batch
        assert len(batcher) == len(waiting)
        assert batcher.waiting_patches == sum(size for _, size in waiting)
    assert [number for number, _ in taken] == list(range(added))


@pytest.mark.parametrize(
    ("sizes", "batches"), [([100], [[100]]), ([3, 100, 3], [[3], [100], [3]]), ([4, 6, 1], [[4, 6], [1]])]
)
def test_an_oversize_item_runs_alone(sizes: list[int], batches: list[list[int]]) -> None:
    batcher: Batcher[int] = Batcher(10, 8)
    for size in sizes:
        batcher.add(size, size)
    assert [batcher.next_batch() for _ in batches] == batches
    assert batcher.next_batch() == []
