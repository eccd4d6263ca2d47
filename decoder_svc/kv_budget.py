"""How many blocks the KV cache of a process gets.

Owns the defaults by device and the bytes of a block. With tensor parallelism every process has the blocks of its own
heads, and as many of them as all others. Runs once, at start, after the weights are loaded.
"""

import torch

from common.errors import ConfigError
from decoder_svc.kv_cache import TILE_TOKENS, KVCache
from decoder_svc.model.attention import NativePagedAttention
from decoder_svc.model.kernels import NativeKernels
from decoder_svc.model.parallel import num_kv_heads
from decoder_svc.model.text import TextModel

CPU_KV_CACHE_BYTES = 1 << 30
CUDA_KV_CACHE_SHARE = 0.85


def affordable_blocks(model: TextModel, num_bytes: int, block_size: int, dtype: torch.dtype | None = None) -> int:
    """Blocks that fit into `num_bytes`, or for 0 into what the device has. Raises ConfigError for fewer than two."""
    config = model.config
    if num_bytes == 0 and model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        num_bytes = int(free * CUDA_KV_CACHE_SHARE)
    num_bytes = num_bytes or CPU_KV_CACHE_BYTES
    itemsize = (dtype or model.dtype).itemsize
    block_bytes = 2 * config.num_hidden_layers * num_kv_heads(config) * config.head_dim * block_size * itemsize
    if _compresses(model, block_size, dtype or model.dtype):
        block_bytes += 2 * config.num_hidden_layers * num_kv_heads(config) * block_size // TILE_TOKENS
    num_blocks = num_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"--kv-cache-bytes {num_bytes} holds {num_blocks} blocks of {block_bytes} bytes: give at least "
            f"{2 * block_bytes}"
        )
    return num_blocks


def make_kv_cache(model: TextModel, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
    """An empty cache for the heads that a model has, by default in its dtype."""
    config = model.config
    return KVCache(
        config.num_hidden_layers,
        num_blocks,
        block_size,
        num_kv_heads(config),
        config.head_dim,
        dtype or model.dtype,
        model.device,
        compress=_compresses(model, block_size, dtype or model.dtype),
    )


def _compresses(model: TextModel, block_size: int, dtype: torch.dtype) -> bool:
    """Whether full blocks are compressed: where the kernels do it, without loss, for queries of the same dtype."""
    config, kernels = model.config, model.kernels
    if not (isinstance(kernels, NativeKernels) and isinstance(model.attention, NativePagedAttention)):
        return False
    heads = config.num_attention_heads, num_kv_heads(config), config.head_dim
    return dtype == model.dtype and kernels.can_compress(dtype, *heads, block_size)
