"""What the engine asks for and tells of embeddings: each key once for a sequence, and only what has changed."""

import pytest
import torch

from common.errors import InvalidRequest
from decoder_svc.embedding_pool import EmbeddingPool
from decoder_svc.media_needs import MediaBudget, MediaNeeds, MediaWanted
from decoder_svc.sequence import Sequence
from tests.decoder_svc.requests import PAD_ID, picture, sequence_of

GRID = (1, 4, 4)
KEY = picture(0, 1, GRID).key
ROWS = torch.zeros(4, 8)


def with_picture() -> Sequence:
    return sequence_of([1, *[PAD_ID] * 4, 2], media=[picture(0, 1, GRID)])


def test_a_new_request_is_answered_also_in_vain_and_later_only_what_is_missing_is_asked() -> None:
    needs, text, pictured = MediaNeeds(EmbeddingPool(0)), sequence_of([1, 2]), with_picture()
    assert needs.want([text]) == []
    assert needs.want([text], always=True) == [MediaWanted(text.request_id, text.attempt, [])]
    assert needs.want([pictured], always=True) == [MediaWanted(pictured.request_id, pictured.attempt, [KEY])]
    assert needs.want([text, pictured]) == []
    assert needs.num_waiting == 1


def test_what_was_computed_is_needed_no_more_until_it_is_lost() -> None:
    needs, pictured = MediaNeeds(EmbeddingPool(0)), with_picture()
    needs.want([pictured])
    assert needs.arrived(KEY, ROWS, pictured.arrived_at + 2.0) == {}
    assert pictured.media_wait_s == 2.0
    assert needs.num_waiting == 0
    assert needs.budget([pictured]) == [MediaBudget(0, pictured.request_id)]
    pictured.num_computed_tokens = 5
    assert needs.want([pictured]) == []
    assert needs.budget([pictured]) == [MediaBudget(ROWS.nbytes, None)]
    assert needs.budget([pictured]) == [], "nothing has changed"
    pictured.num_computed_tokens = 0
    assert needs.want([pictured]) == [MediaWanted(pictured.request_id, pictured.attempt, [KEY])]


def test_an_embedding_of_other_rows_is_refused_for_those_that_wait_and_for_those_that_come() -> None:
    needs, pictured = MediaNeeds(EmbeddingPool(1 << 20)), with_picture()
    needs.want([pictured])
    misfits = needs.arrived(KEY, torch.zeros(3, 8), 0.0)
    assert list(misfits) == [pictured.request_id]
    assert isinstance(misfits[pictured.request_id], InvalidRequest)
    needs.forget(pictured)
    assert not needs.wanted
    with pytest.raises(InvalidRequest, match="4 tokens in the prompt, but 3 rows"):
        needs.check_held(with_picture())
