"""What the autoscaler asks of Kubernetes: scales, a lease, events, and pods' deletion costs.

Owns the objects' shapes and paths. A conflict is told as what it is: somebody else wrote, read again. Every method
blocks: call them from a thread.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from common.kubernetes_api import KubernetesError, call

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONFLICT = 409
NOT_FOUND = 404
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True)
class Scale:
    """Replicas of a Deployment: what is asked for, what there is, and the version that a change must name."""

    name: str
    wanted: int
    present: int
    version: str
    uid: str


@dataclass(frozen=True)
class Lease:
    """Who leads, and since which renewal. `version` is that a change must name."""

    holder: str
    renewals: str
    duration_s: int
    version: str
    transitions: int


class Cluster:
    """One namespace."""

    def __init__(self, api: "ApiClient", namespace: str) -> None:
        self._api = api
        self._namespace = namespace

    def scale(self, deployment: str) -> Scale:
        """The replicas of a Deployment. Raises KubernetesError."""
        answer = call(self._api, "GET", self._scale_path(deployment))
        return _scale_of(deployment, answer)

    def set_scale(self, scale: Scale, replicas: int) -> Scale:
        """Ask for other replicas. Raises KubernetesError; with status 409 when the scale has changed since."""
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": scale.name, "namespace": self._namespace, "resourceVersion": scale.version},
            "spec": {"replicas": replicas},
        }
        return _scale_of(scale.name, call(self._api, "PUT", self._scale_path(scale.name), body=body))

    def lease(self, name: str) -> Lease | None:
        """The lease, or None. Raises KubernetesError."""
        try:
            answer = call(self._api, "GET", f"{self._leases}/{name}")
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        spec = _dict(_dict(answer).get("spec"))
        version = _version_of(answer, "Lease", name)
        duration = spec.get("leaseDurationSeconds")
        transitions = spec.get("leaseTransitions")
        return Lease(
            holder=str(spec.get("holderIdentity") or ""),
            renewals=str(spec.get("renewTime") or ""),
            duration_s=duration if isinstance(duration, int) and duration > 0 else 1,
            version=version,
            transitions=transitions if isinstance(transitions, int) else 0,
        )

    def write_lease(self, name: str, holder: str, duration_s: float, before: Lease | None) -> None:
        """Take, keep or, with an empty holder, leave the lease. Raises KubernetesError: 409 when another was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new_holder = before is None or before.holder != holder
        body: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(duration_s)),
                "renewTime": now,
                "leaseTransitions": (before.transitions if before is not None else 0) + int(is_new_holder),
                **({"acquireTime": now} if is_new_holder else {}),
            },
        }
        if before is None:
            call(self._api, "POST", self._leases, body=body)
        else:
            body["metadata"]["resourceVersion"] = before.version
            call(self._api, "PUT", f"{self._leases}/{name}", body=body)

    def write_event(self, scale: Scale, reason: str, message: str, kind: str = "Normal") -> None:
        """An event on a Deployment. Raises KubernetesError."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{scale.name}.", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": scale.name,
                "namespace": self._namespace,
                "uid": scale.uid,
            },
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "source": {"component": "tandem-autoscaler"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        call(self._api, "POST", f"/api/v1/namespaces/{self._namespace}/events", body=body)

    def set_deletion_cost(self, pod: str, cost: int) -> None:
        """How unwelcome the end of a pod is. Raises KubernetesError."""
        body = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}"
        call(self._api, "PATCH", path, body=body, content_type=_MERGE_PATCH)

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    def _scale_path(self, deployment: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{deployment}/scale"


def _scale_of(name: str, answer: Any) -> Scale:
    version = _version_of(answer, "Scale", name)
    metadata, spec, status = (_dict(_dict(answer).get(part)) for part in ("metadata", "spec", "status"))
    wanted, present = spec.get("replicas", 0), status.get("replicas", 0)  # Kubernetes leaves out a zero
    if not all(type(count) is int and count >= 0 for count in (wanted, present)):
        raise KubernetesError(f"the scale of {name} has no number of replicas")
    return Scale(name, wanted, present, version, str(metadata.get("uid") or ""))


def _version_of(answer: Any, kind: str, name: str) -> str:
    """The version of an object of a kind. Raises KubernetesError for any other answer: what nobody said is not zero,
    and a change that names no version would overwrite others' changes."""
    version = _dict(_dict(answer).get("metadata")).get("resourceVersion")
    if _dict(answer).get("kind") != kind or not isinstance(version, str) or not version:
        raise KubernetesError(f"the answer for {name} is no {kind} with a version")
    return version


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
