"""The rate that a service reports: of warm, full batches."""

import pytest

from common.rate import LONGEST_S, RateMeter, seconds_for


def meter_of(*batches: tuple[int, float]) -> RateMeter:
    meter = RateMeter()
    for amount, seconds in batches:
        meter.add(amount, seconds)
    return meter


def test_there_is_none_before_the_first_batch() -> None:
    assert meter_of().per_s == 0.0


def test_the_cold_batch_counts_only_until_there_is_another() -> None:
    assert meter_of((1000, 10.0)).per_s == 100.0
    assert meter_of((1000, 10.0), (1000, 0.1)).per_s == pytest.approx(10_000)


def test_small_batches_do_not_make_it_look_slow() -> None:
    meter = meter_of((8000, 5.0), (8000, 0.8), *[(64, 0.05)] * 50)
    assert meter.per_s == pytest.approx(10_000)


def test_a_first_full_batch_replaces_what_small_ones_showed() -> None:
    meter = meter_of(*[(64, 0.05)] * 20, (8000, 0.8))
    assert meter.per_s == pytest.approx(10_000)


def test_it_follows_what_full_batches_show() -> None:
    meter = meter_of((8000, 1.0), *[(8000, 1.0)] * 5, *[(8000, 2.0)] * 30)
    assert meter.per_s == pytest.approx(4000, rel=0.01)


def test_small_batches_count_in_the_end_when_there_are_no_others() -> None:
    meter = meter_of((8000, 1.0), (8000, 1.0), *[(64, 0.064)] * 1000)
    assert meter.per_s == pytest.approx(1000, rel=0.01)


def test_a_queue_is_as_long_as_it_takes_at_the_rate_and_nothing_while_that_is_not_known() -> None:
    assert seconds_for(500, 250.0) == 2.0
    assert seconds_for(500, 0.0) == 0.0
    assert seconds_for(1 << 20, 0.01) == LONGEST_S
