"""Sequences: slices over the seam of prompt and output, and block hashes that know all that a block depends on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import MediaItem
from decoder_svc.sequence import Sequence
from tests.decoder_svc.requests import PAD_ID, key_of, picture, sequence_of, span_at

IDS = [1, 2, 3, PAD_ID, PAD_ID, PAD_ID, PAD_ID, 4, 5, 6, 7, 8]


def hashes(token_ids: list[int] = IDS, **fields: Any) -> list[bytes]:
    fields.setdefault("media", [picture(1, 3)])
    sequence = sequence_of(token_ids, **fields)
    sequence.hash_blocks(4)
    return sequence.block_hashes


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.lists(st.integers(0, 99), max_size=9), st.data())
def test_tokens_are_slices_of_prompt_and_output_together(prompt: list[int], output: list[int], data: Any) -> None:
    sequence = sequence_of(prompt, output=output)
    start = data.draw(st.integers(0, sequence.num_tokens))
    end = data.draw(st.integers(start, sequence.num_tokens))
    assert sequence.tokens(start, end) == [*prompt, *output][start:end]


def test_equal_content_has_equal_hashes_whatever_the_request() -> None:
    assert len(hashes()) == 3
    assert hashes() == hashes(request_id="another", choice=3)


def test_a_longer_prompt_keeps_the_hashes_of_its_beginning() -> None:
    assert hashes([*IDS, 9, 9, 9, 9])[:3] == hashes()


def test_output_tokens_hash_like_prompt_tokens() -> None:
    assert hashes(IDS[:8], output=IDS[8:]) == hashes()


@pytest.mark.parametrize("position", range(len(IDS)))
def test_every_token_changes_its_block_and_those_behind_it(position: int) -> None:
    changed = list(IDS)
    changed[position] += 1
    equal = [a == b for a, b in zip(hashes(changed), hashes(), strict=True)]
    assert equal == [block < position // 4 for block in range(3)]


def test_another_picture_in_the_same_text_never_shares_its_blocks() -> None:
    assert not set(hashes(media=[picture(2, 3)])) & set(hashes())


def test_a_picture_shifted_inside_the_same_token_ids_changes_the_hash() -> None:
    ids = [PAD_ID] * 8
    assert not set(hashes(ids, media=[picture(1, 0)])) & set(hashes(ids, media=[picture(1, 4)]))


def test_other_rows_of_the_same_item_change_the_hash() -> None:
    ids = [PAD_ID] * 8
    video = [MediaItem(key=key_of(1), modality="video", grid=(2, 4, 4), spans=[span_at(o, (1, 4, 4)) for o in (0, 4)])]
    first, second = hashes(ids, media=video), hashes(ids[:4], media=[picture(1, 0)])
    assert first[0] == second[0]
    late = sequence_of(ids, media=video)
    assert [span.row_offset for span in late.prompt.spans] == [0, 4]
    assert late._hash_block(b"", 0, 4) != late._hash_block(b"", 4, 8)


def test_a_shorter_span_over_the_same_token_ids_changes_the_hash() -> None:
    ids = [PAD_ID] * 8
    assert hashes(ids, media=[picture(1, 0, (1, 4, 4))])[1] != hashes(ids, media=[picture(1, 0, (1, 4, 6))])[1]
    assert hashes([PAD_ID] * 4, media=[picture(1, 0, (1, 2, 4))]) != hashes([PAD_ID] * 4, media=[picture(1, 0)])


def test_a_span_over_several_blocks_hashes_each_part_by_its_rows() -> None:
    big = sequence_of([PAD_ID] * 8, media=[picture(1, 0, (1, 4, 8))])
    assert big._hash_block(b"", 0, 4) != big._hash_block(b"", 4, 8)


@pytest.mark.parametrize(("one", "other"), [(None, ""), (None, "a"), ("a", "b"), ("", "a")])
def test_salts_keep_all_blocks_apart(one: str | None, other: str | None) -> None:
    assert not set(hashes(cache_salt=one)) & set(hashes(cache_salt=other))
    assert hashes(cache_salt=one) == hashes(cache_salt=one)


def test_only_full_blocks_are_hashed_and_more_tokens_extend_the_list() -> None:
    sequence: Sequence = sequence_of([1, 2, 3])
    sequence.hash_blocks(4)
    assert sequence.block_hashes == []
    sequence.output_token_ids += [4, 5, 6, 7, 8]
    sequence.hash_blocks(4)
    assert len(sequence.block_hashes) == 2


def test_spans_are_sorted_by_place_whatever_the_order_of_items() -> None:
    sequence = sequence_of([0] * 12, media=[picture(2, 6), picture(1, 1)])
    assert [(span.key, span.offset, span.end) for span in sequence.prompt.spans] == [
        (key_of(1), 1, 5),
        (key_of(2), 6, 10),
    ]
    assert [span.key for span in sequence.spans_from(4)] == [key_of(1), key_of(2)]
    assert [span.key for span in sequence.spans_from(5)] == [key_of(2)]
    assert list(sequence.spans_from(10)) == []
