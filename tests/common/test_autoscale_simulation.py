"""What becomes of tiers under bursts, silence, late signals, slow starts and deaths: no flapping, and enough pods."""

import math
import random
from typing import Any

import pytest

from common.autoscale import Policy
from tests.common.simulated_tiers import BuiltIn, Decoders, Encoders, Hpa, Load, Tier

POLICY = Policy(min_replicas=1, max_replicas=20)
TO_ZERO = Policy(min_replicas=0, max_replicas=5)
both_tiers = pytest.mark.parametrize("tier", [Encoders, Decoders])
both_deciders = pytest.mark.parametrize("decider", [BuiltIn, Hpa])


def run(tier: type[Tier], load: Load, seconds: float, **options: Any) -> Tier:
    return tier(load=load, **{"policy": POLICY, **options}).run(seconds)


def noisy(level: float, seed: int = 1, sigma: float = 0.15) -> Load:
    draw = random.Random(seed)
    return lambda now: max(0.0, level * draw.gauss(1.0, sigma))


@both_deciders
@both_tiers
@pytest.mark.parametrize("level", [0.3, 0.75, 1.0, 1.7, 2.4, 5.2, 11.0])
def test_a_steady_noisy_load_finds_its_size_and_stays(tier: type[Tier], level: float, decider: type) -> None:
    found = run(tier, noisy(level), 3600, decider=decider)
    found.check()
    assert found.kept_target(since=600) >= 0.95
    if tier is Encoders:
        (settled,) = found.settled(since=1800)
        assert level / 0.8 <= settled <= level / 0.8 / 0.8 + 2.2
    else:  # requests come one by one, so the work itself goes up and down
        assert max(found.settled(since=1800)) <= 1.25 * level / 0.85 + 2 * math.sqrt(level) + 2


@both_deciders
@both_tiers
def test_a_burst_is_met_once_and_left_slowly(tier: type[Tier], decider: type) -> None:
    found = run(tier, lambda now: 6.0 if 1000 <= now < 1600 else 0.5, 4000, decider=decider)
    found.check()
    assert found.kept_target() >= (0.95 if decider is BuiltIn else 0.9)  # an HPA grows at a bounded rate
    assert found.least(1200, 1600) >= 7
    assert found.least(1600, 1895) >= 7  # the window after the burst
    assert found.history[-1][1] <= 2


@both_tiers
@pytest.mark.parametrize("period", [60, 150, 320, 700, 1500])
def test_bursts_of_any_period_move_the_tier_at_most_once_in_a_window(tier: type[Tier], period: int) -> None:
    found = run(tier, lambda now: 5.0 if now % period < 40 else 0.4, 7200, replicas=2)
    found.check()
    late = [at for at in found.direction_changes() if at > 3600]
    if period <= 400 and tier is Encoders:
        assert late == []  # a load that is back within the window is stayed ready for


@both_deciders
@both_tiers
def test_no_traffic_at_all_moves_nothing(tier: type[Tier], decider: type) -> None:
    policy = TO_ZERO if decider is BuiltIn else POLICY
    found = run(tier, lambda now: 0.0, 2000, policy=policy, decider=decider)
    found.check()
    assert found.history[-1][1] == policy.min_replicas
    assert found.direction_changes() == []
    assert found.kept_target() == 1.0


def test_the_first_image_after_a_quiet_night_brings_one_up() -> None:
    found = run(Encoders, lambda now: 0.2 if 1000 <= now < 1100 else 0.0, 2500, policy=TO_ZERO, replicas=0)
    found.check()
    assert found.least(1010, 1400) >= 1
    assert found.most() <= 3
    assert found.history[-1][1] == 0
    assert isinstance(found, Encoders)
    assert found.backlog == 0.0


@both_deciders
@both_tiers
@pytest.mark.parametrize("cold_start_s", [10.0, 60.0, 180.0])
def test_replicas_that_start_slowly_do_not_make_it_ask_for_ever_more(
    tier: type[Tier], cold_start_s: float, decider: type
) -> None:
    """Others went from 2 to 4, 8 and 16 while pods loaded."""
    found = run(tier, lambda now: 2.0 if now > 100 else 0.5, 3600, cold_start_s=cold_start_s, decider=decider)
    found.check()
    # What waits when the new ones come has to be worked off too, in about the time to recover.
    assert found.most() <= 2.0 / 0.8 + cold_start_s * 1.5 / 10 + 2
    assert found.history[-1][2]


@both_tiers
@pytest.mark.parametrize("lag_s", [0.0, 15.0, 60.0])
def test_signals_that_come_late_cost_time_and_no_flapping(tier: type[Tier], lag_s: float) -> None:
    found = run(tier, lambda now: 4.0 if now > 300 else 1.0, 5000, lag_s=lag_s)
    found.check()
    if tier is Encoders:
        assert len(found.direction_changes()) <= 1
    assert found.kept_target() >= 0.95


@both_deciders
@both_tiers
def test_a_pod_that_dies_is_no_reason_to_shrink_or_to_flap(tier: type[Tier], decider: type) -> None:
    deaths = (600.0, 1500.0, 1505.0)
    found = run(tier, noisy(3.0), 4000, replicas=4, deaths=deaths, decider=decider)
    found.check()
    assert found.least() >= 4
    assert found.kept_target() >= 0.95


@both_tiers
def test_a_day_of_rising_and_falling_load_never_falls_below_need(tier: type[Tier]) -> None:
    def day(now: float) -> float:
        return 3.0 + 2.5 * math.sin(now / 7200 * 2 * math.pi)

    found = run(tier, day, 2 * 7200, replicas=4)
    found.check()
    assert found.kept_target(since=300) >= 0.95
    assert found.steps_down()
    for at, after in found.steps_down():  # each leaves enough for what comes, then and for a while after
        assert after >= max(day(at + later) for later in (0.0, 60.0, 120.0))
