"""The account of forwards under way: one that computes at a time, and silence that counts from the last progress."""

import random

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.device_clock import DeviceClock, ForwardUnderWay


def test_a_forward_behind_another_counts_once_the_first_is_computed() -> None:
    clock = DeviceClock()
    first = clock.begin(10, 100.0)
    second = clock.begin(20, 101.0)
    assert (clock.is_computing, clock.largest_patches, clock.busy_s_at(103.0)) == (True, 20, 3.0)
    assert clock.computed(first, 104.0) == 4.0
    assert (clock.silent_s_at(105.0), clock.busy_s_at(105.0)) == (1.0, 5.0)
    clock.end(first, 106.0)
    assert (clock.silent_s_at(106.5), clock.is_computing) == (0.5, True)
    assert clock.computed(second, 110.0) == 6.0
    assert not clock.is_computing
    assert (clock.silent_s_at(111.0), clock.busy_s_at(111.0)) == (1.0, 10.0), "its rows are still to come"
    clock.end(second, 112.0)
    assert (clock.silent_s_at(1e9), clock.busy_s_at(1e9), clock.largest_patches) == (0.0, 10.0, 0)


def test_what_is_told_twice_counts_once() -> None:
    clock = DeviceClock()
    forward = clock.begin(1, 0.0)
    assert [clock.computed(forward, 2.0), clock.computed(forward, 3.0)] == [2.0, 0.0]
    assert clock.busy_s_at(9.0) == 2.0


@given(st.integers(0, 1 << 32), st.integers(1, 3))
def test_the_device_never_works_longer_than_time_passes_nor_stops_while_it_computes(seed: int, depth: int) -> None:
    rng, clock, now = random.Random(seed), DeviceClock(), 0.0
    under_way: list[ForwardUnderWay] = []
    busy_s = expected_busy_s = went_on_at = 0.0
    for _ in range(60):
        pause = rng.random()
        expected_busy_s += pause * clock.is_computing
        now += pause
        assert abs(clock.busy_s_at(now) - expected_busy_s) < 1e-9
        assert clock.silent_s_at(now) == (now - went_on_at if under_way else 0.0)
        if not under_way or (len(under_way) < depth and rng.random() < 0.5):
            went_on_at = now if not under_way else went_on_at
            under_way.append(clock.begin(1, now))
            continue
        went_on_at = now
        if not under_way[0].is_computed:
            busy_s += clock.computed(under_way[0], now)
        else:
            clock.end(under_way.pop(0), now)
    assert busy_s <= clock.busy_s_at(now) + 1e-9
