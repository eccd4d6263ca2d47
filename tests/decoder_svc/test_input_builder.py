"""The tensors of a step against a naive construction, token by token."""

import itertools
from array import array
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.input_builder import build_model_input
from decoder_svc.positions import MediaSpan, mrope_positions
from decoder_svc.scheduler import Chunk
from decoder_svc.sequence import Sequence
from tests.decoder_svc.requests import MERGE_SIZE, PAD_ID, picture, sequence_of

BLOCK_SIZE = 4
GRIDS = [(1, 2, 2), (1, 4, 4), (1, 2, 6), (1, 6, 4)]
EMBEDDINGS = {
    media.key: torch.arange(media.num_tokens * 3, dtype=torch.float32).view(-1, 3) + 1000 * number
    for number, grid in enumerate(GRIDS)
    for media in [picture(number, 0, grid)]
}
CPU = torch.device("cpu")


@st.composite
def chunks(draw: Any) -> list[Chunk]:
    """Chunks that begin and end anywhere in sequences of text, pictures and outputs; blocks in any order."""
    free = list(draw(st.permutations(range(60))))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        ids: list[int] = [draw(st.integers(0, 99))]
        media = []
        for number in draw(st.lists(st.integers(0, len(GRIDS) - 1), max_size=2)):
            media.append(picture(number, len(ids), GRIDS[number]))
            ids += [PAD_ID] * media[-1].num_tokens
            ids += draw(st.lists(st.integers(0, 99), max_size=3))
        sequence = sequence_of(ids, media=media, output=draw(st.lists(st.integers(0, 99), max_size=4)))
        start = draw(st.integers(0, sequence.num_tokens - 1))
        end = draw(st.integers(start + 1, sequence.num_tokens))
        sequence.block_table = array("i", [free.pop() for _ in range(-(-end // BLOCK_SIZE))])
        made.append(Chunk(sequence, start, end - start))
    return made


def naive_position(sequence: Sequence, index: int) -> list[int]:
    spans = [
        (s.offset, next(g for g in GRIDS if EMBEDDINGS[s.key].shape[0] == s.num_tokens and _is(s.key, g)))
        for s in sequence.prompt.spans
    ]
    media = [MediaSpan(offset, grid, MERGE_SIZE) for offset, grid in spans]
    positions, delta = mrope_positions(sequence.num_prompt_tokens, media)
    return positions[:, index].tolist() if index < sequence.num_prompt_tokens else [index + delta] * 3


def _is(key: str, grid: tuple[int, int, int]) -> bool:
    return GRIDS[int(key, 16)] == grid


@given(chunks())
@settings(max_examples=50, deadline=None)
def test_a_step_equals_the_naive_construction(step: list[Chunk]) -> None:
    built = build_model_input(step, EMBEDDINGS, BLOCK_SIZE, CPU)
    ids, positions, slots, vision_rows, vision, logits_rows, starts = [], [], [], [], [], [], [0]
    for chunk in step:
        sequence = chunk.sequence
        everything = [*sequence.prompt.token_ids, *sequence.output_token_ids]
        for index in range(chunk.start, chunk.end):
            for span in sequence.prompt.spans:
                if span.offset <= index < span.end:
                    vision_rows.append(len(ids))
                    vision.append(EMBEDDINGS[span.key][index - span.offset].tolist())
            ids.append(everything[index])
            positions.append(naive_position(sequence, index))
            slots.append(sequence.block_table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE)
        starts.append(len(ids))
        if chunk.end == len(everything):
            logits_rows.append(len(ids) - 1)
    assert built.input_ids.tolist() == ids
    assert built.positions.T.tolist() == positions
    assert built.slot_mapping.tolist() == slots
    assert built.cu_seqlens_q.tolist() == starts
    assert built.context_lens.tolist() == [chunk.end for chunk in step]
    assert built.vision_rows.tolist() == vision_rows
    assert (built.vision_embeds.tolist() if built.vision_embeds is not None else []) == vision
    assert built.logits_rows.tolist() == logits_rows
    for row, chunk in zip(built.block_tables.tolist(), step, strict=True):
        table = chunk.sequence.block_table.tolist()
        assert row == table + [table[0]] * (len(row) - len(table))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_chunks_that_cut_a_span_anywhere_give_each_row_once_in_order(data: Any) -> None:
    media = picture(3, 2, GRIDS[3])
    sequence = sequence_of([1, 2, *[PAD_ID] * media.num_tokens, 3], media=[media])
    sequence.block_table = array("i", range(10))
    cuts = sorted({0, sequence.num_tokens, *data.draw(st.lists(st.integers(1, sequence.num_tokens - 1)))})
    parts = [
        build_model_input([Chunk(sequence, start, end - start)], EMBEDDINGS, BLOCK_SIZE, CPU).vision_embeds
        for start, end in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat([part for part in parts if part is not None]), EMBEDDINGS[media.key])


def test_a_step_of_text_alone_has_no_vision_tensors() -> None:
    sequence = sequence_of([1, 2, 3])
    sequence.block_table = array("i", [0])
    built = build_model_input([Chunk(sequence, 0, 3)], {}, BLOCK_SIZE, CPU)
    assert built.vision_embeds is None
    assert built.vision_rows.dtype == torch.int64
    assert built.vision_rows.shape == (0,)


def test_dtypes_are_those_of_the_contract() -> None:
    sequence = sequence_of([1, 2, 3], output=[4])
    sequence.block_table = array("i", [5])
    built = build_model_input([Chunk(sequence, 0, 4)], {}, BLOCK_SIZE, CPU)
    int64 = (built.input_ids, built.positions, built.slot_mapping, built.vision_rows, built.logits_rows)
    assert {tensor.dtype for tensor in int64} == {torch.int64}
    assert {t.dtype for t in (built.cu_seqlens_q, built.context_lens, built.block_tables)} == {torch.int32}
    assert np.array_equal(built.positions.numpy(), np.broadcast_to(np.arange(4), (3, 4)))
