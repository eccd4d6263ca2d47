"""Replicas from work: what adds up over gateways, and one decision at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.autoscale import (
    DecoderUse,
    Observation,
    Policy,
    Share,
    State,
    decoder_share,
    desired,
    encoder_share,
    needed,
    observe,
    total,
)

POLICY = Policy(min_replicas=1, max_replicas=20)
EVERY_S = 5.0


def share_of(backlog: float = 0.0, offered: float = 0.0, rate: float = 1000.0) -> Share:
    return encoder_share(
        backlog_patches=backlog, offered_patches_per_s=offered, patches_per_s=rate, ready=1, loads={"e": backlog}
    )


def test_nothing_to_do_is_zero_and_never_absent() -> None:
    assert share_of() == Share(tier="encoder", patches_per_s=1000.0, ready=1, loads={"e": 0.0})
    assert total("encoder", []) == Share(tier="encoder")
    assert decoder_share({}, held=0) == Share(tier="decoder")
    assert needed(0.0) == 0


def test_encoding_is_measured_in_patches_not_in_requests() -> None:
    assert share_of(backlog=4000).backlog_seconds == 4.0
    assert share_of(offered=800).replicas == pytest.approx(1.0)
    assert share_of(offered=800, backlog=5000).replicas == pytest.approx(1.5)


def test_the_first_image_needs_one_encoder() -> None:
    assert needed(share_of(backlog=1).replicas) == 1


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)), min_size=1, max_size=8))
def test_shares_of_gateways_add_up_to_that_of_one_gateway_for_all(parts: list[tuple[float, float]]) -> None:
    together = share_of(sum(b for b, _ in parts), sum(o for _, o in parts))
    summed = total("encoder", [share_of(*part) for part in parts])
    assert summed.replicas == pytest.approx(together.replicas)
    assert summed.backlog_seconds == pytest.approx(together.backlog_seconds)
    assert summed.loads["e"] == pytest.approx(together.loads["e"])
    assert summed.patches_per_s == pytest.approx(1000.0)


def load(**fields: float) -> DecoderUse:
    given_fields = {"kv_share": 0.0, "running": 0, "waiting": 0, "slots": 10, "wait_s": 0.0, "own": 1, **fields}
    return DecoderUse(**given_fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "occupancy"),
    [
        ({"kv_share": 0.8, "running": 1}, 1.0),
        ({"kv_share": 0.4, "running": 1}, 0.5),
        ({"running": 17, "slots": 20}, 1.0),
        ({"running": 8.5, "waiting": 8.5}, 2.0),
        ({"wait_s": 3.0, "running": 2, "waiting": 3}, 3.0),
        ({"wait_s": 30.0, "running": 1}, 1.0),  # one long prompt: a second decoder could not help it
    ],
)
def test_a_decoder_is_as_full_as_its_fullest_resource(fields: dict[str, float], occupancy: float) -> None:
    assert load(**fields).occupancy == pytest.approx(occupancy)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.floats(0, 1))
def test_parts_of_a_decoder_over_gateways_make_the_whole(own: list[int], kv_share: float) -> None:
    whole = load(kv_share=kv_share, running=sum(own), own=sum(own))
    parts = [decoder_share({"d": load(kv_share=kv_share, running=sum(own), own=n)}, held=0) for n in own]
    assert total("decoder", parts).replicas == pytest.approx(whole.own_occupancy)


def test_requests_that_wait_for_a_first_decoder_need_one() -> None:
    assert needed(decoder_share({}, held=3).replicas) == 1


# One step.


def state_of(replicas: int, *work: float, every_s: float = EVERY_S) -> State:
    state = State(replicas)
    for number, amount in enumerate(work):
        state = observe(state, Observation(number * every_s, amount), replicas, POLICY)
    return state


def test_up_goes_to_what_is_needed_at_once_and_counts_replicas_that_still_start() -> None:
    assert desired(state_of(1, 3.2), POLICY) == 4
    assert desired(state_of(4, 3.2), POLICY) == 4  # three of them may be starting
    assert desired(state_of(1, 99.0), POLICY) == 20


def test_down_is_one_step_after_a_whole_quiet_window() -> None:
    assert desired(state_of(5, *[0.1] * 61), POLICY) == 4
    assert desired(state_of(5, *[0.1] * 60), POLICY) == 5  # not yet the whole window
    assert desired(state_of(5, *[0.1] * 30, 3.5, *[0.1] * 30), POLICY) == 5  # 3.5 does not fit 4 with headroom


def test_down_never_goes_where_the_load_would_be_too_much() -> None:
    """Two replicas with work for 1.0 stay: one would be full at once, and come back."""
    assert desired(state_of(2, *[1.0] * 100), POLICY) == 2
    assert desired(state_of(2, *[0.79] * 100), POLICY) == 1


def test_the_last_one_goes_only_when_nothing_came_all_through_the_window() -> None:
    to_zero = Policy(min_replicas=0)
    assert desired(state_of(1, *[0.0] * 61), to_zero) == 0
    assert desired(state_of(1, *[0.0] * 60, 0.001), to_zero) == 1
    assert desired(state_of(0, *[0.0] * 61), to_zero) == 0
    assert desired(state_of(0, 0.001), to_zero) == 1
    assert desired(state_of(1, *[0.0] * 61), POLICY) == 1


def test_a_gap_or_an_incomplete_sum_allows_no_step_down() -> None:
    state = state_of(5, *[0.1] * 60)
    late = observe(state, Observation(400.0, 0.1), 5, POLICY)
    assert desired(late, POLICY) == 5
    partial = observe(state, Observation(300.0, 0.1, is_complete=False), 5, POLICY)
    assert desired(partial, POLICY) == 5
    assert desired(observe(partial, Observation(305.0, 9.0, is_complete=False), 5, POLICY), POLICY) == 9


def test_no_observation_changes_nothing_but_the_limits_hold() -> None:
    assert desired(State(3), POLICY) == 3
    assert desired(State(0), POLICY) == 1
    assert desired(State(50), POLICY) == 20
