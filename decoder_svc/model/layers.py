"""The parts of a decoder layer: norm, attention with fused qkv, and the dense MLP with fused gate and up.

Owns the layers' arithmetic. Knows nothing of sequences, vision or sampling: positions and the attention plan are
arguments. Runs in the compute thread. Legend: `T` packed tokens, `H` hidden size, `D` head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from common.errors import CheckpointError
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.attention import PagedAttention
from decoder_svc.model.kernels import Heads, Kernels
from decoder_svc.model.linear import Linear
from decoder_svc.model.moe import SparseMoeBlock
from decoder_svc.model.parallel import Ranks, num_kv_heads

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class StepContext:
    """What all layers of one step share: rotary angles, where new KV goes, how to attend and who does the small work.

    cos, sin      [T, D/2] float32
    slot_mapping  [T] int64
    """

    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor
    kv_cache: KVCache
    kernels: Kernels
    attention: PagedAttention
    plan: Any
    ranks: Ranks


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that the configuration names."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {name!r} of the language model is not supported; known are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis, in float32; the weight is applied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor, kernels: Kernels, delta: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; with a `delta`, `hidden` takes it in first."""
        return kernels.rms_norm(hidden, self.weight, self.eps, delta)


class TextAttention(nn.Module):
    """Grouped-query attention with per-head norms of q and k. `qkv_proj` holds the rows of q, k and v in order."""

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = num_kv_heads(config)
        out_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, out_rows, bias=config.attention_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, layer: int, step: StepContext) -> Tensor:
        """[T, H] -> [T, H]; writes the new keys and values to the cache, then attends over it."""
        heads = Heads(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
        )
        q = step.kernels.store_heads(
            self.qkv_proj(hidden), heads, step.cos, step.sin, step.slot_mapping, step.kv_cache, layer
        )
        mixed = step.attention.attend(q, step.kv_cache, layer, step.plan)
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out


class TextMLP(nn.Module):
    """Gated MLP. `gate_up_proj` holds the rows of gate, then those of up."""

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """[T, H] -> [T, H]."""
        out: Tensor = self.down_proj(kernels.gate(self.gate_up_proj(hidden), self.activation))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP (dense or MoE), each added to the residual stream."""

    def __init__(self, config: Qwen3VLTextConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = TextAttention(config)
        self.mlp: nn.Module
        if is_moe_layer(config, layer_idx):
            self.mlp = SparseMoeBlock(config, activation(config.hidden_act))
        else:
            self.mlp = TextMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        """[T, H] -> [T, H], in place."""
        mixed = self.self_attn(self.input_layernorm(hidden, step.kernels), self.layer_idx, step)
        normed = self.post_attention_layernorm(hidden, step.kernels, step.ranks.sum(mixed))
        return hidden.add_(step.ranks.sum(self.mlp(normed, step.kernels)))


def is_moe_layer(config: Qwen3VLTextConfig, layer_idx: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th but for `mlp_only_layers`, in MoE models only."""
    num_experts = getattr(config, "num_experts", 0)
    if not num_experts or layer_idx in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return (layer_idx + 1) % int(getattr(config, "decoder_sparse_step", 1)) == 0
