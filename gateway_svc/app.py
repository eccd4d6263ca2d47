"""The HTTP application: routes, and how a chat completion's run becomes a response.

`create_app` receives everything as values and keeps no globals, so that a process may hold several and a test may
hold one with a fake backend. Knows nothing of sockets to encoders and decoders. Runs on the gateway's event loop.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.responses import PlainTextResponse, Response

from gateway_svc.backend import Backend
from gateway_svc.http.body_gate import BodyGate, BodyLimits
from gateway_svc.http.errors import install_error_handlers
from gateway_svc.http.metrics import HttpMetrics
from gateway_svc.http.middleware import Access, RequestMiddleware, add_cors
from gateway_svc.http.sse import Puller, collect
from gateway_svc.media.loader import MediaLoader
from gateway_svc.routes.api import ERROR_RESPONSES, Api, DocumentedApp, HttpLimits, documented, json_response
from gateway_svc.routes.chat import Chat, ChatAnswer
from gateway_svc.routes.completions import CompletionRequest, add_completion_route
from gateway_svc.routes.embeddings import EmbeddingRequest, add_embedding_route
from gateway_svc.routes.media import WarmRequest, add_media_routes
from gateway_svc.routes.openai_response import model_card
from gateway_svc.routes.responses import add_response_route
from gateway_svc.routes.text_run import TextService
from gateway_svc.routes.tokenize import DetokenizeRequest, TokenizeRequest, add_token_routes
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.schemas.responses_request import ResponsesRequest
from gateway_svc.schemas.strict_model import UnknownFields
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.prompt import PromptBuilder
from gateway_svc.text.sampling import SamplingDefaults

# Threads of large bodies: few, since a parser lets no other thread run.
_NUM_BODY_THREADS = 2
# The bodies that the documentation describes.
_BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    WarmRequest,
)


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
    access: Access | None = None,
    is_embedding_model: bool = False,
    unknown_fields: UnknownFields = "refuse",
    registry: CollectorRegistry = REGISTRY,
) -> FastAPI:
    """The application. Every name of `model_names` is answered to; the first is the one used inside the fleet."""
    limits = limits or HttpLimits()
    metrics = HttpMetrics(registry)
    service = TextService(
        backend=backend,
        prompts=prompt_builder,
        media=media_loader,
        table=token_table,
        defaults=sampling_defaults or SamplingDefaults(),
        model_names=tuple(model_names),
        metrics=metrics,
        text_threads=ThreadPoolExecutor(thread_name_prefix="text"),
        request_timeout_s=limits.request_timeout_s,
        is_embedding_model=is_embedding_model,
    )
    app = DocumentedApp(title="Tandem", version=version, description="Qwen3-VL behind OpenAI's API.")
    bodies = BodyLimits(
        max_bytes=limits.max_body_bytes,
        max_inflight_bytes=limits.max_inflight_body_bytes,
        idle_s=limits.body_idle_s,
        total_s=limits.request_timeout_s,
    )
    access = access or Access()
    app.add_middleware(RequestMiddleware, metrics=metrics, bodies=BodyGate(bodies), access=access)
    if access.origins:
        add_cors(app, access.origins)
    install_error_handlers(app)
    body_threads = ThreadPoolExecutor(_NUM_BODY_THREADS, thread_name_prefix="body")
    api = Api(app, service, limits, body_threads, ignores_unknown=unknown_fields == "ignore")
    app.bodies, app.model_names = _BODIES, service.model_names
    _add_chat_route(api)
    add_completion_route(api)
    add_response_route(api)
    add_embedding_route(api)
    add_token_routes(api)
    add_media_routes(api)
    _add_model_routes(app, service)
    _add_probe_routes(app, backend, registry, version)
    return app


def _add_chat_route(api: Api) -> None:
    service = api.service

    @api.app.post(
        "/v1/chat/completions", tags=["chat"], **documented(ChatCompletionRequest, "The completion.", has_stream=True)
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, as one JSON object or, with `stream`, as server-sent events."""
        body, ids = await api.read(request, ChatCompletionRequest)
        chat = Chat(service, body, ids.internal, ids.label)
        answer = ChatAnswer(chat, body, f"chatcmpl-{ids.internal}", service)
        puller = Puller(chat.run.deltas(), request.receive)
        if body.stream:
            return await api.stream(puller, answer, ids)
        return json_response(answer.completion(await collect(puller)))


def _add_model_routes(app: FastAPI, service: TextService) -> None:
    backend, model_names = service.backend, service.model_names
    created = int(time.time())

    @app.get("/v1/models", tags=["models"], response_model=None)
    async def list_models() -> Response:
        """The names that `model` may have."""
        cards = [model_card(name, created, backend.max_model_len) for name in model_names]
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}", tags=["models"], response_model=None, responses=ERROR_RESPONSES)
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        service.check_model(model)
        return json_response(model_card(model, created, backend.max_model_len))


def _add_probe_routes(app: FastAPI, backend: Backend, registry: CollectorRegistry, version: str) -> None:
    @app.get("/health", tags=["operation"], response_model=None)
    async def health() -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    @app.get("/ready", tags=["operation"], response_model=None, responses={503: {"description": "Not now."}})
    async def ready() -> Response:
        """Whether requests are welcome: 503 until a decoder is ready. Encoders are reported, not required."""
        is_ready = backend.is_ready()
        return json_response({"ready": is_ready, **backend.status()}, status_code=200 if is_ready else 503)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", tags=["operation"], response_model=None)
    async def show_version() -> Response:
        """The version of this server."""
        return json_response({"version": version})
