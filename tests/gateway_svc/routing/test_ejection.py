"""Peers that keep failing: left alone, tried with one request, left alone for longer, and forgiven."""

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.routing.ejection import LONGEST_S, MAX_FAILURES, MAX_PEERS, TRIAL_S, Ejection


def ejection() -> Ejection:
    return Ejection("encoder", jitter=lambda: 1.0)


def eject(peers: Ejection, now: float) -> None:
    for _ in range(MAX_FAILURES):
        peers.record_failure("a", now)


def test_a_few_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    peers = ejection()
    for _ in range(5):
        assert not peers.record_failure("a", 0.0)
        assert not peers.record_failure("a", 0.0)
        peers.record_success("a")
    assert peers.allows("a", 0.0)
    assert [peers.record_failure("a", 0.0) for _ in range(MAX_FAILURES)] == [False, False, True]
    assert not peers.allows("a", 0.0)
    assert peers.allows("b", 0.0)


def test_after_the_pause_one_request_is_a_trial() -> None:
    peers = ejection()
    eject(peers, 0.0)
    assert not peers.allows("a", 0.9)
    assert peers.allows("a", 1.0)
    peers.begin("a", 1.0)
    assert not peers.allows("a", 1.1), "others wait for the trial"
    peers.record_success("a")
    assert peers.allows("a", 1.1)
    peers.begin("a", 1.1)
    assert peers.allows("a", 1.2), "no trial any more"


def test_a_failed_trial_ejects_for_twice_as_long_up_to_a_limit() -> None:
    peers, now, pauses = ejection(), 0.0, []
    eject(peers, now)
    for _ in range(8):
        began = now
        while not peers.allows("a", now):
            now += 0.5
        pauses.append(now - began)
        peers.begin("a", now)
        assert peers.record_failure("a", now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == LONGEST_S


def test_a_trial_that_says_nothing_or_never_ends_leaves_room_for_another() -> None:
    peers = ejection()
    eject(peers, 0.0)
    peers.begin("a", 2.0)
    peers.end_trial("a")
    assert peers.allows("a", 2.0)
    peers.begin("a", 2.0)
    assert not peers.allows("a", 2.0 + TRIAL_S - 1)
    assert peers.allows("a", 2.0 + TRIAL_S)


def test_failures_of_requests_that_began_before_the_ejection_do_not_prolong_it() -> None:
    peers = ejection()
    eject(peers, 0.0)
    assert not peers.record_failure("a", 0.5)
    assert peers.allows("a", 1.0)


@given(st.floats(0, 1))
def test_jitter_spreads_the_return_over_half_of_the_pause(jitter: float) -> None:
    peers = Ejection("encoder", jitter=lambda: jitter)
    eject(peers, 0.0)
    assert not peers.allows("a", 0.49)
    assert peers.allows("a", 1.0)


def test_peers_that_come_and_go_are_forgotten() -> None:
    peers = ejection()
    for number in range(2 * MAX_PEERS):
        peers.record_failure(str(number), 0.0)
    assert len(peers._records) == MAX_PEERS
