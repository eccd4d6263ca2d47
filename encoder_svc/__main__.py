"""`tandem encoder`: reads the settings, loads the vision tower, and serves until told to stop."""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from typing import Annotated

import structlog
import zmq.asyncio
from cyclopts import Parameter

from common import __version__
from common.checkpoint import read_model_config, vision_fingerprint
from common.embedding import ExpectedEmbedding
from common.embedding_cache import EmbeddingCache
from common.freed_memory import share_one_heap
from common.hub import resolve_checkpoint
from common.logs import configure_logs
from common.messages import Grid, Hello, Limits, ProbeRequest, VideoFacts
from common.processor_config import ProcessorConfig
from common.service import Service, run_service
from common.settings import command_line
from common.tensors import dtype_name, pick_device, pick_dtype, use_threads
from common.transport import Authenticator, Router
from common.vision_grid import num_patches
from encoder_svc.batch_loop import BatchLimits
from encoder_svc.config import EncoderSettings
from encoder_svc.devices import DeviceProcesses, device_names, preprocess_threads
from encoder_svc.embedding_store import EmbeddingStore
from encoder_svc.fleet_share import FleetShare
from encoder_svc.media_reader import MediaReader
from encoder_svc.model.vision import VisionTower
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.pipeline import EncodePipeline, QueueLimits
from encoder_svc.runner import TowerRunner
from encoder_svc.server import EncoderParts, EncoderServer
from encoder_svc.shared_regions import SharedRegions
from encoder_svc.shipping import Shipping
from encoder_svc.video_source import VideoLimits
from encoder_svc.warm_up import warm_up

logger = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    tower: VisionTower
    processor: ProcessorConfig
    hello: Hello


async def open_encoder(settings: EncoderSettings) -> EncoderServer:
    """Load the tower, bind the sockets and warm up; what arrives meanwhile is answered from then on."""
    loaded = await asyncio.to_thread(_load, settings)
    context = zmq.asyncio.Context()
    keys = settings.curve_keys()
    if keys is not None:
        Authenticator(context, keys).start()
    control, data = (
        Router(
            context,
            endpoint,
            name=name,
            max_payload_bytes=settings.max_media_bytes,
            keys=keys,
            allow_insecure_bind=settings.allow_insecure_bind,
        )
        for name, endpoint in (("control", settings.control_endpoint), ("data", settings.data_endpoint))
    )
    parts = _assemble(settings, loaded, control, data)
    await warm_up(parts.runner, loaded.processor, settings.warm_up_s)
    logger.info(
        "encoder is ready",
        model=settings.model_name,
        instance_id=loaded.hello.instance_id,
        fingerprint=(loaded.hello.fingerprint or "")[:12],
        device=str(loaded.tower.device),
        dtype=str(loaded.tower.dtype),
        attention=loaded.tower.attention.name,
        compiled=settings.compile_tower,
        control=control.endpoint,
        data=data.endpoint,
    )
    return EncoderServer(parts, loaded.hello)


def _load(settings: EncoderSettings) -> _Loaded:
    checkpoint_dir = resolve_checkpoint(settings.model, "encoder", settings.revision)
    processor = ProcessorConfig.load(checkpoint_dir)
    use_threads(settings.threads)
    dtype = pick_dtype(settings.dtype, read_model_config(checkpoint_dir).dtype)
    tower = load_vision_tower(
        checkpoint_dir,
        dtype=dtype,
        device=pick_device(settings.device),
        processor=processor,
        is_compiled=settings.compile_tower,
    )
    wire_dtype = settings.wire_dtype or dtype_name(dtype)
    hello = Hello(
        role="encoder",
        instance_id=settings.instance_id or f"encoder-{uuid.uuid4().hex[:12]}",
        model=settings.model_name,
        version=__version__,
        fingerprint=vision_fingerprint(checkpoint_dir, processor.canonical_bytes(), wire_dtype),
        wire_dtype=wire_dtype,
        levels=tower.num_levels,
        width=tower.out_width,
        limits=Limits(max_media_bytes=settings.max_media_bytes, max_patches=settings.max_queued_patches),
    )
    return _Loaded(tower, processor, hello)


def _assemble(settings: EncoderSettings, loaded: _Loaded, control: Router, data: Router) -> EncoderParts:
    fingerprint, wire_dtype = loaded.hello.fingerprint, loaded.hello.wire_dtype
    assert fingerprint is not None
    assert wire_dtype is not None
    store = EmbeddingStore(settings.hold_bytes, settings.lease_s)
    regions = SharedRegions(may_share=settings.share_memory)
    regions.report()
    runner = TowerRunner(loaded.tower, fingerprint=fingerprint, wire_dtype=wire_dtype, regions=regions)
    share = None
    if settings.redis:
        cache = EmbeddingCache.connect(settings.redis, ttl_s=settings.cache_ttl_s, wait_s=settings.cache_wait_s)
        share = FleetShare(cache, store, loaded.hello.instance_id)
    expected_of = _expectations(loaded)
    reader = MediaReader(
        loaded.processor,
        max_canvas_pixels=settings.max_canvas_pixels,
        video_limits=VideoLimits(
            max_bytes=settings.max_media_bytes,
            max_frames=settings.max_video_frames,
            max_duration_s=settings.max_video_s,
            max_decode_s=settings.max_video_decode_s,
        ),
    )
    pipeline = EncodePipeline(
        prepare=reader.prepare,
        runner=runner,
        store=store,
        share=share,
        expected_of=expected_of,
        bytes_of=lambda grid: expected_of("", grid).num_bytes(wire_dtype),
        batch_limits=BatchLimits(
            max_patches=settings.max_patches_per_batch,
            max_items=settings.max_items_per_batch,
            max_slice_patches=settings.max_patches_per_slice,
            max_slice_s=settings.max_slice_s,
            max_wait_s=settings.max_batch_wait_s,
        ),
        queue_limits=QueueLimits(settings.max_queued_patches, settings.max_queued_bytes),
        preprocess_threads=preprocess_threads(settings),
        video_threads=settings.video_threads,
        regions=regions,
    )

    async def probe(request: ProbeRequest, source: memoryview) -> VideoFacts:
        return await pipeline.probe(lambda is_over: reader.probe(request, source, is_over))

    return EncoderParts(
        control=control,
        data=data,
        pipeline=pipeline,
        store=store,
        runner=runner,
        shipping=Shipping(data, store, fingerprint, regions),
        probe_video=probe,
    )


def _expectations(loaded: _Loaded) -> Callable[[str, Grid], ExpectedEmbedding]:
    """What this tower makes of an item."""
    fingerprint = loaded.hello.fingerprint
    assert fingerprint is not None
    merged = loaded.tower.config.spatial_merge_size**2

    def expected_of(key: str, grid: Grid) -> ExpectedEmbedding:
        return ExpectedEmbedding(
            key=key,
            grid=grid,
            fingerprint=fingerprint,
            rows=num_patches(grid) // merged,
            width=loaded.hello.width,
            levels=loaded.hello.levels,
            dtype=loaded.hello.wire_dtype,
        )

    return expected_of


def encoder(settings: Annotated[EncoderSettings, Parameter(name="*")]) -> None:
    """Run an encoder: the vision tower and its DeepStack mergers.

    It takes media bytes from gateways, encodes them in batches, holds the embeddings for decoders to fetch, and
    writes them to Redis. It loads only the vision weights of the checkpoint. Start as many as the image load needs, or
    one command for all devices of a machine with --devices.
    """
    configure_logs("encoder", settings.log_level, settings.log_format)
    match device_names(settings):
        case []:
            _serve(settings)
        case [device]:
            _serve(dataclasses.replace(settings, device=device, devices=()))
        case devices:
            for device in devices:
                pick_device(device)
            raise SystemExit(asyncio.run(DeviceProcesses(settings).run()))


def _serve(settings: EncoderSettings) -> None:
    share_one_heap()
    service = Service(lambda: open_encoder(settings), {"role": "encoder", "model": settings.model_name})
    asyncio.run(run_service(service, settings.http_host, settings.http_port, drain_timeout_s=settings.drain_timeout_s))


app = command_line("encoder", encoder)

if __name__ == "__main__":
    app.meta()
