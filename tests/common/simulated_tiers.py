"""Tiers that are simulated second by second, behind the decisions of `common.autoscale` and what keeps them late.

Owns the pods' lives: they start slowly, die, and are taken away; and who decides: `tandem autoscaler` with its state,
or a HorizontalPodAutoscaler as Kubernetes documents it. An encoder works a backlog off; a decoder holds requests in
slots. Knows no clock, and no randomness but a seeded one.
"""

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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
)

STEP_S = 1.0
EVERY_S = 5.0
BACKLOG_TARGET_S = 0.5
OFFERED_WINDOW_S = 30
Load = Callable[[float], float]
"""Replicas' worth of work that comes each second, by the time."""


class Decider(Protocol):
    """Who sets the replicas."""

    def decide(self, now: float, work: float, replicas: int) -> int:
        """The replicas to ask for."""
        ...


class BuiltIn:
    """`tandem autoscaler`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._state: State | None = None

    def decide(self, now: float, work: float, replicas: int) -> int:
        state = observe(self._state or State(replicas), Observation(now, work), replicas, self._policy)
        wanted = desired(state, self._policy)
        self._state = state if wanted == replicas else scaled(state, wanted, self._policy)
        return wanted


class Hpa:
    """A HorizontalPodAutoscaler on the metric, with the chart's behaviour: its sync, tolerance, windows and rates."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recommended: deque[tuple[float, int]] = deque()
        self._changes: list[tuple[float, int]] = []  # how many pods each change added
        self._looked_at = -math.inf

    def decide(self, now: float, work: float, replicas: int) -> int:
        if now - self._looked_at < 15.0 or replicas == 0:  # its sync period; at 0 it is off
            return replicas
        self._looked_at = now
        if not self._recommended:
            self._recommended.append((now, replicas))  # what it finds counts as recommended
        ratio = work / replicas  # an AverageValue of 1 for each pod
        wanted = replicas if abs(ratio - 1.0) <= 0.1 else needed(work)
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - self._policy.window_s:
            self._recommended.popleft()
        wanted = max(wanted, min(replicas, max(count for _, count in self._recommended)))
        if wanted > replicas:
            added = sum(count for at, count in self._changes if count > 0 and at > now - 30.0)
            before = replicas - added
            wanted = min(wanted, max(2 * before, before + 4))
        else:
            removed = sum(-count for at, count in self._changes if count < 0 and at > now - 60.0)
            wanted = max(wanted, replicas + removed - 1)
        wanted = min(max(wanted, self._policy.min_replicas), self._policy.max_replicas)
        if wanted != replicas:
            self._changes.append((now, wanted - replicas))
        return wanted


@dataclass(kw_only=True)
class Tier(ABC):
    """What every tier has: pods, and a number of them that somebody sets by a signal that comes late."""

    load: Load
    policy: Policy
    decider: Callable[[Policy], Decider] = BuiltIn
    cold_start_s: float = 45.0
    lag_s: float = 5.0
    deaths: tuple[float, ...] = ()
    replicas: int = 1
    now: float = 0.0
    starting: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    signals: list[tuple[float, float]] = field(default_factory=list)
    history: list[tuple[float, int, bool]] = field(default_factory=list)
    """Time, replicas that are asked for, and whether the target is kept."""

    def run(self, seconds: float) -> "Tier":
        self._decider = self.decider(self.policy)
        self.begin()
        while self.now < seconds:
            self._step()
        return self

    # What the kinds of tiers differ in.

    @abstractmethod
    def begin(self) -> None:
        """Have `replicas` pods that are ready."""

    @abstractmethod
    def add_pod(self) -> None:
        """One pod has started."""

    @abstractmethod
    def remove_pod(self) -> bool:
        """One pod ends, the idlest; false when none runs."""

    @abstractmethod
    def work(self, offered: float) -> None:
        """One second of what comes and what is done."""

    @abstractmethod
    def share(self) -> Share:
        """What gateways count now."""

    @abstractmethod
    def keeps_target(self) -> bool:
        """Whether what waits is within the target."""

    # What they have in common.

    def _step(self) -> None:
        for _ in [at for at in self.starting if at <= self.now]:
            self.add_pod()
        self.starting = [at for at in self.starting if at > self.now]
        if self.now in self.deaths and self.remove_pod():
            self.starting.append(self.now + self.cold_start_s)
        offered = self.load(self.now)
        self.arrived.append(offered)
        self.work(offered)
        self.signals.append((self.now, self.share().replicas))
        if self.now % EVERY_S == 0:
            self._scale()
        self.history.append((self.now, self.replicas, self.keeps_target()))
        self.now += STEP_S

    def _scale(self) -> None:
        known = [signal for at, signal in self.signals if at <= self.now - self.lag_s]
        if not known:
            return
        self.signals = [entry for entry in self.signals if entry[0] >= self.now - self.lag_s - 1]
        wanted = self._decider.decide(self.now, known[-1], self.replicas)
        if wanted > self.replicas:
            self.starting += [self.now + self.cold_start_s] * (wanted - self.replicas)
        for _ in range(self.replicas - wanted):
            if self.starting:
                self.starting.pop()
            else:
                self.remove_pod()
        self.replicas = wanted

    # What tests ask afterwards.

    def steps_down(self) -> list[tuple[float, int]]:
        """When the tier shrank, and to how many."""
        return [(at, after) for (_, before, _), (at, after, _) in itertools.pairwise(self.history) if after < before]

    def direction_changes(self) -> list[float]:
        """When the tier began to shrink after it grew, or to grow after it shrank."""
        moves = [
            (at, after - before)
            for (_, before, _), (at, after, _) in itertools.pairwise(self.history)
            if after != before
        ]
        return [at for (_, first), (at, second) in itertools.pairwise(moves) if first * second < 0]

    def kept_target(self, since: float = 0.0) -> float:
        """The part of the time in which the target was kept."""
        seen = [is_kept for at, _, is_kept in self.history if at >= since]
        return sum(seen) / len(seen)

    def least(self, since: float = 0.0, until: float = math.inf) -> int:
        return min(replicas for at, replicas, _ in self.history if since <= at <= until)

    def most(self) -> int:
        return max(replicas for _, replicas, _ in self.history)

    def settled(self, since: float) -> set[int]:
        """Every size that the tier had since then."""
        return {replicas for at, replicas, _ in self.history if at >= since}

    def check(self) -> None:
        """What holds whatever the load: limits, steps down of one and never below need, and no flapping.

        An HPA wants nothing to spare for a step down, so that it may take one back at once; not often, though.
        """
        changes = self.direction_changes()
        gaps = [after - before for before, after in itertools.pairwise(changes)]
        if self.decider is Hpa:
            assert len(changes) <= max(1.0, self.now / self.policy.window_s / 2), changes
        else:
            assert all(gap >= self.policy.window_s for gap in gaps), changes
        for (_, before, _), (_, after, _) in itertools.pairwise(self.history):
            assert after >= before - 1
            assert self.policy.min_replicas <= after <= self.policy.max_replicas
        for at, after in self.steps_down():
            came = self.arrived[max(0, int(at) - OFFERED_WINDOW_S) : int(at) + 1]
            assert after >= sum(came) / len(came), f"at {at} the tier went below what came"


@dataclass(kw_only=True)
class Encoders(Tier):
    """A backlog that all work off together; a pod that dies leaves its part to the others."""

    ready: int = 0
    backlog: float = 0.0

    def begin(self) -> None:
        self.ready = self.replicas

    def add_pod(self) -> None:
        self.ready += 1

    def remove_pod(self) -> bool:
        self.ready -= bool(self.ready)
        return True

    def work(self, offered: float) -> None:
        self.backlog = max(0.0, self.backlog + (offered - self.ready) * STEP_S)

    def share(self) -> Share:
        seen = self.arrived[-OFFERED_WINDOW_S:]
        return encoder_share(
            backlog_patches=self.backlog * 1000,
            offered_patches_per_s=sum(seen) / len(seen) * 1000,
            patches_per_s=1000,
            ready=self.ready,
            loads={},
        )

    def keeps_target(self) -> bool:
        return self.backlog <= BACKLOG_TARGET_S * max(self.ready, 1)


@dataclass
class Pod:
    """A decoder: requests by when they end, and those that wait for a slot."""

    ends: list[float] = field(default_factory=list)
    waiting: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.ends) + self.waiting


@dataclass(kw_only=True)
class Decoders(Tier):
    """Requests that stay in a slot while they are answered. One replica's worth of work fills all slots of a pod.

    A pod that ends, or dies, leaves what it had to the others, which go on with it. `held` wait while there is no pod.
    """

    slots: int = 20
    answer_s: float = 20.0
    prefill_s: float = 0.2
    seed: int = 1
    pods: list[Pod] = field(default_factory=list)
    held: int = 0

    def begin(self) -> None:
        self._draw = random.Random(self.seed)
        self.pods = [Pod() for _ in range(self.replicas)]

    def add_pod(self) -> None:
        self.pods.append(Pod())
        held, self.held = self.held, 0
        for _ in range(held):
            self._admit()

    def remove_pod(self) -> bool:
        if not self.pods:
            return False
        pod = min(self.pods, key=lambda pod: pod.num_requests)
        self.pods.remove(pod)
        for _ in range(pod.num_requests):
            self._admit()
        return True

    def work(self, offered: float) -> None:
        for _ in range(self._poisson(offered * self.slots / self.answer_s)):
            self._admit()
        for pod in self.pods:
            pod.ends = [end for end in pod.ends if end > self.now]
            # A prompt takes its time, so that a pod begins so many a second.
            count = min(pod.waiting, self.slots - len(pod.ends), int(STEP_S / self.prefill_s))
            pod.waiting -= count
            pod.ends += [self.now + self._draw.uniform(0.5, 1.5) * self.answer_s for _ in range(count)]

    def share(self) -> Share:
        loads = {
            str(number): DecoderUse(
                kv_share=0.7 * len(pod.ends) / self.slots,
                running=len(pod.ends),
                waiting=pod.waiting,
                slots=self.slots,
                wait_s=pod.waiting * self.prefill_s,
                own=pod.num_requests,
            )
            for number, pod in enumerate(self.pods)
        }
        return decoder_share(loads, held=self.held)

    def keeps_target(self) -> bool:
        """Nobody waits for longer than a second's prompts."""
        return not self.held and all(pod.waiting * self.prefill_s <= 1.0 for pod in self.pods)

    def _admit(self) -> None:
        if self.pods:
            min(self.pods, key=lambda pod: pod.num_requests).waiting += 1
        else:
            self.held += 1

    def _poisson(self, mean: float) -> int:
        count, product, least = 0, self._draw.random(), math.exp(-mean)
        while product > least:
            count, product = count + 1, product * self._draw.random()
        return count
