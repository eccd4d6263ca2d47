"""Replicas from work: what adds up over gateways, and a tier that is simulated through what production does to it."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

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
    scaled,
    total,
)

POLICY = Policy(min_replicas=1, max_replicas=20)
TARGET_S = 0.5
STEP_S = 1.0
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


# A tier, simulated.


@dataclass
class Simulation:
    """A tier of encoders that start slowly, behind an autoscaler that sees late."""

    load: Callable[[float], float]
    """Replicas' worth of work that arrives each second."""
    policy: Policy = POLICY
    cold_start_s: float = 45.0
    lag_s: float = 5.0
    deaths: tuple[float, ...] = ()
    replicas: int = 1
    ready: int = 1
    backlog: float = 0.0
    now: float = 0.0
    starting: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    signals: list[tuple[float, float]] = field(default_factory=list)
    history: list[tuple[float, int, int, float]] = field(default_factory=list)

    def run(self, seconds: float) -> "Simulation":
        self.state = State(self.replicas)
        while self.now < seconds:
            self.step()
        return self

    def step(self) -> None:
        self.ready += sum(at <= self.now for at in self.starting)
        self.starting = [at for at in self.starting if at > self.now]
        if self.now in self.deaths and self.ready:
            self.ready -= 1
            self.starting.append(self.now + self.cold_start_s)
        offered = self.load(self.now)
        self.arrived.append(offered)
        self.backlog = max(0.0, self.backlog + (offered - self.ready) * STEP_S)
        seen = self.arrived[-30:]
        share = encoder_share(
            backlog_patches=self.backlog * 1000,
            offered_patches_per_s=sum(seen) / len(seen) * 1000,
            patches_per_s=1000,
            ready=self.ready,
            loads={},
        )
        self.signals.append((self.now, share.replicas))
        if self.now % EVERY_S == 0:
            self.scale()
        self.history.append((self.now, self.replicas, self.ready, self.backlog))
        self.now += STEP_S

    def scale(self) -> None:
        known = [signal for at, signal in self.signals if at <= self.now - self.lag_s]
        if not known:
            return
        self.signals = [entry for entry in self.signals if entry[0] >= self.now - self.lag_s - 1]
        self.state = observe(self.state, Observation(self.now, known[-1]), self.replicas, self.policy)
        wanted = desired(self.state, self.policy)
        if wanted == self.replicas:
            return
        self.state = scaled(self.state, wanted, self.policy)
        if wanted > self.replicas:
            self.starting += [self.now + self.cold_start_s] * (wanted - self.replicas)
        else:
            for _ in range(self.replicas - wanted):
                if self.starting:
                    self.starting.pop()
                else:
                    self.ready -= 1
        self.replicas = wanted

    def direction_changes(self) -> list[float]:
        """When the tier began to shrink after it grew, or to grow after it shrank."""
        moves = [
            (at, after - before)
            for (_, before, *_), (at, after, *_) in itertools.pairwise(self.history)
            if after != before
        ]
        return [at for (_, first), (at, second) in itertools.pairwise(moves) if first * second < 0]

    def kept_target(self, since: float = 0.0) -> float:
        """The part of the time in which the backlog was within its target."""
        seen = [backlog <= TARGET_S * max(ready, 1) for at, _, ready, backlog in self.history if at >= since]
        return sum(seen) / len(seen)

    def least(self, since: float, until: float = math.inf) -> int:
        return min(replicas for at, replicas, *_ in self.history if since <= at <= until)

    def most(self) -> int:
        return max(replicas for _, replicas, *_ in self.history)

    def check(self) -> None:
        """What holds whatever the load: limits, steps down of one, no flapping."""
        changes = self.direction_changes()
        gaps = [after - before for before, after in itertools.pairwise(changes)]
        assert all(gap >= self.policy.window_s for gap in gaps), changes
        for (_, before, *_), (_, after, *_) in itertools.pairwise(self.history):
            assert after >= before - 1
            assert self.policy.min_replicas <= after <= self.policy.max_replicas


def noisy(level: float, seed: int = 1, sigma: float = 0.15) -> Callable[[float], float]:
    draw = random.Random(seed)
    return lambda now: max(0.0, level * draw.gauss(1.0, sigma))


@pytest.mark.parametrize("level", [0.3, 0.75, 1.0, 1.7, 2.4, 5.2, 11.0])
def test_a_steady_noisy_load_finds_its_size_and_stays(level: float) -> None:
    found = Simulation(noisy(level)).run(3600)
    found.check()
    settled = {replicas for at, replicas, *_ in found.history if at >= 1800}
    assert len(settled) == 1
    assert level / 0.8 <= settled.pop() <= level / 0.8 / 0.8 + 2.2
    assert found.kept_target(since=600) >= 0.95


def test_a_burst_is_met_once_and_left_slowly() -> None:
    found = Simulation(lambda now: 6.0 if 1000 <= now < 1600 else 0.5).run(4000)
    found.check()
    assert len(found.direction_changes()) == 1
    assert found.kept_target() >= 0.95
    assert found.least(1100, 1600) >= 8
    assert found.least(1600, 1895) >= 8  # the window after the burst
    assert found.history[-1][1] == 1


def test_bursts_of_any_period_move_the_tier_at_most_once_in_a_window() -> None:
    for period in (60, 320, 700):
        found = Simulation(lambda now, period=period: 5.0 if now % period < 40 else 0.4, replicas=2, ready=2).run(7200)
        changes = found.direction_changes()
        late = [at for at in changes if at > 3600]
        assert len(late) <= 3600 / POLICY.window_s, (period, changes)
        if period <= 400:
            assert late == [], (period, changes)  # a load that is back within the window is stayed ready for


def test_no_traffic_at_all_moves_nothing() -> None:
    found = Simulation(lambda now: 0.0, policy=Policy(min_replicas=0, max_replicas=5)).run(2000)
    found.check()
    assert found.history[-1][1] == 0
    assert found.direction_changes() == []


def test_the_first_image_after_a_quiet_night_brings_one_up() -> None:
    found = Simulation(
        lambda now: 0.2 if 1000 <= now < 1100 else 0.0,
        policy=Policy(min_replicas=0, max_replicas=5),
        replicas=0,
        ready=0,
    ).run(2500)
    found.check()
    assert found.least(1010, 1400) >= 1
    assert found.most() <= 3
    assert found.history[-1][1] == 0
    assert found.backlog == 0.0


@pytest.mark.parametrize("cold_start_s", [10.0, 60.0, 180.0])
def test_replicas_that_start_slowly_do_not_make_it_ask_for_ever_more(cold_start_s: float) -> None:
    """Others went from 2 to 4, 8 and 16 while pods loaded."""
    found = Simulation(lambda now: 2.0 if now > 100 else 0.5, cold_start_s=cold_start_s).run(3600)
    found.check()
    # What waits when the new ones come has to be worked off too, in about the time to recover.
    assert found.most() <= 2.0 / 0.8 + cold_start_s * 1.5 / 10 + 2
    assert found.history[-1][3] <= TARGET_S * found.ready


@pytest.mark.parametrize("lag_s", [0.0, 15.0, 60.0])
def test_signals_that_come_late_cost_time_and_no_flapping(lag_s: float) -> None:
    found = Simulation(lambda now: 4.0 if now > 300 else 1.0, lag_s=lag_s).run(5000)
    found.check()
    assert len(found.direction_changes()) <= 1
    assert found.kept_target() >= 0.95


def test_a_pod_that_dies_is_no_reason_to_shrink_or_to_flap() -> None:
    found = Simulation(noisy(3.0), replicas=4, ready=4, deaths=(600.0, 1500.0, 1505.0)).run(4000)
    found.check()
    assert found.least(0) >= 4
    assert found.kept_target() >= 0.95


def test_a_day_of_rising_and_falling_load_never_falls_below_need() -> None:
    def day(now: float) -> float:
        return 3.0 + 2.5 * math.sin(now / 7200 * 2 * math.pi)

    found = Simulation(day, replicas=4, ready=4).run(2 * 7200)
    found.check()
    assert found.kept_target(since=300) >= 0.95
    shrinks = [(at, after) for (_, before, *_), (at, after, *_) in itertools.pairwise(found.history) if after < before]
    assert shrinks
    for at, after in shrinks:  # each step down leaves enough for what comes, then and for a window after
        assert after >= max(day(at + later) for later in (0.0, 60.0, 120.0))
