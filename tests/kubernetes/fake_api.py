"""A Kubernetes API server for tests: EndpointSlices that are listed and watched, scales, leases, events, pods.

It has what makes real ones hard: resource versions, conflicts, histories that are compacted, watches that break, end or
keep silent, and answers that are slow or refused. Runs on the test's event loop, behind a real port.
"""

import asyncio
import contextlib
import copy
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.local import free_port

Object = dict[str, Any]
NAMESPACE = "shop"
SERVICE_LABEL = "kubernetes.io/service-name"


def endpoint(address: str, pod: str = "", **conditions: bool | None) -> Object:
    """An endpoint as the slice controller writes it; ready unless the conditions say otherwise."""
    entry: Object = {"addresses": [address], "conditions": {"ready": True, "serving": True, "terminating": False}}
    entry["conditions"] |= conditions
    if pod:
        entry["targetRef"] = {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": f"uid-{pod}"}
    return entry


def endpoint_slice(name: str, service: str, endpoints: Any, ports: dict[str, int], family: str = "IPv4") -> Object:
    """An EndpointSlice."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {SERVICE_LABEL: service}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": key, "port": number, "protocol": "TCP"} for key, number in ports.items()],
    }


class Broken(Exception):
    """Ends an answer in its middle."""


class FakeApi:
    """The server and its objects. What a test sets is what clients meet from then on."""

    def __init__(self) -> None:
        self.port = free_port()
        self.version = 1
        self.slices: dict[str, Object] = {}
        self.scales: dict[str, Object] = {}
        self.leases: dict[str, Object] = {}
        self.events: list[Object] = []
        self.pods: dict[str, Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str | None] = []
        self.num_lists = 0
        self.num_watches = 0
        self.list_answers: deque[int] = deque()
        """Statuses of the next lists; 200 serves."""
        self.list_bodies: deque[bytes] = deque()
        """What the next lists answer, whatever there is."""
        self.compacts_before_watch = False
        """Once: the next watch comes too late."""
        self.watch_answers: deque[int] = deque()
        self.statuses: dict[tuple[str, str], int] = {}
        """Status of every call of a method to a path that ends so."""
        self.delay_s = 0.0
        self.is_mute = False
        """Watches stay open and tell nothing."""
        self.ends_watches = True
        """When their time is over; else never, as when a connection is dead and nobody knows."""
        self.changed = asyncio.Event()
        self._history: list[tuple[int, str, Object]] = []
        self._compacted = 0
        self._watches: dict[asyncio.Queue[Any], str] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What a test does to the cluster.

    def put(self, item: Any, name: str | None = None) -> None:
        """Add or change a slice, and tell the watches."""
        name = name or item["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        item = copy.deepcopy(item)
        if isinstance(item, dict) and isinstance(item.get("metadata"), dict):
            item["metadata"]["resourceVersion"] = str(self.version)
        self.slices[name] = item
        self._tell(kind, item)

    def delete(self, name: str, *, is_told: bool = True) -> None:
        """Delete a slice; a DELETE that is not told is missed by all."""
        item = self.slices.pop(name)
        self.version += 1
        if is_told:
            self._tell("DELETED", item)

    def say(self, kind: str, item: Any) -> None:
        """An event of which the objects know nothing."""
        for watch in self._watches:
            watch.put_nowait((kind, item))

    def end_watches(self) -> None:
        """End all watches as if their time had come."""
        for watch in self._watches:
            watch.put_nowait(None)

    def break_watches(self) -> None:
        """Break their connections."""
        for watch in self._watches:
            watch.put_nowait(Broken())

    def compact(self) -> None:
        """Forget the history: a watch from an older version is told 410."""
        self._history.clear()
        self._compacted = self.version = self.version + 1

    @property
    def num_open(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Return when a condition holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - threads have no event of ours
                await asyncio.sleep(0.005)

    def add_deployment(self, name: str, replicas: int) -> None:
        self.scales[name] = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": "1", "uid": f"uid-{name}"},
            "spec": {"replicas": replicas},
            "status": {"replicas": replicas, "selector": f"app={name}"},
        }

    def _tell(self, kind: str, item: Object) -> None:
        self._history.append((self.version, kind, copy.deepcopy(item)))
        if not self.is_mute:
            self.say(kind, copy.deepcopy(item))

    # The server.

    async def start(self) -> None:
        """Listen."""
        config = uvicorn.Config(
            Starlette(routes=self._routes()),
            host="127.0.0.1",
            port=self.port,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve())
        await self.until(lambda: self._server is not None and self._server.started)

    async def stop(self) -> None:
        """Be away."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        while not self._serving.done():
            self.break_watches()  # also those that come while it stops
            await asyncio.wait({self._serving}, timeout=0.02)
        await self._serving
        self._server = self._serving = None

    def _routes(self) -> list[Route]:
        slices = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        scale = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        return [
            Route(slices, self._serve_slices),
            Route(scale, self._serve_scale, methods=["GET", "PUT", "PATCH"]),
            Route(leases, self._create_lease, methods=["POST"]),
            Route(leases + "/{name}", self._serve_lease, methods=["GET", "PUT"]),
            Route("/api/v1/namespaces/{namespace}/events", self._create_event, methods=["POST"]),
            Route("/api/v1/namespaces/{namespace}/pods/{name}", self._patch_pod, methods=["PATCH"]),
        ]

    async def _note(self, request: Request) -> Response | None:
        self.requests.append((request.method, request.url.path))
        self.authorizations.append(request.headers.get("authorization"))
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        for (method, end), status in self.statuses.items():
            if request.method == method and request.url.path.endswith(end):
                return _status(status)
        return None

    async def _serve_slices(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        service = request.query_params["labelSelector"].partition("=")[2]
        if request.query_params.get("watch") == "true":
            return self._watch(request, service)
        self.num_lists += 1
        if self.list_answers and (status := self.list_answers.popleft()) != 200:
            return _status(status)
        if self.list_bodies:
            return Response(self.list_bodies.popleft(), media_type="application/json")
        items = [item for item in self.slices.values() if _service(item) in (service, None)]
        return JSONResponse({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    def _watch(self, request: Request, service: str) -> Response:
        self.num_watches += 1
        if self.watch_answers and (status := self.watch_answers.popleft()) != 200:
            return _status(status)
        if self.compacts_before_watch:
            self.compacts_before_watch = False
            self.compact()
        since = int(request.query_params["resourceVersion"])
        timeout_s = float(request.query_params["timeoutSeconds"])
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if since < self._compacted:
            queue.put_nowait(("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))
            queue.put_nowait(None)
        for version, kind, item in self._history:
            if version > since and not self.is_mute:
                queue.put_nowait((kind, item))
        self._watches[queue] = service
        return StreamingResponse(self._lines(queue, service, timeout_s), media_type="application/json")

    async def _lines(self, queue: "asyncio.Queue[Any]", service: str, timeout_s: float) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(timeout_s if self.ends_watches else None):
                while (event := await queue.get()) is not None:
                    if isinstance(event, Broken):
                        raise event
                    if isinstance(event, bytes):
                        yield event
                    elif event[0] in ("ERROR", "BOOKMARK") or _service(event[1]) in (service, None):
                        yield json.dumps({"type": event[0], "object": event[1]}).encode() + b"\n"
        except TimeoutError:
            return
        finally:
            self._watches.pop(queue, None)

    async def _serve_scale(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        scale = self.scales.get(request.path_params["name"])
        if scale is None:
            return _status(404)
        if request.method != "GET":
            body = await request.json()
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, scale["metadata"]["resourceVersion"]):
                return _status(409)
            scale["spec"]["replicas"] = body["spec"]["replicas"]
            scale["metadata"]["resourceVersion"] = str(int(scale["metadata"]["resourceVersion"]) + 1)
            self.changed.set()
        return JSONResponse(scale)

    async def _create_lease(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.leases:
            return _status(409)
        body["metadata"]["resourceVersion"] = "1"
        self.leases[name] = body
        return JSONResponse(body, status_code=201)

    async def _serve_lease(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        name = request.path_params["name"]
        lease = self.leases.get(name)
        if lease is None:
            return _status(404)
        if request.method == "PUT":
            body = await request.json()
            if body["metadata"].get("resourceVersion") != lease["metadata"]["resourceVersion"]:
                return _status(409)
            body["metadata"]["resourceVersion"] = str(int(lease["metadata"]["resourceVersion"]) + 1)
            self.leases[name] = lease = body
        return JSONResponse(lease)

    async def _create_event(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        self.events.append(await request.json())
        return JSONResponse(self.events[-1], status_code=201)

    async def _patch_pod(self, request: Request) -> Response:
        if (refusal := await self._note(request)) is not None:
            return refusal
        pod = self.pods.setdefault(request.path_params["name"], {"metadata": {"annotations": {}}})
        body = json.loads(await request.body())
        pod["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return JSONResponse(pod)


def _service(item: Any) -> str | None:
    try:
        label: str = item["metadata"]["labels"][SERVICE_LABEL]
    except (KeyError, TypeError):
        return None
    return label


def _status(code: int) -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": f"status {code}"}
    return JSONResponse(body, status_code=code)


@asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    """A server that listens, and is stopped at the end."""
    api = FakeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


def addresses(count: int, first: int = 0) -> Iterator[str]:
    """Distinct IPv4 addresses."""
    for number in range(first, first + count):
        yield f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
