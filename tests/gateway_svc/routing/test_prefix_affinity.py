"""What counts as the same beginning of a prompt, and how much is remembered of it."""

from typing import Any

import msgspec
import pytest

from common.messages import GenerateRequest, MediaItem, PromptSpan, SamplingParams
from gateway_svc.routing.prefix_affinity import BLOCK_TOKENS, SeenPrefixes, prefix_hashes


def request_of(num_tokens: int = 4 * BLOCK_TOKENS, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="tiny",
        prompt_token_ids=list(range(num_tokens)),
        sampling=SamplingParams(seed=0, max_tokens=1),
        time_left_s=1,
        **fields,
    )


def picture(key: str, offset: int) -> MediaItem:
    return MediaItem(
        key=key * 64, modality="image", grid=(1, 4, 4), spans=[PromptSpan(offset=offset, num_tokens=4, grid=(1, 4, 4))]
    )


def test_only_full_blocks_have_a_hash() -> None:
    assert prefix_hashes(request_of(BLOCK_TOKENS - 1)) == []
    assert len(prefix_hashes(request_of(3 * BLOCK_TOKENS + 5))) == 3


def test_a_longer_prompt_begins_with_the_hashes_of_the_shorter() -> None:
    assert prefix_hashes(request_of(5 * BLOCK_TOKENS))[:4] == prefix_hashes(request_of())


@pytest.mark.parametrize("place", [0, BLOCK_TOKENS, 3 * BLOCK_TOKENS])
def test_a_token_changes_its_own_block_and_all_behind_it(place: int) -> None:
    request = request_of()
    tokens = list(request.prompt_token_ids)
    tokens[place] += 1
    other = prefix_hashes(msgspec.structs.replace(request, prompt_token_ids=tokens))
    same = [a == b for a, b in zip(prefix_hashes(request), other, strict=True)]
    block = place // BLOCK_TOKENS
    assert same == [True] * block + [False] * (4 - block)


def test_another_picture_in_the_same_place_is_another_prompt_from_there_on() -> None:
    a = prefix_hashes(request_of(media=[picture("a", BLOCK_TOKENS + 3)]))
    b = prefix_hashes(request_of(media=[picture("b", BLOCK_TOKENS + 3)]))
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, False, False, False]


def test_a_salt_keeps_tenants_apart() -> None:
    assert set(prefix_hashes(request_of())).isdisjoint(prefix_hashes(request_of(cache_salt="s")))


def test_known_tokens_are_counted_up_to_the_first_unknown_block() -> None:
    seen, hashes = SeenPrefixes(), prefix_hashes(request_of())
    assert seen.count_tokens(hashes) == 0
    seen.add(hashes[:2])
    assert seen.count_tokens(hashes) == 2 * BLOCK_TOKENS
    seen.add([hashes[3]])
    assert seen.count_tokens(hashes) == 2 * BLOCK_TOKENS


def test_what_is_remembered_is_bounded_and_beginnings_are_kept_longest() -> None:
    seen, hashes = SeenPrefixes(4 * BLOCK_TOKENS), prefix_hashes(request_of())
    seen.add(hashes)
    assert seen.count_tokens(hashes) == 4 * BLOCK_TOKENS
    seen.add([b"other"])
    assert len(seen) == 4
    assert seen.count_tokens(hashes) == 3 * BLOCK_TOKENS, "the end went first"
    seen.add([bytes([number]) for number in range(100)])
    assert len(seen) == 4
