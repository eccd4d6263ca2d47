"""How many replicas a tier should have: pure functions from what gateways count to a number.

Encoding is a problem of rate, decoding one of occupancy; both come down to replicas' worth of work, which adds up over
gateways and so serves three fronts alike: metrics that a query sums, an answer of one gateway for all, and
`tandem autoscaler`. Knows no clock, sockets or Kubernetes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

TierName = Literal["encoder", "decoder"]
Amount = Annotated[float, Meta(ge=0, le=1e12)]
MAX_LOADS = 10_000

# Encoders: work that arrives may fill so much of a replica, and a backlog should be gone after so long.
MAX_UTILISATION = 0.8
RECOVER_S = 10.0
# Decoders: what counts as a full one.
FULL_KV = 0.8
FULL_SLOTS = 0.85
FULL_WAIT_S = 1.0


class Share(Struct, frozen=True, kw_only=True):
    """What one gateway counts of a tier, or several together. Everything but `ready` and `patches_per_s` adds up.

    `replicas` is the work in replicas, not rounded. `held` requests wait because no member is there. `loads` is the
    work at each member, by its first endpoint: only its order means anything.
    """

    tier: TierName
    replicas: Amount = 0.0
    backlog_patches: Amount = 0.0
    backlog_seconds: Amount = 0.0
    offered_seconds: Amount = 0.0
    occupancy: Amount = 0.0
    held: Amount = 0.0
    patches_per_s: Amount = 0.0
    ready: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    loads: Annotated[dict[Annotated[str, Meta(max_length=256)], Amount], Meta(max_length=MAX_LOADS)] = field(
        default_factory=dict
    )


def encoder_share(
    *, backlog_patches: float, offered_patches_per_s: float, patches_per_s: float, ready: int, loads: dict[str, float]
) -> Share:
    """A gateway's share of encoding: patches that are not encoded yet, and those that come each second.

    `patches_per_s` is the rate of one encoder, above 0.
    """
    backlog_s = backlog_patches / patches_per_s
    offered_s = offered_patches_per_s / patches_per_s
    return Share(
        tier="encoder",
        replicas=offered_s / MAX_UTILISATION + backlog_s / RECOVER_S,
        backlog_patches=backlog_patches,
        backlog_seconds=backlog_s,
        offered_seconds=offered_s,
        patches_per_s=patches_per_s,
        ready=ready,
        loads=loads,
    )


@dataclass(frozen=True)
class DecoderUse:
    """What a decoder reports, and how much of it one gateway asked for.

    `kv_share` is the part of its KV cache in use, `slots` how many sequences it runs together, `wait_s` how long its
    queued prompts take to compute.
    """

    kv_share: float
    running: int
    waiting: int
    slots: int
    wait_s: float
    own: int

    @property
    def occupancy(self) -> float:
        """1 for a decoder that should have no more work; above that, for one that has too much."""
        slots = (self.running + self.waiting) / (FULL_SLOTS * self.slots) if self.slots else 0.0
        wait = min(self.wait_s / FULL_WAIT_S, self.running + self.waiting)  # one prompt cannot be shared out
        return max(self.kv_share / FULL_KV, slots, wait)

    @property
    def own_occupancy(self) -> float:
        """The gateway's part of it, by requests: over all gateways the parts make the whole."""
        total = max(self.running + self.waiting, self.own)
        return self.occupancy * self.own / total if total else 0.0


def decoder_share(loads: dict[str, DecoderUse], *, held: int) -> Share:
    """A gateway's share of decoding. `held` of its requests wait, since no decoder is there."""
    occupancy = sum(load.own_occupancy for load in loads.values())
    slots = max((load.slots for load in loads.values()), default=0)
    return Share(
        tier="decoder",
        replicas=occupancy + (held / (FULL_SLOTS * slots) if slots else min(held, 1)),
        occupancy=occupancy,
        held=held,
        ready=len(loads),
        loads={name: float(load.own) for name, load in loads.items()},
    )


def total(tier: TierName, shares: Iterable[Share]) -> Share:
    """The shares of several gateways together; zeros for none."""
    shares = list(shares)
    loads: dict[str, float] = {}
    for share in shares:
        for name, load in share.loads.items():
            loads[name] = loads.get(name, 0.0) + load
    rates = [share.patches_per_s for share in shares if share.patches_per_s]
    return Share(
        tier=tier,
        replicas=sum(share.replicas for share in shares),
        backlog_patches=sum(share.backlog_patches for share in shares),
        backlog_seconds=sum(share.backlog_seconds for share in shares),
        offered_seconds=sum(share.offered_seconds for share in shares),
        occupancy=sum(share.occupancy for share in shares),
        held=sum(share.held for share in shares),
        patches_per_s=sum(rates) / len(rates) if rates else 0.0,
        ready=max((share.ready for share in shares), default=0),
        loads=loads,
    )


def needed(work: float) -> int:
    """Replicas for so much work, before limits: any work at all needs one."""
    return math.ceil(work - 1e-9) if work > 0 else 0


@dataclass(frozen=True)
class Policy:
    """Limits and pace. Up at once and by as many as are needed; down one at a time, when one fewer would have been
    enough with `down_headroom` to spare all through the window."""

    min_replicas: int = 1
    max_replicas: int = 10
    window_s: float = 300.0
    down_every_s: float = 60.0
    down_headroom: float = 0.8
    up_tolerance: float = 0.05
    max_gap_s: float = 30.0
    """A longer time without an observation says nothing of what happened in it."""


@dataclass(frozen=True)
class Observation:
    """The work at one time; incomplete when a gateway did not tell its share, so that there may be more."""

    at: float
    work: float
    is_complete: bool = True


@dataclass(frozen=True)
class State:
    """What `desired` decides from. `replicas` is what is asked for now, so replicas that still start are counted.

    `window_factor` grows when a step down had to be taken back, so that a load that comes and goes with a period near
    the window does not move the tier for ever.
    """

    replicas: int
    observations: Sequence[Observation] = ()
    last_down_at: float = -math.inf
    last_up_at: float = -math.inf
    window_factor: int = 1


MAX_WINDOW_FACTOR = 4


def observe(state: State, observation: Observation, replicas: int, policy: Policy) -> State:
    """The state with one more observation, and the replicas that are asked for now."""
    kept = state.observations
    if kept and observation.at - kept[-1].at > policy.max_gap_s:
        kept = ()
    longest = policy.window_s * MAX_WINDOW_FACTOR + 2 * policy.max_gap_s
    if kept and kept[0].at < observation.at - longest:
        kept = [seen for seen in kept if seen.at >= observation.at - longest]
    return replace(state, replicas=replicas, observations=(*kept, observation))


def desired(state: State, policy: Policy) -> int:
    """How many replicas to ask for now."""
    current = min(max(state.replicas, policy.min_replicas), policy.max_replicas)
    if not state.observations:
        return current
    now, work = state.observations[-1].at, state.observations[-1].work
    if needed(work) > current and work > current * (1 + policy.up_tolerance):
        return min(needed(work), policy.max_replicas)
    if current > policy.min_replicas and _may_go_down(state, policy, current, now):
        return current - 1
    return current


def _may_go_down(state: State, policy: Policy, current: int, now: float) -> bool:
    window_s = policy.window_s * state.window_factor
    if now - state.last_down_at < policy.down_every_s or now - state.last_up_at < window_s:
        return False
    seen = [entry for entry in state.observations if entry.at >= now - window_s]
    is_covered = now - state.observations[0].at >= window_s
    if not is_covered or not all(entry.is_complete for entry in seen):
        return False
    highest = max(entry.work for entry in seen)
    return highest == 0.0 if current == 1 else highest <= policy.down_headroom * (current - 1)


def scaled(state: State, replicas: int, policy: Policy) -> State:
    """The state after the tier was told another number."""
    now = state.observations[-1].at if state.observations else 0.0
    if replicas < state.replicas:
        was_right = now - state.last_up_at >= 2 * policy.window_s * state.window_factor
        factor = max(1, state.window_factor // 2) if was_right else state.window_factor
        return replace(state, replicas=replicas, last_down_at=now, window_factor=factor)
    is_regret = now - state.last_down_at < policy.window_s
    factor = min(MAX_WINDOW_FACTOR, 2 * state.window_factor) if is_regret else state.window_factor
    return replace(state, replicas=replicas, last_up_at=now, window_factor=factor)
