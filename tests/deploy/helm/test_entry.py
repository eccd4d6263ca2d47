"""The ways into a release: streams are neither cut nor held back, and bodies with pictures get through."""

from typing import Any

import pytest

from gateway_svc.config import GatewaySettings
from tests.deploy.helm.chart import EVERYTHING, Rendered, render

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

NGINX = "nginx.ingress.kubernetes.io/"
OWN = {"proxy-body-size": "7m", "limit-rps": "9x"}


def annotations(rendered: Rendered) -> dict[str, Any]:
    found: dict[str, Any] = rendered.one("Ingress", "gateway")["metadata"]["annotations"]
    return {name.removeprefix(NGINX): value for name, value in found.items()}


def test_an_ingress_holds_nothing_back_and_waits_longer_than_any_request() -> None:
    found = annotations(render(EVERYTHING))
    assert (found["proxy-buffering"], found["proxy-request-buffering"]) == ("off", "off")
    limit_s = GatewaySettings.request_timeout_s
    assert int(found["proxy-read-timeout"]) == int(found["proxy-send-timeout"]) > limit_s
    assert int(found["proxy-body-size"].removesuffix("m")) << 20 >= GatewaySettings.max_body_bytes


def test_annotations_of_ones_own_come_before_those_of_the_chart() -> None:
    own = {f"ingress.annotations.nginx\\.ingress\\.kubernetes\\.io/{name}": value for name, value in OWN.items()}
    found = annotations(render({**EVERYTHING, **own}))
    assert found["proxy-body-size"] == "7m"
    assert found["limit-rps"] == "9x"
    assert found["proxy-buffering"] == "off"


def test_an_ingress_leads_to_the_service_of_the_gateways_under_its_host() -> None:
    spec = render({**EVERYTHING, "ingress.host": "models.example.org"}).one("Ingress", "gateway")["spec"]
    assert spec["tls"] == [{"hosts": ["models.example.org"], "secretName": "tls"}]
    ((path,),) = [rule["http"]["paths"] for rule in spec["rules"] if rule["host"] == "models.example.org"]
    assert path["backend"]["service"] == {"name": "demo-tandem-gateway", "port": {"name": "http"}}


def test_a_route_waits_longer_than_any_request_and_leads_to_the_gateways() -> None:
    (rule,) = render(EVERYTHING).one("HTTPRoute", "gateway")["spec"]["rules"]
    limit_s = GatewaySettings.request_timeout_s
    assert int(rule["timeouts"]["request"].removesuffix("s")) > limit_s
    assert rule["timeouts"]["backendRequest"] == rule["timeouts"]["request"]
    assert rule["backendRefs"] == [{"name": "demo-tandem-gateway", "port": 8000}]
