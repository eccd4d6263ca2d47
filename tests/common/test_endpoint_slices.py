"""What a Service's slices say, read as Kubernetes documents them, and what is skipped."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.endpoint_slices import SliceCache
from common.members import Member
from tests.kubernetes.fake_api import addresses, endpoint, endpoint_slice

PORTS = {"control": 7101, "data": 7102}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.ip_addresses().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def cache_of(*slices: Any) -> SliceCache:
    cache = SliceCache(["control", "data"])
    cache.replace(slices)
    return cache


def encoders(name: str, *endpoints: Any, **fields: Any) -> Any:
    return {**endpoint_slice(name, "encoder", list(endpoints), PORTS), **fields}


def test_a_ready_pod_is_a_member_by_its_named_ports() -> None:
    cache = cache_of(encoders("a", endpoint("10.0.0.1", "encoder-1")))
    assert cache.members() == [Member(("tcp://10.0.0.1:7101", "tcp://10.0.0.1:7102"), True, "encoder-1")]


def test_an_ipv6_address_is_put_in_brackets() -> None:
    cache = cache_of(encoders("a", endpoint("fd00::1"), addressType="IPv6"))
    assert cache.members()[0].endpoints == ("tcp://[fd00::1]:7101", "tcp://[fd00::1]:7102")


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, "ready"),
        ({"ready": None, "serving": None, "terminating": None}, "ready"),
        ({"ready": False, "serving": False}, "not_ready"),
        ({"ready": False, "serving": None}, "not_ready"),
        ({"ready": False, "serving": True, "terminating": True}, "serving"),
        ({"ready": True, "terminating": True}, "serving"),  # a Service that publishes addresses that are not ready
        ({"ready": False, "serving": False, "terminating": True}, "terminating"),
    ],
)
def test_conditions_give_one_of_four_states(conditions: dict[str, Any], state: str) -> None:
    cache = cache_of(encoders("a", endpoint("10.0.0.1", **conditions)))
    assert cache.endpoints()[0].state == state
    assert {name for name, count in cache.count_by_state().items() if count} == {state}
    assert [member.takes_new_work for member in cache.members()] == {"ready": [True], "serving": [False]}.get(state, [])


def test_conditions_that_are_absent_mean_ready() -> None:
    assert cache_of(encoders("a", {"addresses": ["10.0.0.1"]})).members()[0].takes_new_work


def test_an_endpoint_in_two_slices_counts_once_with_its_better_state() -> None:
    going, ready = endpoint("10.0.0.1", serving=False, terminating=True), endpoint("10.0.0.1")
    for order in ([going, ready], [ready, going]):
        cache = cache_of(*(encoders(name, entry) for name, entry in zip("ab", order, strict=True)))
        assert [entry.state for entry in cache.endpoints()] == ["ready"]


def test_events_change_one_slice_and_a_list_replaces_all() -> None:
    cache = cache_of(encoders("a", endpoint("10.0.0.1")), encoders("b", endpoint("10.0.0.2")))
    assert cache.apply("MODIFIED", encoders("a", endpoint("10.0.0.1"), endpoint("10.0.0.3")))
    assert not cache.apply("MODIFIED", encoders("a", endpoint("10.0.0.1"), endpoint("10.0.0.3")))
    assert len(cache.members()) == 3
    assert cache.apply("DELETED", encoders("b"))
    assert not cache.apply("DELETED", encoders("b"))
    assert len(cache.members()) == 2
    cache.replace([encoders("c", endpoint("10.0.0.9"))])
    assert [member.endpoints[0] for member in cache.members()] == ["tcp://10.0.0.9:7101"]


@pytest.mark.parametrize(
    "entry",
    [
        {"addresses": []},
        {"addresses": None, "conditions": {"ready": True}},
        {"conditions": {"ready": True}},
        {"addresses": ["not an address"]},
        {"addresses": [17]},
        {"addresses": ["fe80::1%a b;c"]},
        {"addresses": ["10.0.0.1"], "conditions": "ready"},
        "10.0.0.1",
        None,
    ],
)
def test_a_pod_without_a_usable_address_costs_only_itself(entry: Any) -> None:
    cache = cache_of(encoders("a", entry, endpoint("10.0.0.2")))
    assert [member.endpoints[0] for member in cache.members()] == ["tcp://10.0.0.2:7101"]
    assert cache.num_malformed == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoints": 17},
        {"endpoints": {"addresses": ["10.0.0.9"]}},
        {"ports": None},
        {"ports": [{"name": "control", "port": 7101}]},
        {"ports": [{"name": "control", "port": 7101}, {"name": "data", "port": "7102"}]},
        {"ports": [{"name": "control", "port": 7101}, {"name": "data", "port": True}]},
        {"ports": [{"name": "control", "port": 7101}, {"name": "data", "port": 70_000}]},
        {"ports": [{"name": {}, "port": 7101}, {"name": "data", "port": 7102}]},
        {"addressType": "FQDN"},
    ],
)
def test_a_malformed_slice_leaves_the_one_of_its_name_as_it_was(fields: dict[str, Any]) -> None:
    cache = cache_of(encoders("a", endpoint("10.0.0.1")))
    bad = encoders("a", endpoint("10.0.0.9"), **fields)
    assert not cache.apply("MODIFIED", bad)
    cache.replace([bad])
    assert [member.endpoints[0] for member in cache.members()] == ["tcp://10.0.0.1:7101"]
    assert cache.num_malformed == 2


@pytest.mark.parametrize("item", [None, 17, [], {}, {"metadata": None}, {"metadata": {"name": 3}}])
def test_what_is_no_object_is_skipped(item: Any) -> None:
    cache = cache_of(encoders("a", endpoint("10.0.0.1")))
    assert not cache.apply("MODIFIED", item)
    assert not cache.apply("DELETED", item)
    assert len(cache.members()) == 1


def places_of(item: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in an object where something else may stand."""
    yield place
    keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
    for key in keys:
        yield from places_of(item[key], (*place, key))


@given(st.data())
def test_whatever_stands_anywhere_in_a_slice_the_other_slices_are_there(data: st.DataObject) -> None:
    bad = encoders("b", endpoint("10.0.0.9", "pod"), endpoint("10.0.0.8"))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from([place for place in places_of(bad) if place]))
        within = bad
        for key in path:
            within = within[key]
        within[last] = data.draw(ANYTHING)
    cache = cache_of(encoders("a", endpoint("10.0.0.1")))
    cache.apply("MODIFIED", bad)
    cache.replace([bad, encoders("a", endpoint("10.0.0.1"))])
    cache.count_by_state()
    found = [member.endpoints for member in cache.members()]
    assert ("tcp://10.0.0.1:7101", "tcp://10.0.0.1:7102") in found
    assert all(re.fullmatch(r"tcp://([0-9.]+|\[[0-9a-f:.]+\]):[0-9]+", text) for texts in found for text in texts)


def test_a_slice_without_endpoints_may_have_no_ports() -> None:
    assert cache_of(encoders("a", endpoints=None, ports=None)).num_malformed == 0


def test_five_hundred_endpoints_over_several_slices_are_all_members() -> None:
    found = list(addresses(500))
    cache = cache_of(*(encoders(f"s{i}", *(endpoint(a) for a in found[i : i + 100])) for i in range(0, 500, 100)))
    assert len(cache.members()) == 500
