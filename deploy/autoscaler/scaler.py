"""The loop of `tandem autoscaler`: ask the gateways, decide, and tell Kubernetes.

Owns one tier's state each. Decisions are `common.autoscale`'s. Whatever cannot be asked or told changes nothing now and
is tried again at the next look; a sum that misses a gateway lets a tier grow and never shrink. Runs on the event loop,
with calls to Kubernetes in threads.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from common.autoscale import Observation, Policy, Share, State, TierName, desired, needed, observe, scaled
from common.autoscale_shares import Collected
from common.kubernetes_api import KubernetesError
from common.members import Member
from common.metrics import Counter, Gauge
from deploy.autoscaler.cluster import CONFLICT, Cluster, Scale
from deploy.autoscaler.election import Election

logger = structlog.get_logger(__name__)

IS_LEADER = Gauge("tandem_autoscaler_is_leader", "1 while this autoscaler is the one that acts")
WORK = Gauge("tandem_autoscaler_work_replicas", "Work of a tier in replicas, not rounded", ["tier"])
DESIRED = Gauge("tandem_autoscaler_desired_replicas", "Replicas that a tier should have", ["tier"])
WANTED = Gauge("tandem_autoscaler_replicas", "Replicas that Kubernetes is asked for", ["tier"])
SCALINGS = Counter("tandem_autoscaler_scalings_total", "Changes of a tier's replicas", ["tier", "direction", "outcome"])
ERRORS = Counter("tandem_autoscaler_errors_total", "Calls that failed", ["call"])
COSTS_EVERY_S = 30.0


class Shares(Protocol):
    """Who asks the gateways."""

    async def collect(self, tier: TierName) -> Collected:
        """What they count of a tier."""
        ...


@dataclass
class TierScaler:
    """One tier: its Deployment, its limits, and what was seen of it. `members` names its pods, for their costs."""

    tier: TierName
    deployment: str
    policy: Policy
    state: State = field(default_factory=lambda: State(0))
    members: list[Member] = field(default_factory=list)
    costs: dict[str, int] = field(default_factory=dict)
    costs_at: float = float("-inf")
    said: tuple[int, int] | None = None


class Autoscaler:
    """All tiers. The owner awaits `run`."""

    def __init__(
        self,
        tiers: list[TierScaler],
        shares: Shares,
        cluster: Cluster,
        election: Election,
        *,
        interval_s: float,
        is_dry_run: bool = False,
        sets_costs: bool = False,
        leaves_replicas: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._shares = shares
        self._cluster = cluster
        self._election = election
        self._interval_s = interval_s
        self._is_dry_run = is_dry_run
        self._sets_costs = sets_costs and not is_dry_run
        self._leaves_replicas = leaves_replicas
        self._clock = clock
        self.looked_at = clock()
        """When the last look ended, for the liveness probe."""

    async def run(self) -> None:
        """Look again and again until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._interval_s)
        finally:
            with contextlib.suppress(KubernetesError):
                await asyncio.to_thread(self._election.resign, self._clock())

    async def look(self) -> None:
        """Decide once for each tier, and act if this one leads."""
        leads = not self._is_dry_run and await self._leads()
        IS_LEADER.set(leads)
        for tier in self._tiers:
            collected = await self._shares.collect(tier.tier)
            if self._sets_costs and self._still_leads and collected.answered:
                await self._set_costs(tier, collected.total, self._clock())
            if self._leaves_replicas:
                continue
            try:
                await self._look_at(tier, collected)
            except KubernetesError as error:
                ERRORS.labels("scale").inc()
                logger.warning("a tier could not be looked at", tier=tier.tier, reason=str(error))
        self.looked_at = self._clock()

    async def _leads(self) -> bool:
        try:
            return await asyncio.to_thread(self._election.run, self._clock())
        except KubernetesError as error:
            ERRORS.labels("lease").inc()
            logger.warning("the lease cannot be renewed", reason=str(error))
            return self._election.is_leader(self._clock())

    @property
    def _still_leads(self) -> bool:
        """Asked before each change: the answers that led to it may have taken longer than the lease."""
        return self._election.is_leader(self._clock())

    async def _look_at(self, tier: TierScaler, collected: Collected) -> None:
        scale = await asyncio.to_thread(self._cluster.scale, tier.deployment)
        WANTED.labels(tier.tier).set(scale.wanted)
        if not collected.answered:
            return  # nothing is known: nothing is changed, and the gap counts against going down
        share = collected.total
        now = self._clock()
        if tier.state.observations and scale.wanted != tier.state.replicas:
            tier.state = scaled(tier.state, scale.wanted, tier.policy)  # somebody else did it
        observation = Observation(now, share.replicas, collected.is_complete)
        tier.state = observe(tier.state, observation, scale.wanted, tier.policy)
        wanted = desired(tier.state, tier.policy)
        WORK.labels(tier.tier).set(share.replicas)
        DESIRED.labels(tier.tier).set(wanted)
        if wanted != scale.wanted and (self._is_dry_run or self._still_leads):
            await self._scale(tier, scale, wanted, share)

    async def _scale(self, tier: TierScaler, scale: Scale, wanted: int, share: Share) -> None:
        direction = "up" if wanted > scale.wanted else "down"
        reason = _reason(tier, share)
        if tier.said != (scale.wanted, wanted):
            tier.said = (scale.wanted, wanted)
            logger.info(
                "a tier would be scaled" if self._is_dry_run else "a tier is scaled",
                tier=tier.tier,
                deployment=tier.deployment,
                replicas=scale.wanted,
                desired=wanted,
                reason=reason,
            )
        if self._is_dry_run:
            SCALINGS.labels(tier.tier, direction, "dry_run").inc()
            return
        try:
            await asyncio.to_thread(self._cluster.set_scale, scale, wanted)
        except KubernetesError as error:
            SCALINGS.labels(tier.tier, direction, "conflict" if error.status == CONFLICT else "failed").inc()
            logger.warning("a tier could not be scaled", tier=tier.tier, reason=str(error))
            return
        SCALINGS.labels(tier.tier, direction, "ok").inc()
        tier.state = scaled(tier.state, wanted, tier.policy)
        WANTED.labels(tier.tier).set(wanted)
        message = f"from {scale.wanted} to {wanted} replicas: {reason}"
        try:
            await asyncio.to_thread(self._cluster.write_event, scale, f"Scaled{direction.title()}", message)
        except KubernetesError as error:
            ERRORS.labels("event").inc()
            logger.warning("an event could not be written", reason=str(error))

    async def _set_costs(self, tier: TierScaler, share: Share, now: float) -> None:
        """Tell which pods have least to do, as often as is useful and only where it changed."""
        if now - tier.costs_at < COSTS_EVERY_S:
            return
        tier.costs_at = now
        costs = deletion_costs(tier.members, share)
        for pod, cost in costs.items():
            if tier.costs.get(pod) == cost:
                continue
            try:
                await asyncio.to_thread(self._cluster.set_deletion_cost, pod, cost)
            except KubernetesError as error:
                ERRORS.labels("deletion_cost").inc()
                logger.warning("a pod's deletion cost could not be set", pod=pod, reason=str(error))
                return
            tier.costs[pod] = cost
        tier.costs = {pod: cost for pod, cost in tier.costs.items() if pod in costs}


def deletion_costs(members: list[Member], share: Share) -> dict[str, int]:
    """A cost for each pod that is known by name: its rank by load, so that small changes of load change few."""
    ordered = sorted((share.loads.get(member.endpoints[0], 0.0), member.name) for member in members if member.name)
    costs: dict[str, int] = {}
    before: tuple[float, int] | None = None
    for index, (load, pod) in enumerate(ordered):
        cost = before[1] if before is not None and before[0] == load else index * 100
        costs[pod], before = cost, (load, cost)
    return costs


def _reason(tier: TierScaler, share: Share) -> str:
    if tier.tier == "encoder":
        detail = f"{share.backlog_seconds:.2f} s of backlog, {share.offered_seconds:.2f} s of work each second"
    else:
        detail = f"occupancy {share.occupancy:.2f}, {share.held:.0f} requests held"
    return f"{detail}; that is work for {needed(share.replicas)}, of {tier.policy.min_replicas} to " + (
        f"{tier.policy.max_replicas}"
    )
