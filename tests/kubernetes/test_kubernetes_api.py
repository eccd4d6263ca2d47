"""Where the API server is and who we are to it: a pod's service account, or a kubeconfig."""

import asyncio
import json
from pathlib import Path

import pytest

from common.kubernetes_api import KubernetesError, call, connect
from tests.kubernetes.fake_api import NAMESPACE, FakeApi, endpoint, endpoint_slice


async def test_the_token_of_a_service_account_is_sent_also_when_it_was_renewed(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes.config import incluster_config

    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    certificate.write_text("a certificate")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setattr("common.kubernetes_api.NAMESPACE_FILE", token)  # there is one: this is a pod
    client = connect(None)

    def sent() -> str:
        _, _, headers, *_ = client.param_serialize(method="GET", resource_path="/", auth_settings=["BearerToken"])
        return str(headers["authorization"])

    assert sent() == "bearer first"
    token.write_text("second\n")
    assert sent() == "bearer second"
    token.unlink()
    with pytest.raises(KubernetesError, match="FileNotFoundError"):
        call(client, "GET", "/")
    assert client.configuration.host == f"https://127.0.0.1:{api.port}"


async def test_the_credentials_of_a_kubeconfig_are_used(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put(endpoint_slice("d", "decoder", [endpoint("10.0.0.1")], {"control": 7201}))
    path = tmp_path / "config"
    entries = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    path.write_text(json.dumps(entries))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    client = connect(None)
    found = await asyncio.to_thread(
        call,
        client,
        "GET",
        f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices",
        query={"labelSelector": "kubernetes.io/service-name=decoder"},
    )
    assert len(found["items"]) == 1
    assert api.authorizations[-1] == "Bearer secret"
