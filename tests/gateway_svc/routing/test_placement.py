"""Who owns a key: all gateways agree, a change moves few keys, and a busy owner is passed over."""

import random
from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.embedding import FleetFacts
from gateway_svc.routing.placement import (
    DecoderLoad,
    choose_decoder,
    fleet_facts_of,
    owner_bounded_by_load,
    rendezvous_order,
)
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


FREE = DecoderLoad()


def choose(loads: dict[str, DecoderLoad], known: dict[str, int] | None = None, seed: int = 0) -> str | None:
    return choose_decoder(list(loads), loads.__getitem__, lambda peer: (known or {}).get(peer, 0), random.Random(seed))


def test_of_two_decoders_the_one_with_less_to_do_is_chosen() -> None:
    assert choose({"a": DecoderLoad(running=2), "b": DecoderLoad(running=1)}) == "b"
    assert choose({"a": DecoderLoad(num_own=2), "b": DecoderLoad(running=1)}) == "b", "own requests count at once"
    assert choose({"a": DecoderLoad(running=2), "b": DecoderLoad(waiting=2)}) == "a", "a queue is worse than a batch"
    assert choose({"a": DecoderLoad(kv_used=0.9), "b": DecoderLoad(running=1)}) == "b", (
        "KV that fills up is worse still"
    )
    long_prompt = DecoderLoad(running=1, queue_s=2.0)
    assert choose({"a": long_prompt, "b": DecoderLoad(running=6)}) == "b", "a long prompt is more than a request"
    assert choose({"a": FREE, "b": FREE}) == "a"
    assert choose({}) is None


def test_two_at_random_spread_the_load_and_spare_the_busiest() -> None:
    loads = {name: DecoderLoad(running=running) for running, name in enumerate("abcde")}
    chosen = Counter(choose(loads, seed=seed) for seed in range(300))
    assert chosen["a"] > chosen["b"] > chosen["d"]
    assert chosen["e"] == 0
    assert len(chosen) == 4, "gateways with equally old reports do not all run to one decoder"


def test_a_known_prefix_wins_over_a_little_load_and_never_over_much() -> None:
    busy = DecoderLoad(running=3)
    assert choose({"a": FREE, "b": busy}, {"b": 64}) == "a", "half a request is not worth three"
    assert choose({"a": FREE, "b": busy}, {"b": 512}) == "b"
    assert choose({"a": FREE, "b": DecoderLoad(running=5)}, {"b": 100_000}) == "a", "the imbalance is bounded"


@given(st.integers(0, 1000), st.lists(st.integers(0, 20), min_size=3, max_size=9), st.integers(0, 8))
def test_the_decoder_that_knows_most_is_always_considered(seed: int, running: list[int], index: int) -> None:
    index %= len(running)
    loads = {str(number): DecoderLoad(running=count) for number, count in enumerate(running)}
    chosen = choose(loads, {str(index): 10_000}, seed)
    assert chosen is not None
    assert loads[chosen].cost <= loads[str(index)].cost
    if running[index] <= min(running) + 4:
        assert loads[chosen].cost - (4 if chosen == str(index) else 0) <= loads[str(index)].cost - 4


OLD, NEW, OTHER = FleetFacts("a" * 64, "bfloat16"), FleetFacts("b" * 64, "float16"), FleetFacts("c" * 64, "int8")


def test_in_a_mixed_fleet_the_fingerprint_is_that_of_most_encoders_that_fit_the_decoder() -> None:
    decoder = hello("decoder", "d", width=192, levels=3)
    old = [hello(instance_id=f"o{i}", **msgspec.structs.asdict(OLD), width=192, levels=3) for i in range(2)]
    new = [hello(instance_id="n", **msgspec.structs.asdict(NEW), width=192, levels=3)]
    others = [hello(instance_id=f"x{i}", **msgspec.structs.asdict(OTHER), width=64, levels=3) for i in range(5)]
    assert fleet_facts_of([*others, *new, *old], decoder) == OLD
    assert fleet_facts_of([*others, *new], decoder) == NEW
    assert fleet_facts_of(others, decoder) == OTHER, "so that the refusal names the width"
    assert fleet_facts_of([*new, *old[:1]], None) == OLD, "a tie is decided alike by all gateways"
    assert fleet_facts_of([], decoder) is None
    assert fleet_facts_of([hello(fingerprint="a" * 64)], None) is None, "it does not say what it sends"
