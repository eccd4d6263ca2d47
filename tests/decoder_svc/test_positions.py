"""M-RoPE positions of prompts, against published cases and transformers' get_rope_index."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.positions import MediaSpan, mrope_positions
from tests.paths import SHARED, needs_shared
from tests.tiny_models import tiny_config, tiny_model

MERGE = 2


def frame_groups(case: dict[str, Any]) -> dict[int, list[tuple[int, int, int]]]:
    """Grids of each media type, videos split into their frame groups."""
    videos = [(1, h, w) for t, h, w in case.get("video_grid_thw", ()) for _ in range(t)]
    return {1: [tuple(grid) for grid in case.get("image_grid_thw", ())], 2: videos}


def spans_of(types: list[int], grids: dict[int, list[tuple[int, int, int]]]) -> list[MediaSpan]:
    queues = {kind: iter(queue) for kind, queue in grids.items()}
    spans = []
    for kind, group in itertools.groupby(range(len(types)), key=types.__getitem__):
        if kind:
            spans.append(MediaSpan(next(group), next(queues[kind]), MERGE))
    return spans


@needs_shared
@pytest.mark.parametrize("case_id", ["MTH-02", "MTH-03", "MTH-04"])
def test_positions_equal_the_published_cases(case_id: str) -> None:
    case = json.loads((SHARED / "cases" / case_id / "expected.json").read_text())
    positions, delta = mrope_positions(len(case["types"]), spans_of(case["types"], frame_groups(case)))
    assert positions.tolist() == [case["t"], case["h"], case["w"]]
    assert delta == case["delta"]


def test_text_alone_counts_up_on_all_axes() -> None:
    positions, delta = mrope_positions(5, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_empty_prompt_has_no_positions() -> None:
    positions, delta = mrope_positions(0, [])
    assert positions.shape == (3, 0)
    assert delta == 0


def test_span_outside_the_prompt_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="inside"):
        mrope_positions(4, [MediaSpan(1, (1, 4, 4), MERGE)])
    with pytest.raises(AssertionError, match="ascending"):
        mrope_positions(20, [MediaSpan(4, (1, 4, 4), MERGE), MediaSpan(6, (1, 4, 4), MERGE)])


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model(tiny_config()).model


segments = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.integers(1, 6)),
        st.tuples(st.just("image"), st.integers(1, 5), st.integers(1, 5)),
        st.tuples(st.just("video"), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(parts=segments)
def test_positions_equal_the_reference_for_any_mix(reference: Any, parts: list[Any]) -> None:
    types: list[int] = []
    images, videos = [], []
    for part in parts:
        if part[0] == "text":
            types += [0] * part[1]
        elif part[0] == "image":
            images.append([1, 2 * part[1], 2 * part[2]])
            # The reference finds media by runs of one type, so a text token stands between any two.
            types += [0] + [1] * (part[1] * part[2])
        else:
            videos.append([part[1], 2 * part[2], 2 * part[3]])
            for _ in range(part[1]):
                types += [0] + [2] * (part[2] * part[3])
    expected, expected_delta = reference.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types]),
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
    )
    grids = frame_groups({"image_grid_thw": images, "video_grid_thw": videos})
    positions, delta = mrope_positions(len(types), spans_of(types, grids))
    assert np.array_equal(positions, expected[:, 0].numpy())
    assert delta == expected_delta.item()


def test_neighbouring_spans_without_text_between_keep_their_own_grids() -> None:
    spans = [MediaSpan(0, (1, 4, 4), MERGE), MediaSpan(4, (1, 2, 6), MERGE)]
    positions, delta = mrope_positions(7, spans)
    assert positions[0].tolist() == [0, 0, 0, 0, 2, 2, 2]
    assert positions[2].tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert delta == 5 - 7
