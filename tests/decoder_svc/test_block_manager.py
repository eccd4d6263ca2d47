"""Blocks: free plus used is total, equal content is found again, and the longest prefixes stay longest."""

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from decoder_svc.block_manager import BlockManager

NUM_BLOCKS = 6


def hash_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


class BlockMachine(RuleBasedStateMachine):
    """Random users of the pool against a plain model: who holds what, and what each held block contains."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, 4)
        self.references = [0] * NUM_BLOCKS
        self.content: dict[int, bytes] = {}  # of blocks that were named since they were taken

    @rule(target=held, count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> object:
        num_free = self.blocks.num_free
        taken = self.blocks.try_take(count)
        if taken is None:
            assert count > num_free
            return multiple()
        assert len(set(taken)) == count <= num_free
        for block in taken:
            assert self.references[block] == 0, "a block in use was given out"
            self.references[block] = 1
            self.content.pop(block, None)
        return tuple(taken)

    @rule(target=held, numbers=st.lists(st.integers(0, 5), max_size=4))
    def share(self, numbers: list[int]) -> tuple[int, ...]:
        hashes = [hash_of(number) for number in numbers]
        present = self.blocks.count_cached(hashes)
        shared = self.blocks.share(hashes)
        assert len(shared) == present
        for block, block_hash in zip(shared, hashes, strict=False):
            assert self.content[block] == block_hash, "a block of other content was shared"
            self.references[block] += 1
        return tuple(shared)

    @rule(blocks=consumes(held))
    def give_back(self, blocks: tuple[int, ...]) -> None:
        self.blocks.give_back(blocks)
        for block in blocks:
            self.references[block] -= 1

    @rule(blocks=held, number=st.integers(0, 5))
    def name(self, blocks: tuple[int, ...], number: int) -> None:
        for block in blocks[:1]:
            is_new = block not in self.content and hash_of(number) not in self.content.values()
            self.blocks.name(block, hash_of(number))
            if is_new:
                self.content[block] = hash_of(number)

    @rule(blocks=held)
    def unname(self, blocks: tuple[int, ...]) -> None:
        for block in blocks[:1]:
            self.blocks.unname(block)
            self.content.pop(block, None)

    @invariant()
    def free_and_used_are_all(self) -> None:
        self.blocks.check()
        assert self.blocks.num_used == sum(count > 0 for count in self.references)
        assert self.blocks.num_free + self.blocks.num_used == NUM_BLOCKS
        assert all(self.blocks.count_cached([block_hash]) == 1 for block_hash in self.content.values())


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=30, deadline=None)


def test_a_named_block_is_found_after_it_was_given_back_until_it_is_reused() -> None:
    blocks = BlockManager(2, 4)
    [first] = blocks.try_take(1) or []
    blocks.name(first, hash_of(1))
    blocks.give_back([first])
    assert blocks.share([hash_of(1)]) == [first]
    blocks.give_back([first])
    assert blocks.try_take(2) is not None
    assert blocks.share([hash_of(1)]) == []


def test_the_end_of_a_prefix_is_reused_before_its_beginning() -> None:
    blocks = BlockManager(3, 4)
    taken = blocks.try_take(3) or []
    for number, block in enumerate(taken):
        blocks.name(block, hash_of(number))
    blocks.give_back(taken)
    assert blocks.try_take(1) == [taken[2]]
    assert blocks.share([hash_of(0), hash_of(1), hash_of(2)]) == taken[:2]


def test_a_block_without_content_is_reused_before_one_with_content() -> None:
    blocks = BlockManager(2, 4)
    named, plain = blocks.try_take(2) or []
    blocks.name(named, hash_of(1))
    blocks.give_back([plain, named])
    assert blocks.try_take(1) == [plain]


def test_sharing_stops_at_the_first_missing_block() -> None:
    blocks = BlockManager(3, 4)
    taken = blocks.try_take(2) or []
    blocks.name(taken[0], hash_of(0))
    blocks.name(taken[1], hash_of(2))
    assert blocks.share([hash_of(0), hash_of(1), hash_of(2)]) == taken[:1]


def test_giving_back_twice_is_noticed() -> None:
    blocks = BlockManager(1, 4)
    taken = blocks.try_take(1) or []
    blocks.give_back(taken)
    with pytest.raises(AssertionError, match="twice"):
        blocks.give_back(taken)
