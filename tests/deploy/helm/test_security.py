"""What pods may do, who may speak with whom, and that no secret is made or shown: no more than is used."""

from typing import Any

import pytest

from tests.deploy.helm.chart import (
    EVERYTHING,
    INSECURE,
    NAMESPACE,
    RELEASE,
    TIERS,
    ChartRefused,
    Rendered,
    render,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]


def restricted_violations(pod: dict[str, Any]) -> list[str]:
    """What of a pod the `restricted` Pod Security Standard would refuse, and a root file system that can be written."""
    found = []
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser", 0) == 0:
        found.append("runs as root")
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    found += [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [f"volume {v['name']}" for v in pod.get("volumes", []) if not set(v) - {"name"} <= allowed]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.append(f"{container['name']} may gain privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append(f"{container['name']} keeps capabilities")
        if own.get("readOnlyRootFilesystem") is not True:
            found.append(f"{container['name']} writes its image")
    return found


@pytest.mark.parametrize("mode", ["hpa", "builtin"])
def test_every_pod_meets_the_restricted_standard(mode: str) -> None:
    pods = dict(render({**EVERYTHING, "autoscaling.mode": mode}).pod_specs())
    assert len(pods) == 6  # with hpa the autoscaler marks pods
    assert {name: restricted_violations(pod) for name, pod in pods.items()} == {name: [] for name in pods}


def test_a_host_path_is_what_the_standard_would_refuse() -> None:
    values = {**INSECURE, "model.source": "hostPath", "model.hostPath.path": "/srv/model", "model.name": "m"}
    pod = render(values).one("Deployment", "decoder")["spec"]["template"]["spec"]
    assert restricted_violations(pod) == ["volume models"]


def test_only_those_who_read_endpoint_slices_get_a_token() -> None:
    for mode, readers in (("kubernetes", {"gateway", "decoder"}), ("dns", set())):
        rendered = render({**INSECURE, "discovery.mode": mode})
        pods = {tier: rendered.one("Deployment", tier)["spec"]["template"]["spec"] for tier in TIERS}
        assert {tier for tier, pod in pods.items() if pod["automountServiceAccountToken"]} == readers
        roles = rendered.of_kind("Role")
        assert {role["metadata"]["name"] for role in roles} == {f"{RELEASE}-tandem-{tier}" for tier in readers}
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        assert all(role["rules"] == [rule] for role in roles)


def test_the_autoscaler_may_scale_two_deployments_and_hold_one_lease() -> None:
    rules = render({**INSECURE, "autoscaling.mode": "builtin"}).one("Role", "autoscaler")["rules"]
    by_resource = [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in rules]
    lease = f"{RELEASE}-tandem-autoscaler"
    assert by_resource == [
        (["deployments/scale"], [f"{RELEASE}-tandem-encoder", f"{RELEASE}-tandem-decoder"], ["get", "update"]),
        (["events"], None, ["create"]),
        (["leases"], None, ["create"]),
        (["leases"], [lease], ["get", "update"]),
        (["endpointslices"], None, ["get", "list", "watch"]),
    ]


def test_patching_pods_is_allowed_only_for_deletion_costs() -> None:
    rules = render({**INSECURE, "autoscaling.mode": "builtin", "autoscaling.builtin.deletionCost": "true"})
    assert rules.one("Role", "autoscaler")["rules"][-1] == {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["patch"],
    }


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_beside_another_autoscaler_it_may_mark_pods_and_scale_nothing(mode: str) -> None:
    values = {**INSECURE, "autoscaling.mode": mode, "autoscaling.builtin.deletionCost": "true"}
    rules = render(values).one("Role", "autoscaler")["rules"]
    assert [rule["resources"] for rule in rules] == [["leases"], ["leases"], ["endpointslices"], ["pods"]]
    names = [item["metadata"]["name"] for item in render({**INSECURE, "autoscaling.mode": mode}).objects]
    assert not [name for name in names if name.endswith("-autoscaler")]


def test_no_role_reaches_beyond_the_namespace_and_no_secret_is_made() -> None:
    rendered = render(EVERYTHING)
    assert rendered.of_kind("ClusterRole", "ClusterRoleBinding", "Secret") == []
    assert {item["metadata"]["namespace"] for item in rendered.objects} == {NAMESPACE}


def test_secrets_are_named_and_never_on_a_command_line() -> None:
    for name, pod in render(EVERYTHING).pod_specs():
        for container in pod["containers"]:
            for variable in container.get("env", []):
                is_secret = any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "AUTH"))
                value = variable.get("value", "")
                assert not is_secret or value == "" or value.startswith("$("), (name, variable)


def test_without_keys_the_chart_asks_for_a_decision() -> None:
    with pytest.raises(ChartRefused, match=r"curve\.existingSecret.*curve\.insecure=true"):
        render()


def test_with_keys_no_tier_binds_without_them() -> None:
    rendered = render({"curve.existingSecret": "keys", "curve.key": "k"})
    for tier in TIERS:
        args = rendered.container(tier)["args"]
        assert "--allow-insecure-bind" not in args
        assert args[args.index("--curve-key-file") + 1] == "/etc/tandem/curve/k"


# Network


def allowed_flows(rendered: Rendered) -> set[tuple[str, str, int]]:
    """Who may connect to whom inside the release, by both ends' policies: (from, to, port)."""
    policies = {
        item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: item["spec"]
        for item in rendered.of_kind("NetworkPolicy")
    }

    def opens(rules: list[dict[str, Any]], side: str, other: str, port: int) -> bool:
        return any(
            port in {p["port"] for p in rule["ports"]}
            and (side not in rule or any(component_of(peer) == other for peer in rule[side]))
            for rule in rules
        )

    return {
        (source, target, port)
        for source in policies
        for target in policies
        for port in (6379, 7100, 7101, 7102, 7200, 7201, 7300, 8000)
        if opens(policies[source].get("egress", []), "to", target, port)
        and opens(policies[target].get("ingress", []), "from", source, port)
    }


def component_of(peer: dict[str, Any]) -> str | None:
    component: str | None = peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
    return component


def test_the_tiers_reach_what_they_need_and_nothing_else() -> None:
    assert allowed_flows(render({**EVERYTHING, "discovery.mode": "dns"})) == {
        ("gateway", "gateway", 8000),
        ("gateway", "encoder", 7101),
        ("gateway", "encoder", 7102),
        ("gateway", "decoder", 7201),
        ("decoder", "encoder", 7102),
        ("gateway", "valkey", 6379),
        ("encoder", "valkey", 6379),
        ("decoder", "valkey", 6379),
        ("autoscaler", "gateway", 8000),
    }


def test_every_pod_of_the_fleet_has_a_policy() -> None:
    rendered = render(EVERYTHING)
    pods = {name.removeprefix(f"{RELEASE}-tandem-") for name, _ in rendered.pod_specs()} - {"test"}
    assert {
        item["metadata"]["name"].removeprefix(f"{RELEASE}-tandem-") for item in rendered.of_kind("NetworkPolicy")
    } == pods


def test_media_is_fetched_from_the_world_and_not_from_the_cluster() -> None:
    egress = render(INSECURE).one("NetworkPolicy", "gateway")["spec"]["egress"]
    (media,) = [rule for rule in egress if any("ipBlock" in peer for peer in rule.get("to", []))]
    (block,) = media["to"]
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["ipBlock"]["except"])
