"""Who owns a key: all gateways agree, a change moves few keys, and a busy owner is passed over."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.routing import fingerprint_of, least_loaded, owner_bounded_by_load, rendezvous_order
from tests.common.sockets import hello

IDS = [f"encoder-{index}" for index in range(5)]
KEYS = [f"{index:064x}" for index in range(500)]


@given(st.permutations(IDS))
def test_all_gateways_agree_whatever_order_they_know_the_encoders_in(ids: list[str]) -> None:
    assert all(rendezvous_order(key, ids) == rendezvous_order(key, IDS) for key in KEYS[:5])


def test_an_encoder_that_leaves_moves_its_own_keys_only() -> None:
    for key in KEYS:
        order = rendezvous_order(key, IDS)
        assert sorted(order) == IDS
        for leaver in IDS:
            rest = [peer for peer in IDS if peer != leaver]
            assert rendezvous_order(key, rest) == [peer for peer in order if peer != leaver]


def test_keys_are_spread_evenly() -> None:
    owners = Counter(rendezvous_order(key, IDS)[0] for key in KEYS)
    assert all(60 < owners[peer] < 140 for peer in IDS)


def test_an_owner_with_too_long_a_queue_is_asked_last() -> None:
    queues = {"a": 5.0, "b": 1.0, "c": 3.0}
    assert owner_bounded_by_load(["a", "b", "c"], queues, slack_s=2.0) == ["b", "c", "a"]
    assert owner_bounded_by_load(["a", "b", "c"], queues, slack_s=4.0) == ["a", "b", "c"]
    assert owner_bounded_by_load(["a"], {"a": 1e6}) == ["a"]
    assert owner_bounded_by_load([], {}) == []


@given(st.permutations(IDS), st.lists(st.floats(0, 100), min_size=5, max_size=5))
def test_the_bound_loses_no_one_and_keeps_the_order_of_equals(order: list[str], queues: list[float]) -> None:
    queue_s = dict(zip(IDS, queues, strict=True))
    bounded = owner_bounded_by_load(order, queue_s)
    bound = min(queues) + 2.0
    assert bounded == [p for p in order if queue_s[p] <= bound] + [p for p in order if queue_s[p] > bound]


def test_the_least_loaded_is_the_first_of_equals() -> None:
    assert least_loaded(["bb", "a", "c"], len) == "a"
    assert least_loaded([], len) is None


def test_in_a_mixed_fleet_the_fingerprint_is_that_of_most_encoders_that_fit_the_decoder() -> None:
    decoder = hello("decoder", "d", width=192, levels=3)
    old = [hello(instance_id=f"o{i}", fingerprint="a" * 64, width=192, levels=3) for i in range(2)]
    new = [hello(instance_id="n", fingerprint="b" * 64, width=192, levels=3)]
    others = [hello(instance_id=f"x{i}", fingerprint="c" * 64, width=64, levels=3) for i in range(5)]
    assert fingerprint_of([*others, *new, *old], decoder) == "a" * 64
    assert fingerprint_of([*others, *new], decoder) == "b" * 64
    assert fingerprint_of(others, decoder) == "c" * 64, "so that the refusal names the width"
    assert fingerprint_of([*new, *old[:1]], None) == "a" * 64, "a tie is decided alike by all gateways"
    assert fingerprint_of([], decoder) is None
