"""One leader among several autoscalers, by a Lease of Kubernetes.

Owns what this candidate knows of the lease. Clocks of other machines are not trusted: a lease is old when it was not
renewed for its duration as seen here. Who cannot renew in time no longer leads. The clock is an argument; `run` and
`resign` block, and may be called in different threads: a renewal that is under way ends before the lease is given back.
"""

import threading

import structlog

from common.kubernetes_api import KubernetesError
from deploy.autoscaler.cluster import CONFLICT, Cluster, Lease

logger = structlog.get_logger(__name__)


class Election:
    """A candidate."""

    def __init__(self, cluster: Cluster, lease_name: str, identity: str, lease_s: float) -> None:
        self._cluster = cluster
        self._lease_name = lease_name
        self._identity = identity
        self._lease_s = lease_s
        self._seen: tuple[str, str] | None = None  # holder and renewal of the lease
        self._seen_at = 0.0
        self._leads_until = 0.0
        self._lock = threading.Lock()
        self._has_resigned = False

    def is_leader(self, now: float) -> bool:
        """Whether this one may act: it renewed, and not too long ago for another to have taken over."""
        return now < self._leads_until

    def run(self, now: float) -> bool:
        """Take or renew the lease if it may be taken; whether this one leads. Raises KubernetesError."""
        with self._lock:
            return not self._has_resigned and self._take_or_renew(now)

    def _take_or_renew(self, now: float) -> bool:
        lease = self._cluster.lease(self._lease_name)
        if lease is not None and not self._may_take(lease, now):
            if self.is_leader(now):
                logger.warning("another autoscaler leads now", leader=lease.holder)
            self._leads_until = 0.0
            return False
        was_leader = self.is_leader(now)
        try:
            self._cluster.write_lease(self._lease_name, self._identity, self._lease_s, lease)
        except KubernetesError as error:
            if error.status == CONFLICT:  # somebody was faster
                self._leads_until = 0.0
                return False
            raise
        self._leads_until = now + self._lease_s * 2 / 3  # ends before anybody else may begin
        if not was_leader:
            logger.info("this autoscaler leads", identity=self._identity)
        return True

    def resign(self, now: float) -> None:
        """Let another one lead at once, and never lead again. Raises KubernetesError."""
        with self._lock:
            self._has_resigned = True
            if not self.is_leader(now):
                return
            self._leads_until = 0.0
            lease = self._cluster.lease(self._lease_name)
            if lease is not None and lease.holder == self._identity:
                self._cluster.write_lease(self._lease_name, "", self._lease_s, lease)

    def _may_take(self, lease: Lease, now: float) -> bool:
        if lease.holder in ("", self._identity):
            return True
        if self._seen != (lease.holder, lease.renewals):
            self._seen, self._seen_at = (lease.holder, lease.renewals), now
        return now - self._seen_at > lease.duration_s
