"""The parts of the vision tower: patch embedding, transformer block, and the merger of 2x2 patches.

Owns the layers' arithmetic; parameter names are the checkpoint's below `visual.`. Knows nothing of grids: positions
and segments are arguments. Runs in the compute thread. Legend: `P` packed patches, `C` hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.errors import CheckpointError
from encoder_svc.model.attention import AttentionBackend

# Fixed in the architecture, absent from the configuration.
NORM_EPS = 1e-6

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that the configuration names."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {name!r} of the vision tower is not supported; known are {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def patch_sizes(config: Qwen3VLVisionConfig) -> tuple[int, int]:
    """Frames and pixels a side of one patch. transformers' type also allows lists, which no checkpoint uses."""
    temporal, patch = config.temporal_patch_size, config.patch_size
    if not isinstance(temporal, int) or not isinstance(patch, int):
        raise CheckpointError(
            f"patch_size {patch} and temporal_patch_size {temporal} of the vision tower must be integers"
        )
    return temporal, patch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head, in float32.

    x         [P, heads, head_dim]
    cos, sin  [P, 1, head_dim] float32
    returns   [P, heads, head_dim] in the dtype of x
    """
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class PatchEmbed(nn.Module):
    """A convolution whose kernel equals its stride, hence one matrix product a patch."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        temporal, patch = patch_sizes(config)
        kernel = (temporal, patch, patch)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel_size=kernel, stride=kernel)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[P, channels * temporal * patch * patch] -> [P, C]."""
        weight = self.proj.weight
        return F.linear(pixel_values.to(weight.dtype), weight.flatten(1), self.proj.bias)


class VisionMLP(nn.Module):
    """fc1, activation, fc2, both biased."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, C] -> [P, C]."""
        out: Tensor = self.linear_fc2(self.activation(self.linear_fc1(hidden)))
        return out


class VisionAttention(nn.Module):
    """Fused biased qkv, rotary on q and k, attention within each segment."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        lengths: Sequence[int],
        attention: AttentionBackend,
    ) -> Tensor:
        """[P, C] -> [P, C]; `rotary` is (cos, sin), each [P, 1, head_dim] float32."""
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        mixed = attention.attend(rotate(q, *rotary), rotate(k, *rotary), v, cu_seqlens, lengths)
        out: Tensor = self.proj(mixed.flatten(1))
        return out


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        lengths: Sequence[int],
        attention: AttentionBackend,
    ) -> Tensor:
        """[P, C] -> [P, C]."""
        hidden = hidden + self.attn(self.norm1(hidden), rotary, cu_seqlens, lengths, attention)
        out: Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class PatchMerger(nn.Module):
    """Joins the m*m patches of a token (neighbours in merge-block order) and projects them to the text width.

    The main merger normalises each patch before the join; the DeepStack mergers normalise the joined row.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, has_joined_norm: bool) -> None:
        super().__init__()
        self.joined_size = config.hidden_size * config.spatial_merge_size**2
        self.has_joined_norm = has_joined_norm
        self.norm = nn.LayerNorm(self.joined_size if has_joined_norm else config.hidden_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self.joined_size, self.joined_size)
        self.linear_fc2 = nn.Linear(self.joined_size, config.out_hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, C] -> [P / m**2, out_hidden]; the GELU between the two layers is the exact one."""
        if self.has_joined_norm:
            joined = self.norm(hidden.view(-1, self.joined_size))
        else:
            joined = self.norm(hidden).view(-1, self.joined_size)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(joined)))
        return out
