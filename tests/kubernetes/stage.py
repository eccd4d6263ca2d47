"""An autoscaler with a clock, gateways and a cluster that tests move."""

from typing import Any

from prometheus_client import REGISTRY

from common.autoscale import Policy, Share, TierName
from common.autoscale_shares import Collected
from common.kubernetes_api import connect
from deploy.autoscaler.cluster import Cluster
from deploy.autoscaler.election import Election
from deploy.autoscaler.scaler import Autoscaler, TierScaler
from tests.kubernetes.fake_api import NAMESPACE, FakeApi


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeShares:
    """Gateways that count what the test says."""

    def __init__(self) -> None:
        self.work: dict[str, float] = {"encoder": 0.0, "decoder": 0.0}
        self.loads: dict[str, float] = {}
        self.asked = self.answered = 2

    async def collect(self, tier: TierName) -> Collected:
        share = Share(tier=tier, replicas=self.work[tier], loads=self.loads)
        return Collected(tier, {"g": share} if self.answered else {}, self.asked, self.answered)


class Stage:
    """An autoscaler, its gateways, its cluster and its clock."""

    def __init__(self, api: FakeApi, identity: str = "one", **options: Any) -> None:
        self.api, self.clock, self.shares = api, Clock(), FakeShares()
        self.cluster = Cluster(connect(api.url), NAMESPACE)
        self.election = Election(self.cluster, "lease", identity, 15.0)
        policy = Policy(min_replicas=1, max_replicas=8, window_s=300.0, down_every_s=60.0)
        self.tiers = [TierScaler("encoder", "encoders", policy), TierScaler("decoder", "decoders", policy)]
        self.autoscaler = Autoscaler(
            self.tiers, self.shares, self.cluster, self.election, interval_s=5.0, clock=self.clock, **options
        )

    async def look(self, times: int = 1, every_s: float = 5.0) -> None:
        for _ in range(times):
            await self.autoscaler.look()
            self.clock.now += every_s

    def replicas(self) -> tuple[int, int]:
        return tuple(self.api.scales[name]["spec"]["replicas"] for name in ("encoders", "decoders"))  # type: ignore


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
