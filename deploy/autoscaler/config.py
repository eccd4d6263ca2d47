"""Settings of `tandem autoscaler`, read once in `__main__`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from common.autoscale import Policy
from common.errors import ConfigError
from common.logs import LogFormat, LogLevel
from common.settings import Port

Count = Annotated[int, Parameter(validator=Number(gte=0, lte=10_000))]
Seconds = Annotated[float, Parameter(validator=Number(gt=0, lte=86_400))]


@dataclass(frozen=True, kw_only=True)
class AutoscalerSettings:
    """Settings of `tandem autoscaler`."""

    gateways: tuple[str, ...]
    """All gateways, whose shares are added up: kubernetes:SERVICE, dns:HOST:8000 or http://host:8000. May be given
    several times."""

    encoder_deployment: str | None = None
    """Deployment of the encoders; without it they are left alone."""

    decoder_deployment: str | None = None
    """Deployment of the decoders; without it they are left alone."""

    namespace: str | None = None
    """Namespace of the deployments; by default the pod's own."""

    min_encoders: Count = 1
    """Least replicas of the encoders; 0 lets the last one go when nothing came all through the window."""

    max_encoders: Count = 10
    """Most replicas of the encoders."""

    min_decoders: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 1
    """Least replicas of the decoders."""

    max_decoders: Count = 10
    """Most replicas of the decoders."""

    window_s: Seconds = 300.0
    """Seconds that one replica less would have been enough, before one goes."""

    interval_s: Seconds = 5.0
    """Seconds between two looks."""

    dry_run: bool = False
    """Say what would be done, and do nothing."""

    deletion_cost: bool = False
    """Tell Kubernetes which pods have least to do (annotation pod-deletion-cost), so that these go first. Needs the
    right to patch pods."""

    leave_replicas: bool = False
    """Leave the replicas to another autoscaler, such as an HPA or KEDA, and set deletion costs alone."""

    encoder_service: str | None = None
    """Service whose endpoints name the encoders' pods, for --deletion-cost."""

    decoder_service: str | None = None
    """Service whose endpoints name the decoders' pods, for --deletion-cost."""

    lease_name: str = "tandem-autoscaler"
    """Lease by which several autoscalers agree on the one that acts."""

    lease_s: Seconds = 15.0
    """Seconds after which a leader that is silent is replaced."""

    kubernetes_api: str | None = None
    """URL of the Kubernetes API server; by default the pod's own, or that of the kubeconfig."""

    discovery_relist_s: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 120.0
    """Seconds after which the endpoints of a Service are listed anew, whatever a watch told."""

    http_host: str = "127.0.0.1"
    """Address of the HTTP port."""

    http_port: Port = 7300
    """Port of /health, /ready and /metrics."""

    instance_id: str | None = None
    """Name of this process in the lease; by default a random one."""

    log_level: LogLevel = "info"
    """Least severe level that is logged."""

    log_format: LogFormat = "text"
    """Lines for people, or JSON for collectors."""

    def policy(self, tier: str) -> Policy:
        """The limits of a tier. Raises ConfigError."""
        least, most = getattr(self, f"min_{tier}s"), getattr(self, f"max_{tier}s")
        if most < max(1, least):
            raise ConfigError(f"--max-{tier}s {most} must be at least 1 and at least --min-{tier}s {least}")
        return Policy(
            min_replicas=least,
            max_replicas=most,
            window_s=self.window_s,
            down_every_s=min(60.0, self.window_s),
            max_gap_s=max(30.0, 4 * self.interval_s),
        )
