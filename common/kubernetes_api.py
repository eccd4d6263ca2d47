"""The API server of the cluster: where it is, which namespace is ours, and calls that are bounded in time and size.

A thin layer over the `kubernetes` client, of which it uses configuration, credentials and paths: answers are read as
plain JSON, because the client's models refuse whole objects for one unknown or missing field. Imports the client when
it is first needed. Every function blocks: call them from a thread.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECT_S = 5.0
READ_S = 15.0  # between two pieces
ANSWER_S = 60.0
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
_PIECE_BYTES = 64 << 10


class KubernetesError(Exception):
    """The API server refused a call, or could not be reached. `status` is its HTTP status; 0 for no answer.

    It never reaches a client, and so is none of `common.errors`: whoever calls the API server goes on with what it has.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def reason(self) -> str:
        """A word for a metric's label: the status, or that there was none."""
        return str(self.status) if self.status else "unreachable"


def own_namespace(given: str | None = None) -> str:
    """The namespace that was given, or else the pod's own, or else `default`."""
    if given:
        return given
    try:
        return NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


def connect(url: str | None) -> "ApiClient":
    """A client of the API server at `url`, or of the pod's cluster, or of the kubeconfig. Raises ConfigError."""
    try:
        from kubernetes import client, config
    except ImportError as exc:
        raise ConfigError("the kubernetes client is not installed: pip install 'tandem-vl[kubernetes]'") from exc
    settings = client.Configuration()
    if url is not None:
        settings.host = url.rstrip("/")
    else:
        try:
            if NAMESPACE_FILE.exists():
                config.load_incluster_config(client_configuration=settings, try_refresh_token=False)  # type: ignore[no-untyped-call]
                settings.refresh_api_key_hook = _read_token  # type: ignore[assignment]
            else:
                config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as exc:
            raise ConfigError(
                f"no Kubernetes API server is known: run in a pod with a service account, have a kubeconfig, or give "
                f"--kubernetes-api ({exc})"
            ) from exc
    settings.retries = False  # whoever calls decides when to try again
    return client.ApiClient(settings)


def _read_token(settings: "Configuration") -> None:
    """Before each call: the kubelet renews the token, which ends after an hour. The client's own way to notice trusts
    the clock of the node. Raises OSError."""
    from kubernetes.config import incluster_config

    settings.api_key["BearerToken"] = f"bearer {Path(incluster_config.SERVICE_TOKEN_FILENAME).read_text().strip()}"


def call(
    api: "ApiClient",
    method: str,
    path: str,
    *,
    query: dict[str, str] | None = None,
    body: Any = None,
    content_type: str = "application/json",
) -> Any:
    """One call; its answer as JSON. Raises KubernetesError."""
    with _open(api, method, path, query or {}, body, content_type, READ_S) as response:
        data = _read(response)
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError) as exc:
        raise KubernetesError(f"{method} {path} was answered with what is no JSON") from exc


@contextlib.contextmanager
def watch(api: "ApiClient", path: str, query: dict[str, str], timeout_s: float) -> Iterator[Any]:
    """The open answer of a watch, of which `lines` reads events. Raises KubernetesError."""
    with _open(api, "GET", path, {**query, "watch": "true"}, None, "application/json", timeout_s) as response:
        yield response


def lines(response: Any) -> Iterator[bytes]:
    """The lines of an answer as they come, each bounded. Raises KubernetesError when the stream breaks."""
    from urllib3.exceptions import HTTPError

    rest = b""
    try:
        for piece in response.stream(_PIECE_BYTES):
            *complete, rest = (rest + piece).split(b"\n")
            yield from complete
            if len(rest) > MAX_LINE_BYTES:
                raise KubernetesError(f"an event of a watch has more than {MAX_LINE_BYTES} bytes")
    except (HTTPError, OSError) as exc:
        raise KubernetesError(f"a watch broke: {type(exc).__name__}") from exc


@contextlib.contextmanager
def _open(
    api: "ApiClient", method: str, path: str, query: dict[str, str], body: Any, content_type: str, read_s: float
) -> Iterator[Any]:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    headers = {"Accept": "application/json", **({"Content-Type": content_type} if body is not None else {})}
    try:
        prepared = api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = api.call_api(*prepared, _request_timeout=(CONNECT_S, read_s))
        response = answer.response
    except (HTTPError, ApiException, OSError) as exc:
        raise KubernetesError(f"{method} {path}: the API server cannot be reached ({type(exc).__name__})") from exc
    try:
        if not 200 <= response.status <= 299:
            raise KubernetesError(f"{method} {path} was answered with {response.status}", response.status)
        yield response
    finally:
        with contextlib.suppress(HTTPError, OSError):
            response.close()
            response.release_conn()


def _read(response: Any) -> bytes:
    from urllib3.exceptions import HTTPError

    pieces, num_bytes, deadline = [], 0, time.monotonic() + ANSWER_S
    try:
        for piece in response.stream(_PIECE_BYTES):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise KubernetesError(f"an answer of the API server took more than {ANSWER_S:.0f} s")
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise KubernetesError(f"an answer of the API server has more than {MAX_ANSWER_BYTES} bytes")
    except (HTTPError, OSError) as exc:
        raise KubernetesError(f"an answer of the API server broke: {type(exc).__name__}") from exc
    return b"".join(pieces)
