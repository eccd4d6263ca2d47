"""The schemas: the API's in every release of Kubernetes, those of custom resources, and that of the chart's values."""

import functools
import json
import os
import subprocess
import zipfile
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.deploy.helm.chart import EVERYTHING, INSECURE, VALUES_FILES, ChartRefused, Rendered, render
from tests.deploy.helm.tools import checkov, custom_resources, kubernetes_schemas
from tests.deploy.helm.values_schema import CHART, SCHEMA_FILE, schema_text

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

BASE = "http://kubernetes/"
RELEASES = [f"1.{minor}" for minor in range(29, 38)]
# Custom resources, whose schemas are their projects'.
CUSTOM_KINDS = {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


# The API's


@functools.cache
def schema_archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(kubernetes_schemas())


@functools.cache
def _json(release: str, name: str) -> Any:
    return json.loads(
        schema_archive().read(f"kubernetes_validate/kubernetes-json-schema/v{release}.0-local-strict/{name}")
    )


@functools.cache
def definitions(release: str) -> jsonschema_rs.Registry:
    """What the schemas of a release refer to; read once, for it is large."""
    return jsonschema_rs.Registry([(f"{BASE}_definitions.json", _json(release, "_definitions.json"))])


@functools.cache
def validator(release: str, kind: str, api_version: str) -> jsonschema_rs.Validator:
    """A strict validator: a field that the release does not know is an error."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    schema = {"$id": f"{BASE}{name}.json", **_json(release, f"{name}.json")}
    return jsonschema_rs.Draft202012Validator(schema, registry=definitions(release))


def errors_of(rendered: Rendered, release: str) -> list[str]:
    return [
        f"{item['kind']} {item['metadata']['name']} at {error.instance_path}: {error.message}"
        for item in rendered.objects
        if item["kind"] not in CUSTOM_KINDS
        for error in validator(release, item["kind"], item["apiVersion"]).iter_errors(item)
    ]


def rendered_for(release: str, values: dict[str, str], file: str | None = None) -> Rendered:
    # Releases that the chart treats alike share one rendering.
    return render(values, file=file, kubernetes="1.29.0" if release == "1.29" else "1.37.0")


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_is_valid_in_every_release(release: str) -> None:
    for file in VALUES_FILES:
        assert errors_of(rendered_for(release, {}, file), release) == [], file
    for mode in ("hpa", "keda", "builtin"):
        assert errors_of(rendered_for(release, {**EVERYTHING, "autoscaling.mode": mode}), release) == [], mode


def test_a_field_that_does_not_exist_would_be_noticed() -> None:
    rendered = render(INSECURE)
    service = json.loads(json.dumps(rendered.one("Service", "gateway")))
    service["spec"]["clusterIp"] = "None"
    (error,) = errors_of(Rendered((service,)), "1.34")
    assert "clusterIp" in error


@pytest.mark.parametrize("release", ["1.31", "1.37"])
def test_a_model_in_an_image_is_valid_where_there_are_image_volumes(release: str) -> None:
    values = {**INSECURE, "model.source": "image", "model.image.reference": "r:1", "model.name": "m"}
    assert errors_of(render(values, kubernetes=f"{release}.0"), release) == []


# Their projects'


def custom_errors(*items: dict[str, Any]) -> list[list[str]]:
    """What is wrong with each custom resource."""
    command, text = custom_resources(), json.dumps(items)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


KEDA = {"autoscaling.mode": "keda", "autoscaling.encoder.min": "0"}
BY_PROMETHEUS = {
    **KEDA,
    "autoscaling.keda.trigger": "prometheus",
    "autoscaling.keda.prometheusAddress": "http://prometheus.monitoring.svc:9090",
}
LABELS = {f"monitoring.{each}.labels.release": "prometheus" for each in ("podMonitor", "serviceMonitor", "rules")}
ROUTE = {
    "httpRoute.hostnames[0]": "models.example.org",
    "httpRoute.parentRefs[0].namespace": "gateways",
    "httpRoute.parentRefs[0].sectionName": "https",
}


def test_every_custom_resource_is_what_its_project_defines() -> None:
    everything = {**EVERYTHING, **LABELS, **ROUTE}
    renderings = [
        *(render(file=file) for file in VALUES_FILES),
        *(render({**everything, **mode}) for mode in ({}, KEDA, BY_PROMETHEUS)),
    ]
    items = [item for rendered in renderings for item in rendered.of_kind(*CUSTOM_KINDS)]
    assert {item["kind"] for item in items} == CUSTOM_KINDS
    assert custom_errors(*items) == [[] for _ in items]


@pytest.mark.parametrize(
    ("kind", "path", "value", "error"),
    [
        ("ScaledObject", "spec.cooldownPeriods", 300, "/spec/cooldownPeriods is not known"),
        ("ScaledObject", "spec.cooldownPeriod", "300", "cooldownPeriod"),
        ("ScaledObject", "spec.triggers", None, "triggers"),
        ("PodMonitor", "spec.podMetricsEndpoints.0.interval", "15 seconds", "interval"),
        ("ServiceMonitor", "spec.endpoints.0.paths", "/metrics", "/spec/endpoints/0/paths is not known"),
        ("PrometheusRule", "spec.groups.0.rules.0.for", "soon", "for"),
        ("HTTPRoute", "spec.rules.0.timeouts.request", "600", "request"),
        ("HTTPRoute", "spec.rules.0.timeouts.backend", "600s", "/spec/rules/0/timeouts/backend is not known"),
    ],
)
def test_a_mistake_in_a_custom_resource_would_be_noticed(kind: str, path: str, value: object, error: str) -> None:
    rendered = render({**EVERYTHING, **KEDA})
    item: dict[str, Any] = json.loads(json.dumps(rendered.of_kind(kind)[0]))
    *folders, key = path.split(".")
    place: Any = item
    for folder in folders:
        place = place[int(folder) if folder.isdecimal() else folder]
    place[key] = value
    ((found, *_),) = custom_errors(item)
    assert error in found


# checkov's


def test_checkov_finds_nothing_that_is_not_justified(tmp_path: "pytest.TempPathFactory") -> None:
    rendered = render(EVERYTHING)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(rendered.objects))  # type: ignore[operator]
    command = [
        *checkov(),
        "--framework",
        "kubernetes",
        "--skip-download",
        "--output",
        "json",
        "--directory",
        str(tmp_path),
    ]
    # Compiled modules are kept in the tool's folder: compiling them takes as long as all the rest.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [
        f"{check['check_id']} {check['resource']}: {check['check_name']}" for check in results["failed_checks"]
    ] == []
    assert len(results["passed_checks"]) > 400
    # Whatever is skipped says why.
    assert all(len(check["check_result"]["suppress_comment"]) > 20 for check in results["skipped_checks"])


# The chart's


def test_the_schema_knows_the_settings_as_the_code_has_them() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run `python -m tests.deploy.helm.values_schema`"


def test_the_schema_is_part_of_the_packaged_chart() -> None:
    patterns = (CHART / ".helmignore").read_text().split()
    assert not [pattern for pattern in patterns if "json" in pattern or "schema" in pattern]


def closed_objects(schema: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all objects with fixed keys."""
    found = [path] if schema.get("additionalProperties") is False else []
    for key, value in schema.get("properties", {}).items():
        found += closed_objects(value, (*path, key))
    return found


def test_an_unknown_key_is_refused_at_every_level() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    validate = jsonschema_rs.validator_for(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert validate.is_valid(values)
    paths = closed_objects(schema)
    assert len(paths) > 40
    for path in paths:
        changed = json.loads(json.dumps(values))
        place = changed
        for key in path:
            place = place[key]
        place["surprise"] = 1
        assert not validate.is_valid(changed), path


def test_every_default_has_a_place_in_the_schema_and_the_other_way_round() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(properties: dict[str, Any], given: dict[str, Any], path: str) -> None:
        assert set(properties) == set(given), path
        for key, value in given.items():
            inner = properties[key].get("properties")
            if inner is not None and key != "settings":
                compare(inner, value, f"{path}.{key}")

    properties = {key: value for key, value in schema["properties"].items() if key != "global"}
    compare(properties, values, "values")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("encoder.settings.max-patches", 2),
        ("gateway.settings.port", 80),
        ("decoder.settings.max-sequences", "many"),
        ("encoder.settings.dtype", "float8"),
        ("encoder.liveness.failureThreshold", 1),
        ("decoder.liveness.timeoutSeconds", 1),
        ("autoscaling.windowSeconds", 30),
        ("autoscaling.decoder.min", 0),
        ("model.source", "ftp"),
        ("gateway.image.digest", "sha256:abc"),
        ("valkey.maxmemory", "6Gi"),
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_stands(path: str, value: object) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    *folders, key = path.split(".")
    place = values
    for folder in folders:
        place = place[folder]
    place[key] = value
    errors = list(jsonschema_rs.validator_for(json.loads(SCHEMA_FILE.read_text())).iter_errors(values))
    assert errors
    assert all(".".join(map(str, error.instance_path)) in (path, ".".join(folders)) for error in errors)


def test_helm_enforces_the_schema() -> None:
    with pytest.raises(ChartRefused, match=r"(?s)values don't meet the specifications.*encodr"):
        render({**INSECURE, "encodr.replicas": "2"})
