"""Rules, dashboards and monitors speak of metrics that the services have, and of pods that the chart makes."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from tests.deploy.helm.chart import EVERYTHING, INSECURE, TIERS, Rendered, render
from tests.deploy.helm.tools import promtool
from tests.deploy.helm.values_schema import CHART
from tests.docs.tables import metrics_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
# What Prometheus adds to a metric's name.
HISTOGRAM_SUFFIX = re.compile(r"_(bucket|sum|count)$")
METRIC = re.compile(r"\btandem_[a-z0-9_]+")
SELECTOR = re.compile(r"\b(tandem_[a-z0-9_]+)(?:\{([^}]*)\})?")


def known_metrics() -> dict[str, set[str]]:
    """Every metric of the code, with its labels."""
    found: dict[str, set[str]] = {}
    for package in ("common", "gateway_svc", "encoder_svc", "decoder_svc", "deploy"):
        for metric in metrics_of(package):
            assert isinstance(metric, MetricWrapperBase)
            family = next(iter(metric.describe()))
            found[family.name + ("_total" if family.type == "counter" else "")] = set(metric._labelnames)
    return found


def expressions() -> dict[str, str]:
    """Every query of the rules and the dashboards, by where it is."""
    found = {}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            found[f"rule {rule.get('alert') or rule['record']}"] = rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.name} {panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_there_is_something_to_look_at() -> None:
    assert len(DASHBOARDS) == 3
    assert len(expressions()) > 50


def test_every_metric_of_a_query_is_one_that_the_code_has_with_those_labels() -> None:
    known = known_metrics()
    from_the_scraper = {"namespace", "pod", "le"}
    for place, query in expressions().items():
        for name, labels in SELECTOR.findall(query.replace("namespace:tandem_", "namespace:")):
            base = name if name in known else HISTOGRAM_SUFFIX.sub("", name)
            assert base in known, f"{place}: {name}"
            used = set(re.findall(r"([a-z_]+)\s*[=!]", labels))
            assert used <= known[base] | from_the_scraper, f"{place}: {name} has no label {used}"


def test_the_records_that_alerts_use_are_recorded() -> None:
    recorded = {rule.removeprefix("rule ") for rule in expressions() if ":" in rule}
    for query in expressions().values():
        assert set(re.findall(r"namespace:[a-z0-9_:]+", query)) <= recorded


def test_the_metric_that_autoscalers_follow_exists() -> None:
    known = known_metrics()
    hpa = render({**INSECURE, "autoscaling.mode": "hpa"}).one("HorizontalPodAutoscaler", "encoder")
    metric = hpa["spec"]["metrics"][0]["external"]["metric"]
    assert "tier" in known[metric["name"]]
    assert metric["selector"]["matchLabels"] == {"tier": "encoder"}
    keda = {**INSECURE, "autoscaling.mode": "keda", "autoscaling.keda.trigger": "prometheus",
            "autoscaling.keda.prometheusAddress": "http://p"}  # fmt: skip
    (trigger,) = render(keda).one("ScaledObject", "decoder")["spec"]["triggers"]
    assert set(METRIC.findall(trigger["metadata"]["query"])) <= set(known)


def test_the_rules_fire_on_what_they_are_for_and_are_silent_beside_it(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).with_name("rules_test.yaml"), tmp_path)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([str(promtool()), *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_a_severity_and_a_remedy() -> None:
    tested = Path(__file__).with_name("rules_test.yaml").read_text()
    alerts = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert len(alerts) >= 10
    for alert in alerts:
        assert alert["alert"] in tested, alert["alert"]
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert len(alert["annotations"]["description"]) > 40


def test_what_is_rendered_is_what_was_tested() -> None:
    rendered = render(EVERYTHING)
    (rule,) = rendered.of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    boards = rendered.of_kind("ConfigMap")
    contents = [json.loads(text) for board in boards for text in board["data"].values()]
    assert contents == [json.loads(path.read_text()) for path in DASHBOARDS]
    assert {board["metadata"]["labels"]["grafana_dashboard"] for board in boards} == {"1"}


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes an object with these labels."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", []):
        value_is_in = labels.get(term["key"]) in term.get("values", [])
        if not {"In": value_is_in, "DoesNotExist": term["key"] not in labels}[term["operator"]]:
            return False
    return True


def pod_labels(rendered: Rendered) -> dict[str, dict[str, str]]:
    return {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]["metadata"]["labels"]
        for item in rendered.of_kind("Deployment")
    }


def test_each_pod_is_scraped_once() -> None:
    rendered = render(EVERYTHING)
    (pods,), (services,) = rendered.of_kind("PodMonitor"), rendered.of_kind("ServiceMonitor")
    taken = {tier for tier, labels in pod_labels(rendered).items() if selected(pods["spec"]["selector"], labels)}
    assert taken == {*TIERS, "autoscaler"}
    by_service = [
        item["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in rendered.of_kind("Service")
        if selected(services["spec"]["selector"], item["metadata"]["labels"])
    ]
    assert sorted(by_service) == sorted(TIERS)
