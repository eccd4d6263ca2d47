"""The Dockerfile and the compose file: what can be known of them without building anything."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import __version__
from tests.deploy.helm.chart import INSECURE, TIERS, render
from tests.deploy.helm.test_settings import parsed
from tests.deploy.helm.tools import hadolint
from tests.deploy.helm.values_schema import CHART
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
COMPOSE = REPOSITORY / "deploy" / "compose.yaml"
each_tier = pytest.mark.parametrize("tier", TIERS)


def stages() -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run([str(hadolint()), str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@each_tier
def test_the_first_process_is_the_service_and_not_a_shell(tier: str) -> None:
    text = stages()[tier]
    assert f'ENTRYPOINT ["tandem", "{tier}"]' in text
    assert "CMD" not in text
    assert "USER 10001:10001" in stages()["base"]


@each_tier
def test_an_image_holds_the_code_of_its_role_alone(tier: str) -> None:
    copied = set(re.findall(r"^COPY .*?(\w+_svc) \./", stages()[tier], re.MULTILINE))
    assert copied == {f"{tier}_svc"}
    assert "[kubernetes]" in stages()["build-gateway"]
    assert "torch" not in stages()["build-gateway"]


def test_everything_that_is_copied_exists_and_reaches_the_builder() -> None:
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert list(REPOSITORY.glob(source)), source
            assert not sent.isdisjoint({source, *map(str, Path(source).parents)}), source


def test_the_dependencies_are_a_layer_below_the_code() -> None:
    for tier in TIERS:
        lines = [line for line in stages()[tier].splitlines() if line.startswith("COPY")]
        assert lines[0].startswith("COPY --from=build-")
    assert re.findall(r"^COPY (.+)$", stages()["build"], re.MULTILINE) == [
        "pyproject.toml constraints.txt README.md LICENSE ./"
    ]


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    tags = {service["image"].partition(":")[2] for name, service in compose()["services"].items() if name != "valkey"}
    assert tags == {__version__}
    for file in CHART.glob("values-*.yaml"):
        for tag in re.findall(r"tag: (\S+)-cuda", file.read_text()):
            assert tag == __version__, file.name


@each_tier
def test_the_compose_file_gives_a_command_line_that_is_taken(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"][tier]
    for name in [name for name in os.environ if name.startswith("TANDEM_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    settings = parsed(tier, service["command"])
    assert settings.http_host == "0.0.0.0"
    assert settings.redis == "redis://valkey:6379/0"
    assert settings.model == "/opt/tandem/app/demo/model"
    assert float(service["stop_grace_period"].removesuffix("s")) > settings.drain_timeout_s + 10
    probe = service["healthcheck"]["test"]
    port = settings.port if tier == "gateway" else settings.http_port
    assert probe[:3] == ["CMD", "python", "-c"]
    assert f"127.0.0.1:{port}/" in probe[3]


def test_only_the_api_leaves_the_host_and_only_to_the_host() -> None:
    services = compose()["services"]
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "gateway": ["127.0.0.1:8000:8000"]
    }
    assert compose()["networks"]["inside"] == {"internal": True}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name


def test_the_demo_model_of_the_chart_is_where_the_images_have_it() -> None:
    args = render({**INSECURE, "model.source": "bundled"}).container("decoder")["args"]
    path = Path(args[args.index("--model") + 1])
    assert path == Path("/opt/tandem/app/demo/model")
    assert "COPY demo/model ./demo/model" in stages()["decoder"]
    assert "WORKDIR /opt/tandem/app" in stages()["base"]
