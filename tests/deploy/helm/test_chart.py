"""What the chart makes of values: pods that start, drain and are left alone while busy, with the rights they use."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.helm.chart import (
    EVERYTHING,
    INSECURE,
    NAMESPACE,
    RELEASE,
    TIERS,
    VALUES_FILES,
    lint,
    render,
)
from tests.deploy.helm.tools import helm
from tests.deploy.helm.values_schema import CHART

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]  # the first test may have to fetch helm

each_tier = pytest.mark.parametrize("tier", TIERS)
each_file = pytest.mark.parametrize("file", VALUES_FILES)


def test_the_values_files_are_there() -> None:
    assert len(VALUES_FILES) >= 3


@pytest.mark.parametrize("file", [None, *VALUES_FILES])
def test_the_linter_finds_nothing(file: str | None) -> None:
    done = lint(file)
    assert done.returncode == 0, done.stdout + done.stderr


# Life of a pod


@each_file
@each_tier
def test_the_grace_period_is_longer_than_the_sleep_and_the_drain(tier: str, file: str) -> None:
    pod = render(file=file).one("Deployment", tier)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    drain_s = float(args[args.index("--drain-timeout-s") + 1])
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 10


@each_tier
def test_before_kubernetes_1_30_the_image_sleeps(tier: str) -> None:
    hooks = render(INSECURE, kubernetes="1.29.0").container(tier)["lifecycle"]
    assert hooks == {"preStop": {"exec": {"command": ["sleep", "10"]}}}


@each_tier
def test_a_busy_pod_is_not_restarted_and_a_slow_start_is_waited_for(tier: str) -> None:
    container = render({**INSECURE, **{f"{each}.loadSeconds": "1234" for each in TIERS}}).container(tier)
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1234
    assert liveness["timeoutSeconds"] >= 5
    assert liveness["failureThreshold"] >= 3
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60


@each_tier
def test_alive_and_ready_are_asked_apart(tier: str) -> None:
    container = render(INSECURE).container(tier)
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    # A gateway starts before there is a decoder, so its start must not wait for one.
    started = "/health" if tier == "gateway" else "/ready"
    assert paths == {"startup": started, "readiness": "/ready", "liveness": "/health"}
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in paths} == {"http"}
    assert "http" in {port["name"] for port in container["ports"]}


def test_every_container_is_a_program_and_no_shell() -> None:
    for name, pod in render(EVERYTHING).pod_specs():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["command"][0] in {"tandem", "valkey-server", "python"}, name
            assert not {"sh", "bash", "-lc"} & set(container["command"]), name


@each_tier
def test_variables_that_kubernetes_makes_of_services_are_off(tier: str) -> None:
    """A Service called tandem would set TANDEM_PORT=tcp://..., which the gateway would read as its port."""
    assert render(INSECURE).one("Deployment", tier)["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("mode", ["none", "hpa", "keda", "builtin"])
def test_replicas_have_one_owner(mode: str) -> None:
    rendered = render({**INSECURE, "autoscaling.mode": mode})
    has_replicas = {tier: "replicas" in rendered.one("Deployment", tier)["spec"] for tier in TIERS}
    assert has_replicas == dict.fromkeys(TIERS, mode == "none")


def test_a_tier_that_is_not_scaled_keeps_its_replicas() -> None:
    rendered = render({**INSECURE, "autoscaling.mode": "hpa", "autoscaling.decoder.enabled": "false"})
    assert rendered.one("Deployment", "decoder")["spec"]["replicas"] == 2
    scaled = {item["spec"]["scaleTargetRef"]["name"] for item in rendered.of_kind("HorizontalPodAutoscaler")}
    assert scaled == {f"{RELEASE}-tandem-{tier}" for tier in ("gateway", "encoder")}


@pytest.mark.parametrize("tier", ["gateway", "decoder"])
def test_one_replica_has_no_disruption_budget(tier: str) -> None:
    budgets = render({**INSECURE, f"{tier}.replicas": "1"}).of_kind("PodDisruptionBudget")
    assert {item["metadata"]["name"] for item in budgets} == {f"{RELEASE}-tandem-{t}" for t in TIERS if t != tier}
    assert {item["spec"]["maxUnavailable"] for item in budgets} == {1}


def test_pods_spread_over_hosts_and_zones_and_never_wait_for_it() -> None:
    for tier in TIERS:
        constraints = render(INSECURE).one("Deployment", tier)["spec"]["template"]["spec"]["topologySpreadConstraints"]
        keys = {constraint["topologyKey"] for constraint in constraints}
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        assert {constraint["whenUnsatisfiable"] for constraint in constraints} == {"ScheduleAnyway"}


# Autoscaling


@pytest.mark.parametrize("mode", ["hpa", "keda"])
@pytest.mark.parametrize("tier", ["encoder", "decoder"])
def test_scaling_down_is_slow_and_scaling_up_is_not(mode: str, tier: str) -> None:
    rendered = render({**INSECURE, "autoscaling.mode": mode})
    if mode == "hpa":
        behavior = rendered.one("HorizontalPodAutoscaler", tier)["spec"]["behavior"]
    else:
        spec = rendered.one("ScaledObject", tier)["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert spec["cooldownPeriod"] >= 120
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 120
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0


def test_keda_asks_a_name_that_leads_to_gateways_which_are_not_ready_too() -> None:
    rendered = render({**INSECURE, "autoscaling.mode": "keda", "autoscaling.encoder.min": "0"})
    spec = rendered.one("ScaledObject", "encoder")["spec"]
    assert spec["minReplicaCount"] == 0
    (trigger,) = spec["triggers"]
    peers = rendered.one("Service", "gateway-peers")
    assert peers["spec"]["publishNotReadyAddresses"] is True
    url = f"http://{peers['metadata']['name']}.{NAMESPACE}.svc:8000/autoscale/v1/encoder"
    assert trigger["metadata"]["url"] == url
    assert trigger["metadata"]["valueLocation"] == "replicas"
    assert trigger["metadata"]["targetValue"] == "1"


# What a person sees


def test_the_notes_say_how_to_try_it_and_what_is_open() -> None:
    command = [str(helm()), "install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=client"]
    command += ["--set", "curve.insecure=true,networkPolicy.enabled=false,model.hub.id=owner/some-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert f"port-forward service/{RELEASE}-tandem-gateway" in notes
    assert '"model": "some-model"' in notes
    assert "every pod of the cluster may use the encoders" in notes


def test_a_release_called_like_the_chart_has_short_names(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(helm()), "template", "tandem", str(CHART), "--set", "curve.insecure=true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "name: tandem-gateway\n" in done.stdout
    assert "tandem-tandem" not in done.stdout
