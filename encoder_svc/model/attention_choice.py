"""Which attention kernel a tower uses: decided once, at start.

On CUDA by what is installed. On a CPU in bfloat16 by a race, since it depends on the processor: with AMX our compiled
kernel wins where it was built, then torch's own (46, 92 and 173 ms for 6 heads of 4,096 patches on a Xeon core);
without AMX the tiled one does, up to twofold. Runs at start-up, before anything is served.
"""

import importlib.util
import math
import time
from collections.abc import Sequence

import torch

from encoder_svc.model.attention import (
    AttentionBackend,
    FlashAttention,
    SdpaAttention,
    TiledAttention,
    TorchVarlenAttention,
)
from encoder_svc.model.attention_native import takes, try_amx_attention

RACE_PATCHES, RACE_ROUNDS = 1024, 9
MIN_GAIN = 1.1  # a tie goes to torch's own


def select_attention(
    device: torch.device | str, dtype: torch.dtype, *, num_heads: int = 8, head_dim: int = 64
) -> AttentionBackend:
    """The best backend for the device: flash-attn or torch's varlen kernel on CUDA in half precision, else SDPA.

    In bfloat16 on a CPU, the fastest of SDPA, the tiled and the compiled kernel on a segment of 1,024 patches, which
    takes a quarter of a second.
    """
    device = torch.device(device)
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        if importlib.util.find_spec("flash_attn") is not None:
            return FlashAttention()
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
            return TorchVarlenAttention()
    if device.type == "cpu" and dtype == torch.bfloat16:
        compiled = try_amx_attention() if takes(head_dim) else None
        others: list[AttentionBackend] = [TiledAttention()]
        if compiled is not None:
            others.append(compiled)
        return _fastest(SdpaAttention(), others, num_heads, head_dim)
    return SdpaAttention()


def _fastest(
    default: AttentionBackend, others: Sequence[AttentionBackend], num_heads: int, head_dim: int
) -> AttentionBackend:
    """The fastest of the others where it is clearly faster than the default.

    Rounds alternate and the best of each counts, so that noise hits all.
    """
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, num_heads, RACE_PATCHES, head_dim, generator=generator).to(torch.bfloat16)
    q, k, v = qkv.transpose(1, 2)
    cu_seqlens = torch.tensor([0, RACE_PATCHES], dtype=torch.int32)
    best = dict.fromkeys((backend.name for backend in (default, *others)), math.inf)
    with torch.inference_mode():
        for _ in range(RACE_ROUNDS):
            for backend in (default, *others):
                began = time.perf_counter()
                backend.attend(q, k, v, cu_seqlens, [RACE_PATCHES])
                best[backend.name] = min(best[backend.name], time.perf_counter() - began)
    fastest = min(others, key=lambda backend: best[backend.name])
    return fastest if best[default.name] >= MIN_GAIN * best[fastest.name] else default
