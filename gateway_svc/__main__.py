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
from common.addresses import EncoderAddress
from common.embedding_cache import EmbeddingCache
from common.errors import ConfigError
from common.hub import resolve_checkpoint
from common.logs import configure_logs
from common.messages import Modality
from common.processor_config import ProcessorConfig
from common.service import http_server, run_until_signal
from common.settings import command_line
from gateway_svc.app import HttpLimits, create_app
from gateway_svc.config import GatewaySettings
from gateway_svc.detokenizer import TokenTable
from gateway_svc.fleet import Fleet
from gateway_svc.media_fetch import FetchLimits, MediaFetcher
from gateway_svc.media_loader import MediaLimits, MediaLoader
from gateway_svc.prompt import PromptBuilder
from gateway_svc.sampling import SamplingDefaults

logger = structlog.get_logger(__name__)


async def serve(settings: GatewaySettings) -> None:
    """Run one gateway until a signal; streams that run are finished first."""
    context = zmq.asyncio.Context()
    keys = settings.curve_keys()
    cache = EmbeddingCache.connect(settings.redis, ttl_s=settings.cache_ttl_s) if settings.redis else None
    checkpoint_dir = await asyncio.to_thread(resolve_checkpoint, settings.model, "gateway", settings.revision)
    processor = ProcessorConfig.load(checkpoint_dir)
    fleet = Fleet(
        context,
        model=settings.model_name,
        instance_id=settings.instance_id,
        encoders=[EncoderAddress.parse(value) for value in settings.encoders],
        decoders=settings.decoders,
        cache=cache,
        keys=keys,
        encoder_wait_s=settings.encoder_wait_s,
        decoder_wait_s=settings.decoder_wait_s,
        video_settings=processor.video,
    )
    fetcher = MediaFetcher(
        FetchLimits(total_s=settings.media_timeout_s, private_hosts=frozenset(settings.allow_private_media_hosts))
    )
    app = await asyncio.to_thread(_create_app, settings, checkpoint_dir, processor, fleet, fetcher)
    server = http_server(app, settings.http_host, settings.port, drain_s=int(settings.drain_timeout_s))
    logger.info("gateway is up", model=settings.model_name, url=f"http://{settings.http_host}:{settings.port}")
    try:
        await run_until_signal(server, fleet.run())
    finally:
        await fetcher.aclose()
        if cache is not None:
            await cache.close()


def _create_app(
    settings: GatewaySettings, checkpoint_dir: Path, processor: ProcessorConfig, fleet: Fleet, fetcher: MediaFetcher
) -> FastAPI:
    prompts = PromptBuilder.load(
        checkpoint_dir,
        processor,
        chat_template=settings.chat_template,
        video_outer_pair=settings.video_outer_pair,
    )
    limits = MediaLimits(max_items=_max_items(settings.limit_mm_per_prompt), max_item_bytes=settings.max_media_bytes)
    return create_app(
        fleet,
        prompts,
        MediaLoader(fleet, processor, fetcher, limits),
        token_table=TokenTable(Tokenizer.from_file(str(checkpoint_dir / "tokenizer.json"))),
        model_names=[settings.model_name],
        version=__version__,
        sampling_defaults=SamplingDefaults.load(checkpoint_dir, settings.generation_config),
        limits=HttpLimits(
            max_body_bytes=settings.max_body_bytes,
            max_inflight_body_bytes=settings.max_inflight_body_bytes,
            request_timeout_s=settings.request_timeout_s,
        ),
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
