"""Batches: in order, within both limits, nothing lost and nothing twice; and a long video lets the others pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.batcher import Batcher, Piece


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
        batch = [piece.item for piece in batcher.next_batch()]
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
    assert [[piece.item for piece in batcher.next_batch()] for _ in batches] == batches
    assert batcher.next_batch() == []


# (frames, patches a frame), or None to take a batch
Step = tuple[int, int] | None


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 12), st.integers(1, 12))), max_size=40),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_every_frame_of_every_item_is_taken_once_and_no_image_waits_for_two_slices(
    steps: list[Step], max_patches: int, max_slice: int
) -> None:
    max_slice = min(max_slice, max_patches)
    batcher: Batcher[int] = Batcher(max_patches, 8, max_slice_patches=lambda: max_slice)
    sizes: list[tuple[int, int]] = []
    frames: dict[int, list[int]] = {}
    slices_in_a_row = 0
    for step in [*steps, *[None] * 12 * len(steps)]:
        if step is not None:
            batcher.add(len(sizes), step[0] * step[1], step[0])
            sizes.append(step)
            continue
        has_whole = any(is_whole(sizes[item], max_slice) and item not in frames for item in range(len(sizes)))
        batch = batcher.next_batch()
        is_slice = any(not is_whole(sizes[piece.item], max_slice) for piece in batch)
        slices_in_a_row = slices_in_a_row + 1 if is_slice and has_whole else 0
        assert slices_in_a_row < 2
        patches = sum(piece.num_frames * sizes[piece.item][1] for piece in batch)
        limit = max_slice if is_slice else max_patches
        assert patches <= limit or (len(batch) == 1 and (is_slice <= (batch[0].num_frames == 1)))
        for piece in batch:
            frames.setdefault(piece.item, []).extend(range(piece.first, piece.first + piece.num_frames))
    assert frames == {item: list(range(size[0])) for item, size in enumerate(sizes)}
    assert (len(batcher), batcher.waiting_patches) == (0, 0)


def is_whole(size: tuple[int, int], max_slice: int) -> bool:
    """Whether an item is never cut."""
    return size[0] == 1 or size[0] * size[1] <= max_slice


def test_slices_of_a_video_take_turns_with_batches_of_images() -> None:
    batcher: Batcher[str] = Batcher(10, 2, max_slice_patches=lambda: 8)
    batcher.add("video", 24, 6)
    for name in "abc":
        batcher.add(name, 3)
    taken = [[(piece.item, piece.num_frames) for piece in batcher.next_batch()] for _ in range(5)]
    images = [[("a", 1), ("b", 1)], [("c", 1)]]
    assert taken == [images[0], [("video", 2)], images[1], [("video", 2)], [("video", 2)]]


def test_what_is_not_wanted_any_more_takes_no_room_in_a_batch() -> None:
    unwanted: set[str] = set()
    batcher: Batcher[str] = Batcher(10, 8, max_slice_patches=lambda: 4, is_wanted=lambda name: name not in unwanted)
    for name in ("a", "b", "c"):
        batcher.add(name, 5)
    batcher.add("video", 12, 3)
    unwanted |= {"a", "video"}
    assert batcher.next_batch() == [Piece("b", 0, 1), Piece("c", 0, 1)]
    assert batcher.next_batch() == []
    assert len(batcher) == 0


def test_a_batch_is_full_when_waiting_would_not_make_it_larger() -> None:
    batcher: Batcher[str] = Batcher(10, 3, max_slice_patches=lambda: 4)
    batcher.add("a", 5)
    assert not batcher.is_full
    batcher.add("b", 5)
    assert batcher.is_full
    batcher.next_batch()
    batcher.add("video", 12, 3)
    assert batcher.is_full
