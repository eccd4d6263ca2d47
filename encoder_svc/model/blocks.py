"""The parts of the vision tower behind its patch embedding: the transformer block, and the merger of 2x2 patches.

Owns the layers' arithmetic; parameter names are the checkpoint's below `visual.`. What is independent for each row runs
over tiles of rows, whose intermediates stay in a CPU's cache. Knows nothing of grids: positions and segments are
arguments. Runs in the compute thread. Legend: `P` packed patches, `C` hidden size, `R` rows of one tile.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.errors import CheckpointError
from encoder_svc.model import block_native
from encoder_svc.model.amx import amx_library
from encoder_svc.model.attention import AttentionBackend
from encoder_svc.model.block_native import AmxBlock, AmxMerger, BlockLayers
from encoder_svc.model.kernels import ACTIVATIONS, Activation, Linear, row_tiles

# Fixed in the architecture, absent from the configuration.
NORM_EPS = 1e-6


def activation(name: str) -> Activation:
    """The activation that the configuration names."""
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {name!r} of the vision tower is not supported; known are {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _library_for(linear: Linear) -> ctypes.CDLL | None:
    """Our compiled kernels, where they run on the device and dtype of the layer, whose weight is still its own."""
    weight = linear.weight
    if weight is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    return amx_library()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate the halves of each head, in float32.

    x, out    [R, 2, heads, head_dim], q and k; `out` is written
    cos, sin  [R, 1, 1, head_dim/2] float32
    """
    first, second = x.float().chunk(2, dim=-1)
    first_out, second_out = out.chunk(2, dim=-1)
    first_out.copy_(torch.addcmul(first * cos, second, sin, value=-1))
    second_out.copy_(torch.addcmul(second * cos, first, sin))


class VisionMLP(nn.Module):
    """fc1, activation, fc2, both biased."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, activation(config.hidden_act))
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, C]."""
        out: Tensor = self.linear_fc2(self.linear_fc1(hidden))
        return out


class VisionAttention(nn.Module):
    """Fused biased qkv, rotary on q and k, and the output projection; the block calls the attention between."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.hidden_size // config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def empty_qkv(self, hidden: Tensor) -> Tensor:
        """Room for q, k and v of all patches, [P, 3, heads, head_dim].

        Each of the three is dense. On a CPU a head's patches lie together, which attention reads a tenth faster there.
        """
        if hidden.device.type == "cpu":
            return hidden.new_empty(3, self.num_heads, len(hidden), self.head_dim).permute(2, 0, 1, 3)
        return hidden.new_empty(3, len(hidden), self.num_heads, self.head_dim).transpose(0, 1)

    def project(self, normed: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """q, k (rotated) and v of some patches.

        normed    [R, C]
        cos, sin  [R, 1, 1, head_dim/2] float32
        out       [R, 3, heads, head_dim], written
        """
        qkv = self.qkv(normed).view(-1, 3, self.num_heads, self.head_dim)
        rotate(qkv[:, :2], cos, sin, out[:, :2])
        out[:, 2].copy_(qkv[:, 2])


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)
        self._widest = max(3 * config.hidden_size, config.intermediate_size)
        # What treats each row alone is compiled as a function of the block, so that all blocks share its graph.
        self.enter: Callable[..., None] = enter_block
        self.leave: Callable[..., None] = leave_block
        self._has_kernel = block_native.takes(config.hidden_size, self.attn.head_dim, config.hidden_act)
        self._native: AmxBlock | None = None

    def pack(self) -> None:
        """Lay the weights out for the processor: for our compiled kernels where they run, else layer by layer."""
        linears = (self.attn.qkv, self.attn.proj, self.mlp.linear_fc1, self.mlp.linear_fc2)
        library = _library_for(linears[0]) if self._has_kernel else None
        if library is not None:
            qkv, proj, fc1, fc2 = linears
            layers = BlockLayers(self.norm1, qkv, proj, self.norm2, fc1, fc2)
            self._native = AmxBlock(library, layers, self.attn.num_heads)
        else:
            for linear in linears:
                linear.pack()

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        lengths: Sequence[int],
        attention: AttentionBackend,
    ) -> None:
        """Add the block's two parts to `hidden` [P, C], in place; cos and sin are [P, 1, 1, head_dim/2] float32."""
        cos, sin = rotary
        if self._native is not None:
            qkv = self.attn.empty_qkv(hidden)
            self._native.project(hidden, cos, sin, qkv)
            q, k, v = qkv.unbind(1)
            self._native.finish(attention.attend(q, k, v, cu_seqlens, lengths), hidden)
            return
        tiles = list(row_tiles(len(hidden), self._widest * hidden.element_size(), hidden.device))
        qkv = self.attn.empty_qkv(hidden)
        for rows in tiles:
            self.enter(self, hidden[rows], cos[rows], sin[rows], qkv[rows])
        q, k, v = qkv.unbind(1)
        mixed = attention.attend(q, k, v, cu_seqlens, lengths)
        for rows in tiles:
            self.leave(self, hidden[rows], mixed[rows].flatten(1))  # in one layout, whatever the attention's is


def enter_block(block: VisionBlock, hidden: Tensor, cos: Tensor, sin: Tensor, qkv: Tensor) -> None:
    """What comes before the attention: `hidden` [R, C] to `qkv` [R, 3, heads, head_dim], written."""
    block.attn.project(block.norm1(hidden), cos, sin, qkv)


def leave_block(block: VisionBlock, hidden: Tensor, mixed: Tensor) -> None:
    """What comes behind the attention: its projected rows `mixed` [R, C] and the MLP are added to `hidden` [R, C]."""
    hidden += block.attn.proj(mixed)
    hidden += block.mlp(block.norm2(hidden))


class PatchMerger(nn.Module):
    """Joins the m*m patches of a token (neighbours in merge-block order) and projects them to the text width.

    The main merger normalises each patch before the join; the DeepStack mergers normalise the joined row.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, has_joined_norm: bool) -> None:
        super().__init__()
        self.joined_size = config.hidden_size * config.spatial_merge_size**2
        self.has_joined_norm = has_joined_norm
        self.norm = nn.LayerNorm(self.joined_size if has_joined_norm else config.hidden_size, eps=NORM_EPS)
        self.linear_fc1 = Linear(self.joined_size, self.joined_size, ACTIVATIONS["gelu"])
        self.linear_fc2 = Linear(self.joined_size, config.out_hidden_size)
        self.merge: Callable[..., Tensor] = merge_rows
        self._has_kernel = block_native.merges(config.hidden_size, config.out_hidden_size)
        self._native: AmxMerger | None = None

    def pack(self) -> None:
        """Lay the weights out for the processor, as a block does."""
        library = _library_for(self.linear_fc1) if self._has_kernel else None
        if library is not None:
            self._native = AmxMerger(library, self.norm, self.linear_fc1, self.linear_fc2)
        else:
            self.linear_fc1.pack()
            self.linear_fc2.pack()

    def forward(self, hidden: Tensor, out: Tensor) -> None:
        """[P, C] -> `out` [P / m**2, out_hidden], written; the GELU between the two layers is the exact one."""
        joined = hidden.view(-1, self.joined_size)
        if self._native is not None:
            self._native.merge(joined, out)
            return
        for rows in row_tiles(len(joined), self.joined_size * hidden.element_size(), hidden.device):
            out[rows] = self.merge(self, joined[rows])


def merge_rows(merger: PatchMerger, joined: Tensor) -> Tensor:
    """[R, C * m**2] -> [R, out_hidden]."""
    if merger.has_joined_norm:
        normed = merger.norm(joined)
    else:
        normed = merger.norm(joined.view(-1, merger.norm.normalized_shape[0])).view_as(joined)
    merged: Tensor = merger.linear_fc2(merger.linear_fc1(normed))
    return merged
