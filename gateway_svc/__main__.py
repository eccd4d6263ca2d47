"""`tandem gateway`: reads the settings, loads tokenizer and template, and serves the OpenAI API until told to stop."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import zmq.asyncio
from cyclopts import Parameter
from fastapi import FastAPI
from tokenizers import Tokenizer

from common import __version__
from common.autoscale_shares import ShareCollector
from common.discovery import DECODERS, ENCODERS, GATEWAYS, KubernetesOptions, member_source
from common.embedding_cache import EmbeddingCache
from common.errors import ConfigError
from common.hub import resolve_checkpoint
from common.logs import configure_logs
from common.messages import Modality
from common.processor_config import ProcessorConfig
from common.service import http_server, run_until_signal
from common.settings import command_line
from gateway_svc.app import create_app
from gateway_svc.config import GatewaySettings
from gateway_svc.drain import Drain
from gateway_svc.http.api_keys import ApiKeys, KeyLimits
from gateway_svc.http.middleware import Access
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.media.folder import MediaFolder
from gateway_svc.media.loader import MediaLimits, MediaLoader
from gateway_svc.media.store import MediaStore
from gateway_svc.routes.api import HttpLimits
from gateway_svc.routes.autoscale import add_autoscale_route
from gateway_svc.routing.fleet import Fleet
from gateway_svc.text.detokenizer import TokenTable
from gateway_svc.text.prompt import PromptBuilder
from gateway_svc.text.sampling import SamplingDefaults

logger = structlog.get_logger(__name__)

CUT_OFF_S = 2  # for what still runs when the drain took too long


async def serve(settings: GatewaySettings) -> None:
    """Run one gateway until a signal; streams that run are finished first."""
    context = zmq.asyncio.Context()
    keys = settings.curve_keys()
    cache = (
        EmbeddingCache.connect(settings.redis, ttl_s=settings.cache_ttl_s, wait_s=settings.cache_wait_s)
        if settings.redis
        else None
    )
    checkpoint_dir = await asyncio.to_thread(resolve_checkpoint, settings.model, "gateway", settings.revision)
    processor = ProcessorConfig.load(checkpoint_dir)
    kubernetes = KubernetesOptions(settings.kubernetes_api, settings.discovery_relist_s)
    fleet = Fleet(
        context,
        model=settings.model_name,
        instance_id=settings.instance_id,
        encoder_source=member_source(settings.encoders, ENCODERS, kubernetes),
        decoder_source=member_source(settings.decoders, DECODERS, kubernetes),
        cache=cache,
        keys=keys,
        encoder_wait_s=settings.encoder_wait_s,
        decoder_wait_s=settings.decoder_wait_s,
        video_settings=processor.video,
        encoder_patches_per_s=settings.encoder_patches_per_s,
    )
    fetcher = MediaFetcher(
        FetchLimits(
            total_s=settings.media_timeout_s,
            private_hosts=frozenset(settings.allow_private_media_hosts),
            domains=frozenset(domain.lower() for domain in settings.allowed_media_domains),
        ),
        store=_media_store(settings),
    )
    app = await asyncio.to_thread(_create_app, settings, checkpoint_dir, processor, fleet, fetcher)
    gateways = ShareCollector(member_source(settings.gateways, GATEWAYS, kubernetes)) if settings.gateways else None
    add_autoscale_route(app, fleet.autoscale.own, gateways)
    server = http_server(app, settings.http_host, settings.port, drain_s=CUT_OFF_S)
    logger.info("gateway is up", model=settings.model_name, url=f"http://{settings.http_host}:{settings.port}")
    try:
        await run_until_signal(server, _run(fleet, gateways), lambda: fleet.drain.run(settings.drain_timeout_s))
    finally:
        await fetcher.aclose()
        if cache is not None:
            await cache.close()


async def _run(fleet: Fleet, gateways: ShareCollector | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.run())
        if gateways is not None:
            tasks.create_task(gateways.run())


def _create_app(
    settings: GatewaySettings, checkpoint_dir: Path, processor: ProcessorConfig, fleet: Fleet, fetcher: MediaFetcher
) -> FastAPI:
    prompts = PromptBuilder.load(
        checkpoint_dir,
        processor,
        chat_template=settings.chat_template,
        video_outer_pair=settings.video_outer_pair,
    )
    limits = MediaLimits(
        max_items=_max_items(settings.limit_mm_per_prompt),
        max_item_bytes=settings.max_media_bytes,
        max_request_bytes=settings.max_request_media_bytes,
        max_request_pixels=settings.max_request_pixels,
        max_known_urls=settings.max_known_urls,
    )
    folder = MediaFolder(settings.allowed_local_media_path) if settings.allowed_local_media_path else None
    return create_app(
        fleet,
        prompts,
        MediaLoader(fleet, processor, fetcher, limits, folder),
        token_table=TokenTable(Tokenizer.from_file(str(checkpoint_dir / "tokenizer.json"))),
        model_names=[settings.model_name],
        version=__version__,
        sampling_defaults=SamplingDefaults.load(checkpoint_dir, settings.generation_config),
        limits=HttpLimits(
            max_body_bytes=settings.max_body_bytes,
            max_inflight_body_bytes=settings.max_inflight_body_bytes,
            request_timeout_s=settings.request_timeout_s,
            stream_open_s=settings.stream_open_s,
        ),
        access=access_of(settings, fleet.drain),
        is_embedding_model=settings.embeddings,
        unknown_fields=settings.unknown_fields,
    )


def access_of(settings: GatewaySettings, drain: Drain) -> Access:
    """Who may use this gateway. Raises ConfigError for keys that cannot be used."""
    limits = KeyLimits(settings.key_requests_per_minute, settings.key_max_inflight)
    return Access(
        keys=ApiKeys(settings.api_keys, settings.api_key_file, limits=limits),
        max_requests=settings.max_requests,
        origins=settings.cors_origins,
        is_logged=settings.access_log,
        drain=drain,
    )


def _media_store(settings: GatewaySettings) -> MediaStore:
    folder = settings.media_spool_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--media-spool-dir {folder} is not a folder")
    return MediaStore(
        max_bytes=settings.max_inflight_media_bytes, max_memory_bytes=settings.max_media_memory_bytes, folder=folder
    )


def _max_items(given: Mapping[str, int]) -> dict[Modality, int]:
    try:
        return msgspec.convert(given, dict[Modality, int])
    except msgspec.ValidationError as exc:
        raise ConfigError(f"--limit-mm-per-prompt {dict(given)} must give counts of image and video: {exc}") from exc


def gateway(settings: Annotated[GatewaySettings, Parameter(name="*")]) -> None:
    """Run a gateway: the OpenAI API in front of encoders and decoders.

    It tokenizes, loads media, asks decoders for tokens and encoders for embeddings, and streams answers. It holds no
    state and no model weights. Start as many as you like.
    """
    configure_logs("gateway", settings.log_level, settings.log_format)
    asyncio.run(serve(settings))


app = command_line("gateway", gateway)

if __name__ == "__main__":
    app.meta()
