"""`tandem decoder`: reads the settings, loads the language model, and serves until told to stop."""

import asyncio
import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import msgspec
import structlog
import torch
import zmq.asyncio
from cyclopts import Parameter
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig

from common import __version__
from common.checkpoint import read_model_config
from common.cores import keep_to_cores
from common.discovery import ENCODERS, KubernetesOptions, member_source
from common.embedding_cache import EmbeddingCache
from common.errors import ConfigError
from common.freed_memory import keep_freed_memory
from common.hub import resolve_checkpoint
from common.logs import configure_logs
from common.messages import Hello, Limits
from common.service import Server, Service, run_service
from common.settings import command_line
from common.shared_region import host_id
from common.tensors import dtype_name, pick_device, pick_dtype, use_threads
from common.transport import Authenticator, Router
from decoder_svc.config import DecoderSettings
from decoder_svc.embedding_fetch import EncoderFetcher
from decoder_svc.embedding_inbox import EmbeddingInbox
from decoder_svc.engine import Engine, EngineLimits
from decoder_svc.grammar import GrammarCompiler
from decoder_svc.kv_budget import affordable_blocks, make_kv_cache
from decoder_svc.model.attention import pick_block_size
from decoder_svc.model.decode_graphs import DecodeGraphs, GraphRecorder
from decoder_svc.model.moe import has_looped_experts
from decoder_svc.model.parallel import check_split
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from decoder_svc.payload_pool import PayloadPool
from decoder_svc.rank_processes import ParallelServer, RankProcesses
from decoder_svc.server import DecoderServer
from decoder_svc.tensor_parallel import RankSetup, agree_on_blocks, rank_device

logger = structlog.get_logger(__name__)

# Tokens of a step by kind of device: a step's time is the largest gap that a new prompt makes in other streams.
DEFAULT_STEP_TOKENS = 2048
STEP_TOKENS = {"cpu": 768}
HAND_OVER_S = 2.0  # of the time that a drain may take, to tell gateways of what did not finish


@dataclass(frozen=True)
class _Loaded:
    engine: Engine
    hello: Hello
    dtype: torch.dtype
    grammars: GrammarCompiler | None


async def open_decoder(settings: DecoderSettings) -> Server:
    """Load the model, with all its ranks, then bind the socket: a bound decoder is a ready one."""
    checkpoint_dir = await asyncio.to_thread(resolve_checkpoint, settings.model, "decoder", settings.revision)
    if settings.tp == 1:
        return _serve(settings, await asyncio.to_thread(_load, settings, checkpoint_dir))
    processes = RankProcesses(*await asyncio.to_thread(_plan_ranks, settings, checkpoint_dir))
    try:
        await processes.start()
        loaded = await asyncio.to_thread(_load, settings, checkpoint_dir, processes)
        return ParallelServer(_serve(settings, loaded), processes)
    except BaseException:  # also when the start is broken off: what is half loaded is of no use
        await processes.stop(grace_s=0)
        raise


def _serve(settings: DecoderSettings, loaded: _Loaded) -> DecoderServer:
    context = zmq.asyncio.Context()
    keys = settings.curve_keys()
    if keys is not None:
        Authenticator(context, keys).start()
    control = Router(
        context,
        settings.control_endpoint,
        name="control",
        keys=keys,
        allow_insecure_bind=settings.allow_insecure_bind,
    )
    kubernetes = KubernetesOptions(settings.kubernetes_api, settings.discovery_relist_s)
    source = member_source(settings.encoders, ENCODERS, kubernetes)
    pool = PayloadPool()
    pool.report()
    fetcher = EncoderFetcher(
        context,
        lambda: loaded.hello,
        keys,
        source=source,
        new_payload=pool.take,
        host=host_id() if settings.share_memory else None,
    )
    cache = None
    if settings.redis:
        cache = EmbeddingCache.connect(settings.redis, ttl_s=settings.cache_ttl_s, new_payload=pool.take)
    server = DecoderServer(
        control,
        fetcher,
        loaded.engine,
        loaded.hello,
        grammars=loaded.grammars,
        finish_within_s=settings.drain_timeout_s - min(HAND_OVER_S, settings.drain_timeout_s / 4),
    )
    server.inbox = EmbeddingInbox(
        fetcher,
        cache,
        server,
        width=loaded.hello.width,
        levels=loaded.hello.levels,
        dtype=loaded.dtype,
        max_bytes=settings.fetch_bytes,
        is_held=loaded.engine.pool.__contains__,
    )
    logger.info(
        "decoder is ready",
        model=settings.model_name,
        instance_id=loaded.hello.instance_id,
        max_model_len=loaded.hello.limits.max_model_len,
        kv_cache_tokens=loaded.hello.limits.kv_cache_tokens,
        control=control.endpoint,
    )
    return server


def _plan_ranks(
    settings: DecoderSettings, checkpoint_dir: Path
) -> tuple[list[RankSetup], "tempfile.TemporaryDirectory[str]"]:
    """What the other ranks are told. Raises ConfigError for a split that the model or the machine does not allow."""
    config = read_model_config(checkpoint_dir)
    check_split(cast(Qwen3VLTextConfig, config.text_config), settings.tp)
    dtype = pick_dtype(settings.dtype, config.dtype)
    kv_dtype = pick_dtype(settings.kv_cache_dtype, dtype)
    devices = [rank_device(settings.device, rank) for rank in range(settings.tp)]
    folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
    setups = [
        RankSetup(
            rank=rank,
            size=settings.tp,
            checkpoint_dir=str(checkpoint_dir),
            dtype=dtype_name(dtype),
            kv_dtype=dtype_name(kv_dtype),
            device=devices[rank],
            block_size=pick_block_size(settings.block_size, devices[rank], dtype, kv_dtype),
            kv_cache_bytes=settings.kv_cache_bytes,
            threads=_threads(settings),
            compile_layers=settings.compile_layers,
            meeting_file=str(Path(folder.name) / "ranks"),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        for rank in range(1, settings.tp)
    ]
    return setups, folder


def _threads(settings: DecoderSettings) -> int:
    """Threads of one rank."""
    return max(1, (settings.threads or len(os.sched_getaffinity(0))) // settings.tp)


def _load(settings: DecoderSettings, checkpoint_dir: Path, processes: RankProcesses | None = None) -> _Loaded:
    config = read_model_config(checkpoint_dir)
    vision_config = cast(Qwen3VLVisionConfig, config.vision_config)
    use_threads(_threads(settings))
    dtype = pick_dtype(settings.dtype, config.dtype)
    kv_dtype = pick_dtype(settings.kv_cache_dtype, dtype)
    device = rank_device(settings.device, 0) if processes is not None else pick_device(settings.device)
    ranks = processes.ranks if processes is not None else None
    block_size = pick_block_size(settings.block_size, device, dtype, kv_dtype)
    model = load_text_model(
        checkpoint_dir,
        dtype=dtype,
        device=device,
        block_size=block_size,
        ranks=ranks,
        compile_layers=settings.compile_layers,
        kv_dtype=kv_dtype,
    )
    num_blocks = affordable_blocks(model, settings.kv_cache_bytes, block_size, kv_dtype)
    if processes is not None:
        num_blocks = agree_on_blocks(num_blocks, processes.channels)
    kv_cache = make_kv_cache(model, num_blocks, block_size, kv_dtype)
    if processes is not None:
        processes.ranks.meet(processes.meeting_file, model.device, model.dtype)
    records = _records_graphs(settings, model)
    kv_tokens = (kv_cache.num_blocks - records) * kv_cache.block_size
    context = int(model.config.max_position_embeddings)
    max_tokens_per_step = _max_tokens_per_step(settings, model)
    max_model_len = min(settings.max_model_len or context, kv_tokens)
    graphs = None
    if records:
        graphs = DecodeGraphs(
            model,
            kv_cache,
            max_sequences=min(settings.max_sequences, max_tokens_per_step),
            max_model_len=max_model_len,
            record=GraphRecorder(model.device),
        )
    eos_token_ids = _eos_token_ids(checkpoint_dir, config)
    engine = Engine(
        model,
        kv_cache,
        EngineLimits(
            max_model_len=max_model_len,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            embedding_cache_bytes=settings.embedding_cache_bytes,
        ),
        eos_token_ids=eos_token_ids,
        spatial_merge_size=vision_config.spatial_merge_size,
        overlaps_steps=_overlaps_steps(settings, model.device),
        graphs=graphs,
    )
    limits = Limits(max_model_len=max_model_len, max_sequences=settings.max_sequences, kv_cache_tokens=kv_tokens)
    hello = _hello(settings, model, len(vision_config.deepstack_visual_indexes), limits)
    grammars = GrammarCompiler.load(checkpoint_dir, model.config.vocab_size, eos_token_ids)
    return _Loaded(engine, hello, dtype, grammars)


def _hello(settings: DecoderSettings, model: TextModel, levels: int, limits: Limits) -> Hello:
    """What this decoder tells of itself; `levels` are DeepStack's."""
    return Hello(
        role="decoder",
        instance_id=settings.instance_id or f"decoder-{uuid.uuid4().hex[:12]}",
        model=settings.model_name,
        version=__version__,
        levels=levels,
        width=model.config.hidden_size * (1 + levels),
        vocab_size=model.config.vocab_size,
        limits=limits,
    )


def _max_tokens_per_step(settings: DecoderSettings, model: TextModel) -> int:
    return settings.max_tokens_per_step or STEP_TOKENS.get(model.device.type, DEFAULT_STEP_TOKENS)


def _overlaps_steps(settings: DecoderSettings, device: torch.device) -> bool:
    """On CPU the host would wait for its own work, and tell each token a step later."""
    return settings.overlap_steps == "on" or (settings.overlap_steps == "auto" and device.type != "cpu")


def _records_graphs(settings: DecoderSettings, model: TextModel) -> bool:
    """Where nothing of a decode step is decided on the host, and no other rank takes part in it."""
    is_possible = model.device.type == "cuda" and model.attention.can_record and settings.tp == 1
    return settings.cuda_graphs == "auto" and is_possible and not has_looped_experts(model)


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _eos_token_ids(checkpoint_dir: Path, config: object) -> list[int]:
    """The tokens that end an answer: of generation_config.json, or else of config.json."""
    path = checkpoint_dir / "generation_config.json"
    found: int | list[int] | None = None
    if path.is_file():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig).eos_token_id
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"generation_config.json of the checkpoint is not usable: {exc}") from exc
    if found is None:
        found = getattr(getattr(config, "text_config", config), "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else found


def decoder(settings: Annotated[DecoderSettings, Parameter(name="*")]) -> None:
    """Run a decoder: the language model, fed with text and with embeddings that encoders made.

    It takes token ids from gateways, pulls the embeddings that it needs from Redis or from encoders, and generates. It
    loads only the language weights of the checkpoint. Start as many as the text load needs.
    """
    keep_to_cores(settings.cores)  # before any thread of a kernel is there
    keep_freed_memory()
    configure_logs("decoder", settings.log_level, settings.log_format)
    service = Service(lambda: open_decoder(settings), {"role": "decoder", "model": settings.model_name})
    asyncio.run(run_service(service, settings.http_host, settings.http_port, drain_timeout_s=settings.drain_timeout_s))


app = command_line("decoder", decoder)

if __name__ == "__main__":
    app.meta()
