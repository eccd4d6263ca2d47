"""The way in: API keys on every route, limits of a key, compressed bodies, web pages, traces, the access log."""

import base64
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import TandemError
from gateway_svc.__main__ import access_of
from gateway_svc.config import GatewaySettings
from gateway_svc.drain import Drain
from gateway_svc.http.api_keys import ApiKeys, KeyLimits
from gateway_svc.http.body_gate import BodyGate, BodyLimits
from gateway_svc.http.errors import error_response
from gateway_svc.http.gzip_body import PIECE_BYTES, GzipBody
from gateway_svc.http.metrics import HttpMetrics
from gateway_svc.http.middleware import OPEN_PATHS, Access, RequestMiddleware, add_cors
from tests.gateway_svc.fake_backend import MODEL, FakeBackend, VectorBackend, harness
from tests.media_samples import png

SECRET = "sk-test-secret"
HEADERS = {"authorization": f"Bearer {SECRET}"}
LIMIT = 1 << 20
PICTURE = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()


async def size(request: Request) -> Response:
    """How long the body is, as the application sees it, and which headers say so."""
    structlog.get_logger().info("inside")
    num_bytes = 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
    except TandemError as error:
        return error_response(error)
    return JSONResponse({"bytes": num_bytes, "encoding": request.headers.get("content-encoding")})


def client_of(access: Access, max_inflight_bytes: int = 4 * LIMIT) -> tuple[httpx.AsyncClient, BodyGate]:
    app = Starlette(routes=[Route(path, size, methods=["GET", "POST"]) for path in ("/v1/x", "/health", "/docs")])
    gate = BodyGate(BodyLimits(LIMIT, max_inflight_bytes, idle_s=1.0, total_s=5.0))
    app.add_middleware(RequestMiddleware, metrics=HttpMetrics(CollectorRegistry()), bodies=gate, access=access)
    if access.origins:
        add_cors(app, access.origins)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test"), gate


def error_of(response: httpx.Response) -> Any:
    return response.json()["error"]


async def test_every_route_but_the_probes_needs_a_key() -> None:
    client, _ = client_of(Access(keys=ApiKeys([SECRET])))
    for path in ("/v1/x", "/docs", "/nowhere"):
        response = await client.get(path)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/x", headers=HEADERS)).status_code == 200
    assert (await client.get("/v1/x", headers={"authorization": "Bearer sk-wrong-secret"})).status_code == 401


async def test_every_route_that_is_documented_needs_a_key() -> None:
    """SEC-16."""
    setup = harness(access=Access(keys=ApiKeys([SECRET])))
    document = (await setup.client.get("/openapi.json", headers=HEADERS)).json()
    routes = [(path, method) for path, methods in document["paths"].items() for method in methods]
    assert ("/v1/chat/completions", "post") in routes
    for path, method in [*routes, ("/docs", "get"), ("/openapi.json", "get"), ("/v1/nope", "get"), ("/", "get")]:
        response = await setup.client.request(method, path.replace("{model}", "x"))
        if path in OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert response.status_code == 401, (path, method)
            assert error_of(response)["code"] == "invalid_api_key"
    response = await setup.client.post("/v1/chat/completions", headers=HEADERS, json={})
    assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_may_ask_for_less_time_than_the_server_gives(stream: bool) -> None:
    deadlines: list[float] = []

    class Backend(FakeBackend):
        def generate(self, request: Any, media: Any, deadline: float) -> Any:
            deadlines.append(deadline - time.monotonic())
            return super().generate(request, media, deadline)

    setup = harness(Backend())
    for timeout, limit in ((5, 5), (1e9, 600), (None, 600)):
        assert (await setup.chat(timeout=timeout, stream=stream)).status_code == 200
        assert limit - 2 < deadlines.pop() <= limit
    for timeout in (0, -1, "5"):
        refused = await setup.chat(timeout=timeout)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "timeout")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/media", {"media": [{"type": "image_url", "image_url": PICTURE}]}),
    ],
)
async def test_every_route_that_works_may_be_given_less_time(path: str, body: dict[str, Any]) -> None:
    deadlines: list[float] = []

    class Backend(VectorBackend if path == "/v1/embeddings" else FakeBackend):  # type: ignore[misc]
        def generate(self, request: Any, media: Any, deadline: float) -> Any:
            deadlines.append(deadline - time.monotonic())
            return super().generate(request, media, deadline)

        async def warm(self, media: Any, fingerprint: str, deadline: float) -> Any:
            deadlines.append(deadline - time.monotonic())
            return await super().warm(media, fingerprint, deadline)

    setup = harness(Backend(), is_embedding_model=path == "/v1/embeddings")
    for timeout, limit in ((5, 5), (None, 600)):
        response = await setup.client.post(path, json={"model": MODEL, **body, "timeout": timeout})
        assert response.status_code == 200, response.text
        assert limit - 2 < deadlines.pop() <= limit


async def test_a_key_beyond_its_limit_is_told_when_to_come_back() -> None:
    client, _ = client_of(Access(keys=ApiKeys([SECRET], limits=KeyLimits(requests_per_minute=1))))
    assert (await client.get("/v1/x", headers=HEADERS)).status_code == 200
    response = await client.get("/v1/x", headers=HEADERS)
    assert response.status_code == 429
    assert error_of(response)["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert 1 <= int(response.headers["retry-after-ms"]) <= 60_000
    assert "connection" not in response.headers


async def test_a_full_gateway_answers_503_in_openai_shape_and_probes_go_on() -> None:
    client, _ = client_of(Access(max_requests=0))
    response = await client.post("/v1/x", content=b"x" * 100)
    assert response.status_code == 503
    assert error_of(response)["code"] == "overloaded"
    assert response.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200


async def test_room_is_free_again_after_each_request() -> None:
    client, gate = client_of(Access(max_requests=1))
    for _ in range(3):
        assert (await client.post("/v1/x", content=b"x" * 1000)).json()["bytes"] == 1000
    assert gate.num_inflight_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_a_gzip_body_arrives_unpacked(num_bytes: int) -> None:
    client, gate = client_of(Access())
    packed = gzip.compress(bytes(i % 251 for i in range(num_bytes)))
    response = await client.post("/v1/x", content=packed, headers={"content-encoding": "GZIP"})
    assert response.json() == {"bytes": num_bytes, "encoding": None}
    assert gate.num_inflight_bytes == 0


async def test_a_small_gzip_body_does_not_become_a_large_one() -> None:
    client, gate = client_of(Access())
    bomb = gzip.compress(bytes(20 * LIMIT))
    assert len(bomb) < LIMIT
    response = await client.post("/v1/x", content=bomb, headers={"content-encoding": "gzip"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"
    assert gate.num_inflight_bytes == 0


async def test_gzip_that_unpacks_to_nothing_is_not_endless() -> None:
    async def members() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield gzip.compress(b"") * 500

    client, _ = client_of(Access())
    response = await client.post("/v1/x", content=members(), headers={"content-encoding": "gzip"})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (b"not gzip", "gzip"),
        (gzip.compress(b"x" * 1000)[:-6], "gzip"),
        (b"", "gzip"),
        (gzip.compress(b"x") + b"tail", "gzip"),
        (zlib.compress(b"x"), "deflate"),
        (b"x", "br"),
    ],
    ids=["not gzip", "cut", "empty", "tail", "zlib", "unknown"],  # gzip writes the time into its bytes
)
async def test_a_damaged_or_foreign_encoding_is_refused(content: bytes, encoding: str) -> None:
    client, gate = client_of(Access())
    response = await client.post("/v1/x", content=content, headers={"content-encoding": encoding})
    assert response.status_code == 400
    assert "gzip" in error_of(response)["message"]
    assert gate.num_inflight_bytes == 0


def test_members_in_a_row_and_bytes_one_by_one_unpack_to_the_whole() -> None:
    body, whole = GzipBody(), b""
    for byte in gzip.compress(b"first ") + gzip.compress(b"second"):
        body.feed(bytes([byte]))
        whole += body.next_piece()
    while body.has_more:
        whole += body.next_piece()
    assert whole == b"first second"
    assert body.is_complete


async def test_web_pages_of_the_given_origins_may_ask_and_read_refusals() -> None:
    client, _ = client_of(Access(keys=ApiKeys([SECRET]), origins=("https://app.example",)))
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await client.options("/v1/x", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    refused = await client.get("/v1/x", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    other = await client.options("/v1/x", headers={**preflight, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"01-{TRACE}-b7ad6b7169203331-01-more", TRACE),
        (f"ff-{TRACE}-b7ad6b7169203331-01", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        ("nonsense", None),
        ("", None),
    ],
)
async def test_a_valid_traceparent_is_known_to_all_log_lines_of_its_request(
    traceparent: str, trace: str | None
) -> None:
    seen: list[Any] = []

    async def look(request: Request) -> Response:
        seen.append(structlog.contextvars.get_contextvars().get("trace_id"))
        return Response()

    app = Starlette(routes=[Route("/", look)])
    gate = BodyGate(BodyLimits(LIMIT, LIMIT, 1.0, 1.0))
    app.add_middleware(RequestMiddleware, metrics=HttpMetrics(CollectorRegistry()), bodies=gate, access=Access())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.get("/", headers={"traceparent": traceparent})
    assert seen == [trace]
    assert "trace_id" not in structlog.contextvars.get_contextvars()


async def test_the_access_log_has_no_contents(logs: list[Any]) -> None:
    client, _ = client_of(Access(keys=ApiKeys([f"{SECRET}"]), is_logged=True))
    headers = {**HEADERS, "x-request-id": "mine"}
    await client.post("/v1/x?q=PRIVATE", content=b"PRIVATE" * 10, headers=headers)
    line = next(line for line in logs if line["event"] == "request")
    assert (line["method"], line["status"], line["client_request_id"]) == ("POST", "200", "mine")
    assert line["key"].startswith("key-")
    assert line["sent_bytes"] > 0
    said = json.dumps(logs, default=str)
    assert "PRIVATE" not in said
    assert SECRET not in said


def test_settings_say_who_may_come_in() -> None:
    settings = GatewaySettings(
        model="m", api_keys=(SECRET,), key_max_inflight=3, max_requests=5, cors_origins=("*",), access_log=True
    )
    access = access_of(settings, Drain())
    assert access.keys.authenticate(HEADERS["authorization"]).limits == KeyLimits(max_inflight=3)
    assert (access.max_requests, access.origins, access.is_logged) == (5, ("*",), True)
    assert not access_of(GatewaySettings(model="m"), Drain()).keys.is_required
