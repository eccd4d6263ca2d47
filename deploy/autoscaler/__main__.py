"""`tandem autoscaler`: reads the settings, and keeps encoders and decoders at the size that their work needs."""

import asyncio
import uuid
from functools import partial
from typing import Annotated

import structlog
from cyclopts import Parameter

from common.autoscale import TierName
from common.autoscale_shares import ShareCollector
from common.discovery import DECODERS, ENCODERS, GATEWAYS, KUBERNETES, KubernetesOptions, Tier, member_source
from common.errors import ConfigError
from common.kubernetes_api import connect, own_namespace
from common.logs import configure_logs
from common.members import Member, MemberSource
from common.service import Service, run_service
from common.settings import command_line
from deploy.autoscaler.cluster import Cluster
from deploy.autoscaler.config import AutoscalerSettings
from deploy.autoscaler.election import Election
from deploy.autoscaler.scaler import Autoscaler, TierScaler

logger = structlog.get_logger(__name__)


class AutoscalerServer:
    """The loop and what it is fed with, as `common.service` runs it."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        collector: ShareCollector,
        pods: list[tuple[TierScaler, MemberSource]],
        stalled_after_s: float,
    ) -> None:
        self._autoscaler = autoscaler
        self._collector = collector
        self._pods = pods
        self._stalled_after_s = stalled_after_s
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether it was told to stop."""
        return self._is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether a look takes longer than any should."""
        now = asyncio.get_running_loop().time()
        return now - self._autoscaler.looked_at > self._stalled_after_s

    async def run(self) -> None:
        """Scale until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collector.run())
            for tier, source in self._pods:
                tasks.create_task(source.run(partial(_set_members, tier)))
            tasks.create_task(self._autoscaler.run())

    async def drain(self) -> None:
        """Nothing is under way that must end; the lease is given back when `run` is cancelled."""
        self._is_draining = True


def _set_members(tier: TierScaler, members: "list[Member] | tuple[Member, ...]") -> None:
    tier.members = list(members)


async def open_autoscaler(settings: AutoscalerSettings) -> AutoscalerServer:
    """Connect. Raises ConfigError."""
    if settings.leave_replicas and not settings.deletion_cost:
        raise ConfigError("--leave-replicas leaves nothing to do without --deletion-cost")
    tiers = _tiers(settings)
    options = KubernetesOptions(settings.kubernetes_api, settings.discovery_relist_s)
    api = await asyncio.to_thread(connect, settings.kubernetes_api)
    cluster = Cluster(api, own_namespace(settings.namespace))
    identity = settings.instance_id or f"autoscaler-{uuid.uuid4().hex[:12]}"
    collector = ShareCollector(member_source(settings.gateways, GATEWAYS, options))
    autoscaler = Autoscaler(
        tiers,
        collector,
        cluster,
        Election(cluster, settings.lease_name, identity, settings.lease_s),
        interval_s=settings.interval_s,
        is_dry_run=settings.dry_run,
        sets_costs=settings.deletion_cost,
        leaves_replicas=settings.leave_replicas,
    )
    return AutoscalerServer(autoscaler, collector, _pods(settings, tiers, options), 60.0 + 10 * settings.interval_s)


def _tiers(settings: AutoscalerSettings) -> list[TierScaler]:
    names: list[tuple[TierName, str | None]] = [
        ("encoder", settings.encoder_deployment),
        ("decoder", settings.decoder_deployment),
    ]
    tiers = [TierScaler(tier, deployment, settings.policy(tier)) for tier, deployment in names if deployment]
    if not tiers:
        raise ConfigError("nothing to scale: give --encoder-deployment or --decoder-deployment, or both")
    return tiers


def _pods(
    settings: AutoscalerSettings, tiers: list[TierScaler], options: KubernetesOptions
) -> list[tuple[TierScaler, MemberSource]]:
    """Where the names of a tier's pods come from, when their costs are set."""
    if not settings.deletion_cost:
        return []
    namespace = own_namespace(settings.namespace)
    services: dict[TierName, tuple[str | None, Tier]] = {
        "encoder": (settings.encoder_service, ENCODERS),
        "decoder": (settings.decoder_service, DECODERS),
    }
    found = []
    for tier in tiers:
        service, addressing = services[tier.tier]
        if service is None:
            raise ConfigError(f"--deletion-cost needs --{tier.tier}-service, whose endpoints name the pods")
        found.append((tier, member_source([f"{KUBERNETES}{namespace}/{service}"], addressing, options)))
    return found


def autoscaler(settings: Annotated[AutoscalerSettings, Parameter(name="*")]) -> None:
    """Keep the encoders and decoders of a Kubernetes namespace at the size that their work needs.

    It asks the gateways for the work of each tier, and sets the replicas of two Deployments: up at once, down one at a
    time after a quiet window. Of several only one acts. Use it where there is neither KEDA nor an adapter for HPA.
    Beside one of them, with --leave-replicas, it marks the idlest pods as those to go first.
    """
    configure_logs("autoscaler", settings.log_level, settings.log_format)
    facts: dict[str, object] = {"role": "autoscaler", "dry_run": settings.dry_run}
    service = Service(lambda: open_autoscaler(settings), facts)
    asyncio.run(run_service(service, settings.http_host, settings.http_port, drain_timeout_s=5.0))


app = command_line("autoscaler", autoscaler)

if __name__ == "__main__":
    app.meta()
