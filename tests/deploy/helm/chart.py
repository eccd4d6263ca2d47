"""The chart as the tests see it: rendered by the real helm, as objects of the Kubernetes API.

Owns the call to helm and what the tests ask of its result. A rendering is kept for the process, since many tests look
at the same one.
"""

import functools
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.helm.tools import helm
from tests.deploy.helm.values_schema import CHART

FRACTION = re.compile(r"[0-9]+\.[0-9]+")
RELEASE = "demo"
NAMESPACE = "tandem"
TIERS = ("gateway", "encoder", "decoder")
VALUES_FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))
# Everything on that is optional, so that a test of all objects meets them.
EVERYTHING: dict[str, str] = {
    "curve.existingSecret": "keys",
    "gateway.apiKeys.existingSecret": "api-keys",
    "valkey.existingSecret": "cache",
    "model.hub.tokenSecret": "hub",
    "ingress.enabled": "true",
    "ingress.tlsSecret": "tls",
    "httpRoute.enabled": "true",
    "httpRoute.parentRefs[0].name": "entry",
    "autoscaling.mode": "builtin",
    "autoscaling.builtin.deletionCost": "true",
    "monitoring.podMonitor.enabled": "true",
    "monitoring.serviceMonitor.enabled": "true",
    "monitoring.rules.enabled": "true",
    "monitoring.dashboards.enabled": "true",
}
INSECURE = {"curve.insecure": "true"}


@dataclass(frozen=True)
class Rendered:
    """What helm made of some values."""

    objects: tuple[dict[str, Any], ...]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """All objects of some kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def one(self, kind: str, component: str) -> dict[str, Any]:
        """The object of a kind that a component has."""
        (found,) = [item for item in self.of_kind(kind) if item["metadata"]["name"] == f"{RELEASE}-tandem-{component}"]
        return found

    def pod_specs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and pod of all that run pods."""
        for item in self.of_kind("Deployment", "Pod"):
            spec = item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]
            yield item["metadata"]["name"], spec

    def container(self, component: str) -> dict[str, Any]:
        """The main container of a component."""
        container: dict[str, Any] = self.one("Deployment", component)["spec"]["template"]["spec"]["containers"][0]
        return container


class ChartRefused(Exception):
    """helm would not render; the text is what it said."""


def render(values: Mapping[str, str] | None = None, *, file: str | None = None, kubernetes: str = "1.34.0") -> Rendered:
    """The chart with some values set and, below them, a values file of its folder. Raises ChartRefused."""
    return _render(tuple(sorted((values or {}).items())), file, kubernetes)


@functools.cache
def _render(values: tuple[tuple[str, str], ...], file: str | None, kubernetes: str) -> Rendered:
    return Rendered(
        tuple(item for item in yaml.load_all(_template(values, file, kubernetes), yaml.CSafeLoader) if item)
    )


def _template(values: tuple[tuple[str, str], ...], file: str | None, kubernetes: str) -> str:
    command = [str(helm()), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", kubernetes]
    if file is not None:
        command += ["--values", str(CHART / file)]
    for key, value in values:
        # `--set` takes 900.5 for a text.
        command += ["--set-json" if FRACTION.fullmatch(value) else "--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ChartRefused(done.stderr)
    return done.stdout


def lint(file: str | None = None, folder: Path = CHART) -> "subprocess.CompletedProcess[str]":
    """`helm lint --strict`."""
    command = [str(helm()), "lint", "--strict", str(folder), *(["--values", str(folder / file)] if file else [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
