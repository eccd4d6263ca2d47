"""Every command line and variable that the chart renders is one that the program in the image takes.

The arguments are parsed by the real command lines, into the settings that the services read.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

from common.settings import command_line
from decoder_svc.config import DecoderSettings
from deploy import cli
from deploy.ask import ask
from deploy.autoscaler.config import AutoscalerSettings
from deploy.fetch import fetch
from encoder_svc.config import EncoderSettings
from gateway_svc.config import GatewaySettings
from tests.deploy.helm.chart import EVERYTHING, INSECURE, NAMESPACE, RELEASE, TIERS, VALUES_FILES, Rendered, render

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

SETTINGS: dict[str, type[Any]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "decoder": DecoderSettings,
    "autoscaler": AutoscalerSettings,
}
each_tier = pytest.mark.parametrize("tier", TIERS)


def parsed(tier: str, args: list[str]) -> Any:
    """The settings that the real command line makes of some arguments."""
    seen: list[Any] = []
    cls = SETTINGS[tier]

    def run(settings: Any) -> None:
        seen.append(settings)

    run.__annotations__ = {"settings": Annotated[cls, Parameter(name="*")], "return": None}
    with pytest.raises(SystemExit) as ended:
        command_line(tier, run).meta(args)
    assert not ended.value.code
    return seen[0]


def settings_of(rendered: Rendered, tier: str) -> Any:
    container = rendered.container(tier)
    for variable in container["env"]:
        if variable["name"].startswith("TANDEM_"):
            assert variable["name"].removeprefix("TANDEM_").lower() in SETTINGS[tier].__dataclass_fields__
    return parsed(tier, container["args"])


@pytest.mark.parametrize("file", VALUES_FILES)
@each_tier
def test_a_values_file_gives_a_command_line_that_is_taken(tier: str, file: str) -> None:
    settings = settings_of(render(file=file), tier)
    assert settings.http_host == "0.0.0.0"
    assert settings.log_format == "json"
    assert (settings.curve_key_file is not None) != (file == "values-cpu-demo.yaml")


@each_tier
def test_each_kind_of_setting_arrives_as_it_was_meant(tier: str) -> None:
    given = {
        "gateway": {
            "limit-mm-per-prompt.image": "4",
            "video-outer-pair": "false",
            "request-timeout-s": "900.5",
            "max-body-bytes": "268435456",
            "allow-private-media-hosts": "{files.internal,10.0.0.5:8080}",
        },
        "encoder": {"hold-bytes": "8589934592", "dtype": "bfloat16"},
        "decoder": {"kv-cache-bytes": "64424509440", "max-model-len": "32768", "max-sequences": "null"},
    }
    values = {f"{each}.settings.{key}": value for each, pairs in given.items() for key, value in pairs.items()}
    rendered = render({**INSECURE, **values})
    settings = settings_of(rendered, tier)
    found = {key: getattr(settings, key.partition(".")[0].replace("-", "_")) for key in given[tier]}
    expected = {
        "gateway": {
            "limit-mm-per-prompt.image": {"image": 4},
            "video-outer-pair": False,
            "request-timeout-s": 900.5,
            "max-body-bytes": 268435456,
            "allow-private-media-hosts": ("files.internal", "10.0.0.5:8080"),
        },
        "encoder": {"hold-bytes": 8589934592, "dtype": "bfloat16"},
        # One that is null keeps its default.
        "decoder": {"kv-cache-bytes": 64424509440, "max-model-len": 32768, "max-sequences": 64},
    }
    assert found == expected[tier]
    assert "--max-sequences" not in rendered.container(tier)["args"]


def test_the_members_that_are_named_are_services_of_the_chart_with_the_ports_that_are_asked_for() -> None:
    rendered = render(EVERYTHING)
    gateway, decoder = (settings_of(rendered, tier) for tier in ("gateway", "decoder"))
    autoscaler = settings_of(rendered, "autoscaler")
    sources = {
        "encoder": {*gateway.encoders, *decoder.encoders},
        "decoder": set(gateway.decoders),
        "gateway-peers": {*gateway.gateways, *autoscaler.gateways},
    }
    ports = {"encoder": {"http", "control", "data"}, "decoder": {"http", "control"}, "gateway-peers": {"http"}}
    for component, named in sources.items():
        assert named == {f"kubernetes:{RELEASE}-tandem-{component}"}
        service = rendered.one("Service", component)["spec"]
        assert service["clusterIP"] == "None"
        assert {port["name"] for port in service["ports"]} == ports[component]
        # The port of a headless Service is the pod's: a name leads past it.
        pod_ports = {
            p["name"]: p["containerPort"] for p in rendered.container(component.removesuffix("-peers"))["ports"]
        }
        assert {port["name"]: port["port"] for port in service["ports"]} == pod_ports


def test_by_dns_the_same_services_are_named_with_their_ports() -> None:
    rendered = render({**INSECURE, "discovery.mode": "dns", "discovery.extraEncoders": "{tcp://e:1\\,tcp://e:2}"})
    gateway, decoder = (settings_of(rendered, tier) for tier in ("gateway", "decoder"))
    host = f"{RELEASE}-tandem-%s.{NAMESPACE}.svc"
    encoders = (f"dns:{host % 'encoder'}:7101,7102", "tcp://e:1,tcp://e:2")
    assert gateway.encoders == decoder.encoders == encoders
    assert gateway.decoders == (f"dns:{host % 'decoder'}:7201",)
    assert gateway.gateways == (f"dns:{host % 'gateway-peers'}:8000",)


@each_tier
def test_the_ports_that_a_pod_opens_are_those_that_it_names(tier: str) -> None:
    for family, host in (("IPv4", "0.0.0.0"), ("IPv6", "::")):
        rendered = render({**INSECURE, "ipFamily": family})
        settings = settings_of(rendered, tier)
        bound = {"http": settings.port if tier == "gateway" else settings.http_port}
        for name in ("control", "data"):
            endpoint = getattr(settings, f"{name}_endpoint", None)
            if endpoint is not None:
                assert endpoint.startswith(f"tcp://[{host}]:" if ":" in host else f"tcp://{host}:")
                bound[name] = int(endpoint.rpartition(":")[2])
        assert settings.http_host == host
        assert bound == {port["name"]: port["containerPort"] for port in rendered.container(tier)["ports"]}


@each_tier
def test_the_drain_that_the_chart_waits_for_is_the_one_that_the_service_does(tier: str) -> None:
    values = {
        f"{each}.{key}": value for each in TIERS for key, value in (("drainSeconds", "77"), ("preStopSeconds", "5"))
    }
    rendered = render({**INSECURE, **values})
    assert settings_of(rendered, tier).drain_timeout_s == 77
    assert rendered.one("Deployment", tier)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 97


def test_the_autoscaler_is_told_its_bounds_its_window_and_its_lease() -> None:
    settings = settings_of(render({**EVERYTHING, "autoscaling.encoder.min": "0"}), "autoscaler")
    assert (settings.min_encoders, settings.max_encoders) == (0, 4)
    assert (settings.min_decoders, settings.max_decoders) == (1, 4)
    assert settings.window_s == 300
    assert settings.lease_name == f"{RELEASE}-tandem-autoscaler"
    assert settings.encoder_deployment == settings.encoder_service == f"{RELEASE}-tandem-encoder"
    assert settings.deletion_cost


def test_beside_another_autoscaler_it_is_told_to_leave_the_replicas_alone() -> None:
    settings = settings_of(render({**EVERYTHING, "autoscaling.mode": "keda"}), "autoscaler")
    assert settings.leave_replicas
    assert settings.deletion_cost
    assert settings.decoder_service == f"{RELEASE}-tandem-decoder"
    assert not settings_of(render(EVERYTHING), "autoscaler").leave_replicas


def test_the_api_keys_are_a_file_that_is_mounted_whole() -> None:
    """A file of a mounted folder follows its secret; one that is mounted by itself does not."""
    rendered = render(EVERYTHING)
    assert str(settings_of(rendered, "gateway").api_key_file) == "/etc/tandem/api-keys/keys"
    (mount,) = [item for item in rendered.container("gateway")["volumeMounts"] if item["name"] == "api-keys"]
    assert mount == {"name": "api-keys", "mountPath": "/etc/tandem/api-keys", "readOnly": True}


@pytest.mark.parametrize(
    ("function", "find"),
    [
        (fetch, lambda r: r.one("Deployment", "encoder")["spec"]["template"]["spec"]["initContainers"][0]),
        (ask, lambda r: r.one("Pod", "test")["spec"]["containers"][0]),
    ],
)
def test_the_small_commands_are_given_options_that_they_have(
    function: Callable[..., None], find: Callable[[Rendered], dict[str, Any]]
) -> None:
    container = find(render(INSECURE))
    assert container["command"] == ["tandem", function.__name__]
    flags = {arg.removeprefix("--").replace("-", "_") for arg in container["args"] if arg.startswith("--")}
    assert len(flags) >= 2
    assert flags <= set(inspect.signature(function).parameters)


def test_every_command_of_a_container_is_one_of_the_program() -> None:
    commands = {name for name in cli.app if not name.startswith("-")}
    for _, pod in render(EVERYTHING).pod_specs():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            if container["command"][0] == "tandem":
                assert container["command"][1] in commands
