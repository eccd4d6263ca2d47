"""The HTTP application: routes, and how a chat completion's run becomes a response.

`create_app` receives everything as values and keeps no globals, so that a process may hold several and a test may
hold one with a fake backend. Knows nothing of sockets to encoders and decoders. Runs on the gateway's event loop.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.responses import Response

from common.errors import ModelNotFound
from gateway_svc.backend import Backend
from gateway_svc.chat import ChatRun, ChatService
from gateway_svc.choice import ChoiceDelta
from gateway_svc.detokenizer import TokenTable
from gateway_svc.http_errors import install_error_handlers
from gateway_svc.http_metrics import HttpMetrics
from gateway_svc.media_loader import MediaLoader
from gateway_svc.middleware import BodyLimits, RequestMiddleware, request_ids
from gateway_svc.openai_response import model_card
from gateway_svc.openai_schema import ChatCompletionRequest
from gateway_svc.prompt import PromptBuilder
from gateway_svc.request_body import read_chat_request
from gateway_svc.sampling import SamplingDefaults
from gateway_svc.sse import Puller, collect, open_stream

# Stands in the documentation for the framework's own 422, which never leaves this server.
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "OpenAI's error object: the request cannot be served as it is."},
    "5XX": {"description": "OpenAI's error object: a fault, or no capacity (then with Retry-After)."},
}


# Threads of large bodies: few, since a parser lets no other thread run.
_NUM_BODY_THREADS = 2
_SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the HTTP side.

    `max_inflight_body_bytes` bounds the bodies of all requests that run, `body_idle_s` the wait for the next piece of
    a body, `stream_open_s` the wait for a stream's first event before it opens.
    """

    max_body_bytes: int = 128 << 20
    max_inflight_body_bytes: int = 1 << 30
    body_idle_s: float = 30.0
    request_timeout_s: float = 600.0
    stream_open_s: float = 15.0
    keep_alive_s: float = 10.0


def create_app(
    backend: Backend,
    prompt_builder: PromptBuilder,
    media_loader: MediaLoader,
    *,
    token_table: TokenTable,
    model_names: Sequence[str],
    version: str,
    sampling_defaults: SamplingDefaults | None = None,
    limits: HttpLimits | None = None,
    registry: CollectorRegistry = REGISTRY,
) -> FastAPI:
    """The application. Every name of `model_names` is answered to; the first is the one used inside the fleet."""
    limits = limits or HttpLimits()
    metrics = HttpMetrics(registry)
    service = ChatService(
        backend=backend,
        prompts=prompt_builder,
        media=media_loader,
        table=token_table,
        defaults=sampling_defaults or SamplingDefaults(),
        model_names=tuple(model_names),
        metrics=metrics,
        text_threads=ThreadPoolExecutor(thread_name_prefix="text"),
        request_timeout_s=limits.request_timeout_s,
    )
    app = _DocumentedApp(title="Tandem", version=version, description="Qwen3-VL behind OpenAI's API.")
    bodies = BodyLimits(
        max_bytes=limits.max_body_bytes,
        max_inflight_bytes=limits.max_inflight_body_bytes,
        idle_s=limits.body_idle_s,
        total_s=limits.request_timeout_s,
    )
    app.add_middleware(RequestMiddleware, metrics=metrics, bodies=bodies)
    install_error_handlers(app)
    _add_chat_route(app, service, limits, ThreadPoolExecutor(_NUM_BODY_THREADS, thread_name_prefix="body"))
    _add_model_routes(app, backend, service.model_names)
    _add_probe_routes(app, backend, registry, version)
    return app


class _DocumentedApp(FastAPI):
    """Adds to the documentation the schema of the body, which is read by hand."""

    def openapi(self) -> dict[str, Any]:
        """The API as OpenAPI."""
        if self.openapi_schema is None:
            document = super().openapi()
            schema = ChatCompletionRequest.model_json_schema(ref_template=_SCHEMAS + "{model}")
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {**schema.pop("$defs"), ChatCompletionRequest.__name__: schema}
        return super().openapi()


def _add_chat_route(app: FastAPI, service: ChatService, limits: HttpLimits, body_threads: Executor) -> None:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + ChatCompletionRequest.__name__}}}

    @app.post(
        "/v1/chat/completions",
        tags=["chat"],
        response_model=None,
        responses=_ERROR_RESPONSES,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, as one JSON object or, with `stream`, as server-sent events."""
        body = await read_chat_request(request, body_threads)
        ids = request_ids(request.scope)
        run = service.run(body, ids.internal, ids.label)
        puller = Puller(run.deltas(), request.receive)
        if not body.stream:
            deltas = await collect(puller)
            return _json(run.head.completion(deltas, run.counts))
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return await open_stream(
            puller,
            _ChatEvents(run, include_usage),
            open_s=limits.stream_open_s,
            keep_alive_s=limits.keep_alive_s,
            request_id=ids.internal,
        )


def _add_model_routes(app: FastAPI, backend: Backend, model_names: Sequence[str]) -> None:
    created = int(time.time())

    @app.get("/v1/models", tags=["models"], response_model=None)
    async def list_models() -> Response:
        """The names that `model` may have."""
        cards = [model_card(name, created, backend.max_model_len) for name in model_names]
        return _json({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}", tags=["models"], response_model=None)
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        if model not in model_names:
            raise ModelNotFound(f"the model {model[:200]!r} is not served here: use {', '.join(model_names)}")
        return _json(model_card(model, created, backend.max_model_len))


def _add_probe_routes(app: FastAPI, backend: Backend, registry: CollectorRegistry, version: str) -> None:
    @app.get("/health", tags=["operation"], response_model=None)
    async def health() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @app.get("/ready", tags=["operation"], response_model=None)
    async def ready() -> Response:
        """Whether requests are welcome: 503 until a decoder is ready. Encoders are reported, not required."""
        is_ready = backend.is_ready()
        return _json({"ready": is_ready, **backend.status()}, status_code=200 if is_ready else 503)

    @app.get("/metrics", tags=["operation"], response_model=None)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", tags=["operation"], response_model=None)
    async def show_version() -> Response:
        """The version of this server."""
        return _json({"version": version})


class _ChatEvents:
    """The chunks of a streamed completion."""

    def __init__(self, run: ChatRun, include_usage: bool) -> None:
        self._run = run
        self._include_usage = include_usage

    def opening(self) -> Iterator[dict[str, Any]]:
        """The role of each choice."""
        return self._with_usage(self._run.head.role_chunks())

    def events(self, item: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """What a delta adds."""
        return self._with_usage(self._run.head.delta_chunks(item))

    def closing(self) -> Iterator[dict[str, Any]]:
        """The usage, where it was asked for."""
        if self._include_usage:
            yield self._run.head.usage_chunk(self._run.counts)

    def _with_usage(self, chunks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """With include_usage, every chunk but the last has a null usage, as OpenAI documents."""
        for chunk in chunks:
            yield {**chunk, "usage": None} if self._include_usage else chunk


def _json(value: object, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status_code, media_type="application/json")
