"""Where checkpoints, devices and the cache come from, and which values are refused because they cannot work."""

from typing import Any

import pytest
import yaml

from tests.deploy.helm.chart import INSECURE, TIERS, VALUES_FILES, ChartRefused, Rendered, render
from tests.deploy.helm.values_schema import CHART
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

each_tier = pytest.mark.parametrize("tier", TIERS)


def model_mount(rendered: Rendered, tier: str) -> tuple[str, dict[str, Any] | None]:
    """What --model gets, and the volume behind it."""
    pod = rendered.one("Deployment", tier)["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    volumes = [volume for volume in pod["volumes"] if volume["name"] == "models"]
    return args[args.index("--model") + 1], volumes[0] if volumes else None


@each_tier
def test_a_hub_id_is_fetched_by_role_before_the_service_starts(tier: str) -> None:
    rendered = render(
        {**INSECURE, "model.hub.id": "owner/name", "model.hub.revision": "abc", "model.hub.tokenSecret": "t"}
    )
    pod = rendered.one("Deployment", tier)["spec"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert fetch["command"] == ["tandem", "fetch"]
    assert fetch["args"] == ["--model", "owner/name", "--revision", "abc", "--role", tier]
    assert fetch["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "t", "key": "token"}}
    # The service itself needs neither the hub nor its token.
    variables = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in variables
    assert model_mount(rendered, tier)[0] == "owner/name"


def test_the_other_sources_are_folders_that_are_only_read() -> None:
    pvc = render({**INSECURE, "model.source": "pvc", "model.pvc.claimName": "c", "model.pvc.path": "/a/b/"})
    assert model_mount(pvc, "encoder") == (
        "/models/a/b",
        {"name": "models", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
    )
    image = render({**INSECURE, "model.source": "image", "model.image.reference": "r:1", "model.name": "m"})
    assert model_mount(image, "decoder") == (
        "/models",
        {"name": "models", "image": {"reference": "r:1", "pullPolicy": "IfNotPresent"}},
    )
    assert model_mount(render({**INSECURE, "model.source": "bundled"}), "decoder")[1] is None
    for rendered in (pvc, image):
        (mount,) = [item for item in rendered.container("encoder")["volumeMounts"] if item["name"] == "models"]
        assert mount["readOnly"] is True
        assert "initContainers" not in rendered.one("Deployment", "encoder")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("values", "kubernetes", "message"),
    [
        ({"model.source": "pvc", "model.name": "m"}, "1.34.0", "model.pvc.claimName is needed"),
        ({"model.source": "pvc", "model.pvc.claimName": "c"}, "1.34.0", "model.name is needed"),
        ({"model.source": "hostPath", "model.name": "m"}, "1.34.0", "model.hostPath.path is needed"),
        ({"model.source": "image", "model.image.reference": "r", "model.name": "m"}, "1.30.0", "needs Kubernetes 1.31"),
        ({"autoscaling.mode": "hpa", "autoscaling.encoder.min": "0"}, "1.34.0", "use mode keda or builtin"),
        (
            {"autoscaling.mode": "keda", "autoscaling.keda.trigger": "prometheus"},
            "1.34.0",
            "prometheusAddress is needed",
        ),
        ({"autoscaling.encoder.min": "5"}, "1.34.0", "autoscaling.encoder.min is 5, above autoscaling.encoder.max"),
        ({"autoscaling.gateway.max": "1"}, "1.34.0", "autoscaling.gateway.min is 2, above autoscaling.gateway.max"),
        ({"redis.url": "redis://cache:6379/0"}, "1.34.0", "set valkey.enabled=false"),
        ({"redis.existingSecret": "s"}, "1.34.0", "set valkey.enabled=false"),
        ({"httpRoute.enabled": "true"}, "1.34.0", "httpRoute.parentRefs is needed"),
        ({"decoder.gpu.count": "4"}, "1.34.0", "decoder.gpu.count is 4, but a pod uses 1"),
        ({"decoder.gpu.count": "1", "decoder.settings.tp": "2"}, "1.34.0", "decoder.gpu.count is 1, but a pod uses 2"),
        ({"encoder.gpu.count": "2"}, "1.34.0", "encoder.gpu.count is 2, but a pod uses 1"),
        ({}, "1.28.0", "incompatible with Kubernetes"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_remedy(
    values: dict[str, str], kubernetes: str, message: str
) -> None:
    with pytest.raises(ChartRefused, match=message):
        render({**INSECURE, **values}, kubernetes=kubernetes)


def test_devices_are_asked_for_and_cores_are_those_of_the_pod() -> None:
    rendered = render(
        {
            **INSECURE,
            "decoder.gpu.count": "4",
            "decoder.settings.tp": "4",
            "decoder.runtimeClassName": "nvidia",
            "decoder.sharedMemory": "8Gi",
        }
    )
    assert rendered.container("decoder")["args"][-2:] == ["--tp", "4"]
    pod = rendered.one("Deployment", "decoder")["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    threads = {
        tier: [item for item in rendered.container(tier)["env"] if item["name"] == "TANDEM_THREADS"] for tier in TIERS
    }
    assert [len(threads[tier]) for tier in TIERS] == [0, 1, 0]
    assert threads["encoder"][0]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"


def test_a_cache_of_ones_own_takes_the_place_of_the_charts() -> None:
    for values, expected in (
        ({"redis.url": "rediss://cache:6380/0"}, {"name": "TANDEM_REDIS", "value": "rediss://cache:6380/0"}),
        (
            {"redis.existingSecret": "s"},
            {"name": "TANDEM_REDIS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "url"}}},
        ),
    ):
        rendered = render({**INSECURE, "valkey.enabled": "false", **values})
        assert len(rendered.of_kind("Deployment")) == 3
        assert all(expected in rendered.container(tier)["env"] for tier in TIERS)
        ports = {
            p["port"] for rule in rendered.one("NetworkPolicy", "encoder")["spec"]["egress"] for p in rule["ports"]
        }
        assert ports == {53, 443, 6380 if "redis.url" in values else 6379}


@pytest.mark.parametrize("file", VALUES_FILES)
def test_what_a_values_file_names_is_made_in_the_docs_before_it_is_installed(file: str) -> None:
    values = yaml.safe_load((CHART / file).read_text())
    model = values["model"]
    secrets = [part.get("existingSecret") for part in (values["curve"], values["valkey"])]
    secrets.append(values["gateway"].get("apiKeys", {}).get("existingSecret"))
    docs = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    for secret in filter(None, secrets):
        assert f"kubectl create secret generic {secret} --from-" in docs
    if claim := model.get("hub", {}).get("existingClaim"):
        assert f"metadata: {{name: {claim}}}" in docs
    if claim := model.get("pvc", {}).get("claimName"):
        assert f"`{claim}`" in docs


def test_a_fleet_for_text_has_no_encoder() -> None:
    rendered = render({**INSECURE, "encoder.enabled": "false"})
    assert not [item for item in rendered.objects if item["metadata"]["name"].endswith("-encoder")]
    assert "--encoders" not in rendered.container("gateway")["args"]
