"""Who is taken on: limits of the gateway, of a key, and each key's share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Overloaded, RateLimited, TandemError
from gateway_svc.http.admission import Admission
from gateway_svc.http.api_keys import ApiKey, KeyLimits


def key(name: str, **limits: float) -> ApiKey:
    return ApiKey(name, KeyLimits(**limits))  # type: ignore[arg-type]


def test_a_full_gateway_refuses_until_one_leaves() -> None:
    admission = Admission(2)
    admission.admit(None, 0.0)
    admission.admit(None, 0.0)
    with pytest.raises(Overloaded, match="runs 2 requests"):
        admission.admit(None, 0.0)
    admission.leave(None)
    admission.admit(None, 0.0)
    assert admission.num_running == 2


def test_a_key_has_a_minute_worth_of_requests_and_is_told_when_the_next_may_come() -> None:
    admission, alice = Admission(100), key("alice", requests_per_minute=2)
    for _ in range(2):
        admission.admit(alice, 10.0)
    with pytest.raises(RateLimited, match="2 requests a minute") as caught:
        admission.admit(alice, 10.0)
    assert caught.value.retry_after_s == pytest.approx(30.0)
    admission.admit(key("bob", requests_per_minute=2), 10.0)
    with pytest.raises(RateLimited):
        admission.admit(alice, 39.0)
    admission.admit(alice, 40.5)
    with pytest.raises(RateLimited):
        admission.admit(alice, 40.5)


def test_a_refused_request_costs_nothing() -> None:
    admission, alice = Admission(1), key("alice", requests_per_minute=1)
    admission.admit(None, 0.0)
    with pytest.raises(Overloaded):
        admission.admit(alice, 0.0)
    admission.leave(None)
    admission.admit(alice, 0.0)


def test_a_key_runs_no_more_at_once_than_it_may() -> None:
    admission, alice = Admission(100), key("alice", max_inflight=1)
    admission.admit(alice, 0.0)
    with pytest.raises(RateLimited, match="1 is its limit"):
        admission.admit(alice, 0.0)
    admission.leave(alice)
    admission.admit(alice, 0.0)


def test_two_keys_of_one_name_share_its_limits() -> None:
    admission = Admission(100)
    admission.admit(key("alice", max_inflight=1), 0.0)
    with pytest.raises(RateLimited):
        admission.admit(key("alice", max_inflight=1), 0.0)


def test_a_greedy_key_leaves_room_for_the_others() -> None:
    admission, greedy = Admission(100), key("greedy")
    for _ in range(75):
        admission.admit(greedy, 0.0)
    with pytest.raises(RateLimited, match="75 are its share"):
        admission.admit(greedy, 0.0)
    for _ in range(25):
        admission.admit(key("modest"), 0.0)
    admission.leave(key("modest"))
    with pytest.raises(RateLimited, match="50 are its share"):
        admission.admit(greedy, 0.0)
    admission.admit(key("third"), 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 1)), max_size=200))
def test_counts_are_right_whatever_comes_and_goes(steps: list[tuple[str, bool, float]]) -> None:
    admission, now = Admission(8), 0.0
    running: dict[str, int] = dict.fromkeys("abc", 0)
    for name, is_arrival, pause_s in steps:
        now += pause_s
        one = key(name, requests_per_minute=600, max_inflight=5)
        if is_arrival:
            try:
                admission.admit(one, now)
            except TandemError:
                pass
            else:
                running[name] += 1
        elif running[name]:
            admission.leave(one)
            running[name] -= 1
        assert admission.num_running == sum(running.values()) <= 8
        assert max(running.values()) <= 5
