"""The store: leases keep, the rest is a least-recently-used cache, and the books are right at every moment."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import Overloaded
from encoder_svc.embedding_store import EmbeddingStore
from tests.encoder_svc.embeddings import held, key

BUDGET = 10 * 1024
LEASE_S = 10.0


@pytest.fixture
def store() -> EmbeddingStore:
    return EmbeddingStore(BUDGET, LEASE_S)


def test_the_least_recently_used_goes_first(store: EmbeddingStore) -> None:
    for number in range(10):
        store.put(held(number))
    assert store.get(key(0)) is not None
    store.put(held(10))
    assert store.get(key(1)) is None
    assert store.get(key(0)) is not None
    assert store.held_bytes == BUDGET


def test_what_is_leased_stays_and_a_full_store_is_overloaded(store: EmbeddingStore) -> None:
    for number in range(10):
        store.put(held(number))
        assert store.lease(key(number), f"r{number}", 0.0)
    with pytest.raises(Overloaded, match=f"holds {BUDGET} bytes .* of {BUDGET}.* 1024 more") as caught:
        store.put(held(10))
    assert caught.value.retry_after_s
    assert store.get(key(10)) is None
    store.release("r3")
    store.put(held(10))
    assert store.get(key(3)) is None
    assert store.leased_bytes == 9 * 1024


def test_an_item_above_the_whole_budget_is_held_alone_and_only_while_leased(store: EmbeddingStore) -> None:
    store.put(held(0))
    store.put(held(1, 2 * BUDGET))
    assert store.lease(key(1), "r", 0.0)
    assert store.get(key(0)) is None
    with pytest.raises(Overloaded):
        store.put(held(2))
    store.release("r")
    assert store.held_bytes == 0


def test_a_lease_ends_by_its_time(store: EmbeddingStore) -> None:
    store.put(held(0))
    store.lease(key(0), "r1", 0.0)
    store.lease(key(0), "r2", 5.0)
    assert (store.expire(9.9), store.expire(10.0), store.num_leases) == (0, 1, 1)
    assert store.expire(15.0) == 1
    assert store.leased_bytes == 0
    store.release("r1")
    store.end_lease(key(0), "r2")
    assert store.get(key(0)) is not None


def test_leasing_again_extends_and_is_one_lease(store: EmbeddingStore) -> None:
    store.put(held(0))
    store.lease(key(0), "r", 0.0)
    store.lease(key(0), "r", 8.0)
    assert (store.num_leases, store.expire(12.0)) == (1, 0)


def test_what_is_not_held_cannot_be_leased(store: EmbeddingStore) -> None:
    assert not store.lease(key(0), "r", 0.0)
    store.release("r")
    assert store.num_leases == 0


def test_one_lease_of_a_request_can_end_alone(store: EmbeddingStore) -> None:
    for number in (0, 1):
        store.put(held(number))
        store.lease(key(number), "r", 0.0)
    store.end_lease(key(0), "r")
    assert store.leased_bytes == 1024
    store.release("r")
    assert store.leased_bytes == 0


def test_room_is_reserved_before_and_nothing_else_may_take_it(store: EmbeddingStore) -> None:
    for number in range(4):
        store.put(held(number))
    store.reserve(key(9), 8 * 1024)
    assert (store.held_bytes, store.reserved_bytes) == (2 * 1024, 8 * 1024)  # two that nobody needs have gone
    for number in (2, 3):
        store.lease(key(number), "r", 0.0)
    with pytest.raises(Overloaded):
        store.reserve(key(10), 1024)
    with pytest.raises(Overloaded):
        store.put(held(10))
    store.put(held(9, 8 * 1024))
    assert (store.held_bytes, store.reserved_bytes) == (BUDGET, 0)


def test_room_that_is_not_used_is_given_back_once(store: EmbeddingStore) -> None:
    store.reserve(key(1), 4096)
    store.reserve(key(1), 4096)
    assert store.reserved_bytes == 4096
    store.unreserve(key(1))
    store.unreserve(key(1))
    assert store.reserved_bytes == 0


def test_an_embedding_of_another_size_than_was_reserved_needs_room_of_its_own(store: EmbeddingStore) -> None:
    store.reserve(key(1), 1024)
    store.put(held(1, 2048))
    assert (store.held_bytes, store.reserved_bytes) == (2048, 0)
    store.put(held(2, 8 * 1024))
    store.lease(key(2), "r", 0.0)
    store.lease(key(1), "r", 0.0)
    store.reserve(key(3), 0)
    with pytest.raises(Overloaded):
        store.put(held(3, 2048))
    assert store.reserved_bytes == 0


def test_what_is_pinned_stays_until_its_last_transfer_has_ended(store: EmbeddingStore) -> None:
    store.put(held(0))
    assert store.pin(key(0)) is store.pin(key(0)) is store.get(key(0))
    assert store.pin(key(1)) is None
    for number in range(1, 12):
        store.put(held(number))
    assert store.get(key(0)) is not None
    store.unpin(key(0))
    assert store.leased_bytes == 1024
    store.unpin(key(0))
    assert store.leased_bytes == 0
    store.put(held(20, BUDGET))
    assert store.get(key(0)) is None


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls, against a model: which items are held, and who leases what until when."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EmbeddingStore(BUDGET, LEASE_S)
        self.sizes: dict[str, int] = {}
        self.leases: dict[tuple[str, str], float] = {}
        self.now = 0.0

    @rule(number=st.integers(0, 8), size=st.sampled_from([1024, 3072, 6144, 12288]))
    def put(self, number: int, size: int) -> None:
        known = self.held_keys()
        try:
            self.store.put(held(number, size))
        except Overloaded:
            leased = sum(self.sizes[name] for name in {name for name, _ in self.leases})
            assert leased > 0
            assert leased + size > BUDGET
        else:
            if key(number) not in known:
                self.sizes[key(number)] = size

    @rule(number=st.integers(0, 8), request=st.sampled_from("abc"))
    def lease(self, number: int, request: str) -> None:
        is_held = key(number) in self.held_keys()
        assert self.store.lease(key(number), request, self.now) == is_held
        if is_held:
            self.leases[key(number), request] = self.now + LEASE_S

    @rule(request=st.sampled_from("abc"))
    def release(self, request: str) -> None:
        self.store.release(request)
        self.leases = {name: ends for name, ends in self.leases.items() if name[1] != request}

    @rule(number=st.integers(0, 8), request=st.sampled_from("abc"))
    def end_lease(self, number: int, request: str) -> None:
        self.store.end_lease(key(number), request)
        self.leases.pop((key(number), request), None)

    @rule(seconds=st.floats(0, 8))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        over = [name for name, ends in self.leases.items() if ends <= self.now]
        assert self.store.expire(self.now) == len(over)
        for name in over:
            del self.leases[name]

    def held_keys(self) -> set[str]:
        return set(self.store._entries)

    @invariant()
    def the_books_are_right(self) -> None:
        held_keys = self.held_keys()
        assert self.store.num_leases == len(self.leases)
        assert {name for name, _ in self.leases} <= held_keys
        assert self.store.held_bytes == sum(self.sizes[name] for name in held_keys)
        assert self.store.leased_bytes == sum(self.sizes[name] for name in {name for name, _ in self.leases})
        assert self.store.held_bytes <= BUDGET or len(held_keys) == 1
        by_request = {(name, request) for request, names in self.store._keys_by_request.items() for name in names}
        assert by_request == set(self.leases)
        assert all(self.store._keys_by_request.values())


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase
