"""Embeddings in memory: kept while needed, then a small LRU, with every byte accounted for."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from decoder_svc.embedding_pool import EmbeddingPool

ROW_BYTES = 4


def embedding(rows: int) -> Tensor:
    return torch.zeros(rows, 1)


class PoolMachine(RuleBasedStateMachine):
    """Needs that change at random, and deliveries that come late, twice, or for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_bytes = 3 * ROW_BYTES
        self.pool = EmbeddingPool(self.cache_bytes)
        self.charged = 0  # what an inbox counts: delivered, and not released
        self.needs: dict[int, set[str]] = {}

    @rule(sequence=st.integers(0, 2), keys=st.sets(st.integers(1, 4)))
    def need(self, sequence: int, keys: set[int]) -> None:
        self.needs[sequence] = {str(key) for key in keys}
        self.pool.need(sequence, sorted(self.needs[sequence]))

    @rule(rows=st.integers(1, 4))
    def deliver(self, rows: int) -> None:
        self.charged += rows * ROW_BYTES
        self.pool.add(str(rows), embedding(rows))

    @invariant()
    def charged_bytes_are_those_that_are_needed(self) -> None:
        self.charged -= self.pool.take_released_bytes()
        needed = set().union(*self.needs.values())
        present = {key for key in needed if key in self.pool}
        assert self.charged == self.pool.needed_bytes == sum(int(key) * ROW_BYTES for key in present)
        assert self.pool.num_bytes - self.pool.needed_bytes <= self.cache_bytes
        assert self.pool.has_needs == bool(needed)
        for sequence, keys in self.needs.items():
            assert self.pool.needs_of(sequence) == keys


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, deadline=None)


def test_an_embedding_stays_while_anyone_needs_it_and_goes_with_the_last() -> None:
    pool = EmbeddingPool(0)
    pool.need("a", ["k"])
    pool.need("b", ["k"])
    pool.add("k", embedding(2))
    pool.need("a", ())
    assert "k" in pool
    assert pool.take_released_bytes() == 0
    pool.need("b", ())
    assert "k" not in pool
    assert pool.take_released_bytes() == 8


def test_the_least_recently_used_idle_embedding_goes_first() -> None:
    pool = EmbeddingPool(8)
    for key in ("a", "b"):
        pool.add(key, embedding(1))
    pool.need("s", ["a"])
    pool.need("s", ())
    pool.add("c", embedding(1))
    assert sorted(pool.tensors) == ["a", "c"]


def test_one_that_is_needed_again_counts_again() -> None:
    pool = EmbeddingPool(100)
    pool.add("k", embedding(2))
    assert pool.take_released_bytes() == 8
    pool.need("s", ["k"])
    assert pool.take_released_bytes() == -8


def test_a_second_copy_is_released_at_once() -> None:
    pool = EmbeddingPool(100)
    pool.need("s", ["k"])
    pool.add("k", embedding(2))
    pool.add("k", embedding(2))
    assert pool.take_released_bytes() == 8
    assert pool.num_bytes == 8
