"""The training forward: padded and batched, with the weights of transformers' own Qwen3-VL modules.

Owns nothing but maths: it reads the parameters of a `Qwen3VLForConditionalGeneration` and computes what that module
computes, for a batch of rows whose branches share a prefix (demo/batches.py); where the projections are bfloat16 so are
the activations. Legend: P pictures (or pairs of frames),
N patches, V merged tokens, B rows, S prefix tokens, K slots of L tokens, D text hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NEG = -30000.0
FOCUS_LAYERS = (3, 4)
PICTURE_LAYER = 1  # after which a vision token is to hold which of two pictures it is of
Part = Any  # a module of transformers: its attributes are its parameters and configuration


class Rotate(torch.autograd.Function):
    """Rotary turn of the last dimension in four half passes each way; cos and sin hold half the frequencies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, sin, 1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    result = torch.empty(x.shape, dtype=x.dtype)
    first, second = result.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=sign)
    torch.mul(b, cos, out=second).addcmul_(a, sin, value=-sign)
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = Rotate.apply(x, cos, sin)
    return result


def patch_places(grids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(row, column) [P, N] int64 of each patch in merge-block order, and the mask [P, N] of real patches."""
    columns = grids[:, 1:2]
    index = torch.arange(longest)[None]
    block, inner = index // 4, index % 4
    row = block // columns * 2 + inner // 2
    column = block % columns * 2 + inner % 2
    return torch.stack((row, column), dim=-1), index < grids.prod(1, keepdim=True) * 4


def axis_weights(place: Tensor, size: Tensor, side: int) -> Tensor:
    """[P, N, side] linear interpolation weights of a learned axis, its end points aligned with the grid's."""
    at = place * (side - 1) / (size - 1).clamp(min=1)[:, None]
    return (1 - (at[..., None] - torch.arange(side)).abs()).clamp(min=0)


def vision_rope(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos, sin [P, 1, N, head_dim / 2]: the first half of the frequencies turns by row, the second by column."""
    spatial = head_dim // 2
    inv_freq = 10000.0 ** -(torch.arange(0, spatial, 2, dtype=torch.float32) / spatial)
    angles = (places[..., None].float() * inv_freq).flatten(-2)[:, None]
    return angles.cos(), angles.sin()


def text_rope(positions: Tensor, head_dim: int, sections: list[int], theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin [B, 1, T, head_dim / 2] of interleaved M-RoPE; positions [3, B, T]."""
    half = head_dim // 2
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    axis = torch.zeros(half, dtype=torch.int64)
    for dim in (1, 2):
        axis[dim : sections[dim] * 3 : 3] = dim
    angles = (positions[axis].permute(1, 2, 0).float() * inv_freq)[:, None]
    return angles.cos(), angles.sin()


def merge(module: Part, hidden: Tensor, is_after: bool) -> Tensor:
    """One patch merger over [P, N, C]: norm before the 2 x 2 shuffle, or after it for DeepStack."""
    pictures, patches, width = hidden.shape
    grouped = (pictures, patches // 4, width * 4)
    norm = module.norm
    x = hidden.reshape(grouped) if is_after else hidden
    x = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps).reshape(grouped)
    x = F.gelu(F.linear(x, module.linear_fc1.weight, module.linear_fc1.bias))
    return F.linear(x, module.linear_fc2.weight, module.linear_fc2.bias)


def vision_block(block: Part, hidden: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """hidden [P, N, C]; mask [P, 1, 1, N] additive, or None when nothing is padded."""
    pictures, patches, width = hidden.shape
    heads = block.attn.num_heads
    x = F.layer_norm(hidden, (width,), block.norm1.weight, block.norm1.bias, 1e-6)
    qkv = F.linear(x, block.attn.qkv.weight, block.attn.qkv.bias)
    qk, v = qkv.split((2 * width, width), dim=-1)
    qk = rotate(qk.view(pictures, patches, 2 * heads, -1).transpose(1, 2), cos, sin)
    q, k = qk.split(heads, dim=1)
    v = v.view(pictures, patches, heads, -1).transpose(1, 2)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    x = (scores if mask is None else scores + mask).softmax(-1) @ v
    x = x.transpose(1, 2).reshape(pictures, patches, width)
    hidden = hidden + F.linear(x, block.attn.proj.weight, block.attn.proj.bias)
    x = F.layer_norm(hidden, (width,), block.norm2.weight, block.norm2.bias, 1e-6)
    x = F.gelu(F.linear(x, block.mlp.linear_fc1.weight, block.mlp.linear_fc1.bias), approximate="tanh")
    return hidden + F.linear(x, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias)


def embed_patches(visual: Part, patches: Tensor) -> Tensor:
    """[P, N, C] from uint8 patches; a still picture is two equal frames, so their two kernels add up."""
    kernel = visual.patch_embed.proj.weight
    width = kernel.shape[0]
    if patches.shape[-1] == 768:
        kernel = kernel.sum(2)
    pixels = patches.to(kernel.dtype)
    return F.linear(pixels / 127.5 - 1, kernel.reshape(width, -1), visual.patch_embed.proj.bias)


def run_tower(visual: Part, patches: Tensor, grids: Tensor) -> list[Tensor]:
    """The tower's outputs [P, V, D]: main, then the DeepStack levels in order."""
    config, longest = visual.config, patches.shape[1]
    places, is_real = patch_places(grids, longest)
    side = visual.num_grid_per_side
    rows = axis_weights(places[..., 0], grids[:, 0] * 2, side)
    columns = axis_weights(places[..., 1], grids[:, 1] * 2, side)
    dtype = visual.patch_embed.proj.weight.dtype
    table = (rows[..., :, None] * columns[..., None, :]).flatten(-2).to(dtype)
    hidden = embed_patches(visual, patches) + table @ visual.pos_embed.weight.to(dtype)
    cos, sin = vision_rope(places, config.hidden_size // config.num_heads)
    cos, sin = cos.to(dtype), sin.to(dtype)
    mask = None if bool(is_real.all()) else ((~is_real) * NEG)[:, None, None].to(dtype)
    levels = []
    for index, block in enumerate(visual.blocks):
        hidden = vision_block(block, hidden, mask, cos, sin)
        if index in config.deepstack_visual_indexes:
            merger = visual.deepstack_merger_list[config.deepstack_visual_indexes.index(index)]
            levels.append(merge(merger, hidden, True))
    return [merge(visual.merger, hidden, False), *levels]


class RootMeanSquare(torch.autograd.Function):
    """x / rms(x) over the last dimension in few passes: torch's own takes three times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(size.square() / x.shape[-1] + 1e-6).to(x.dtype)
        result = x * scale
        ctx.save_for_backward(result, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        result, scale = ctx.saved_tensors
        mean = (grad * result).mean(-1, keepdim=True)
        return torch.addcmul(grad, result, mean, value=-1).mul_(scale)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = RootMeanSquare.apply(x) * weight.to(x.dtype)
    return result


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
    """Causal attention within the prefix: q [B, G, R, S, d], k and v [B, G, S, d] to [B, G, R, S, d]."""
    rows, groups, repeat, size, dim = q.shape
    scores = (q.reshape(rows, groups, -1, dim) @ k.transpose(2, 3)).view(rows, groups, repeat, size, size)
    weights = (scores + causal).softmax(-1)
    return (weights.view(rows, groups, -1, size) @ v).view(q.shape)


def slot_attention(
    q: Tensor, far: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], far_mask: Tensor, own_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of the slots' tokens over the prefix (far) and over their own branch.

    q [B, G, R, K * L, d]; far keys and values [B, G, S, d], own ones [B, G, K * L, d]; far_mask [B, 1, 1, 1, S]
    hides prefix padding; own_mask [B, 1, K, 1, L, L] hides later tokens and other
    branches. Returns the values in q's shape, and the weights on the prefix [B, G, K, R, L, S].
    """
    rows, groups, repeat, total, dim = q.shape
    prefix, slots, length = far[0].shape[2], own_mask.shape[2], own_mask.shape[-1]
    k_own, v_own = (x.reshape(rows, groups, slots, length, dim) for x in own)
    q = q.view(rows, groups, repeat, slots, length, dim).transpose(2, 3).reshape(rows, groups, slots, -1, dim)
    far_scores = (q.view(rows, groups, -1, dim) @ far[0].transpose(2, 3)).view(rows, groups, slots, -1, prefix)
    own_scores = (q @ k_own.transpose(3, 4)).view(rows, groups, slots, repeat, length, length) + own_mask
    scores = torch.cat((far_scores + far_mask, own_scores.flatten(3, 4)), dim=-1)
    far_weights, own_weights = scores.softmax(-1).split((prefix, length), dim=-1)
    x = (far_weights.reshape(rows, groups, -1, prefix) @ far[1]).view(q.shape) + own_weights @ v_own
    x = x.view(rows, groups, slots, repeat, length, dim).transpose(2, 3)
    return x.reshape(rows, groups, repeat, total, dim), far_weights.view(rows, groups, slots, repeat, length, prefix)


def queries_keys_values(layer: Part, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, R, T, d], k and v [B, G, T, d] of normed x [B, T, D]."""
    attention, (rows, total, _) = layer.self_attn, x.shape
    dim, weights = attention.head_dim, (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    qk, v = F.linear(x, torch.cat(weights)).split((len(weights[0]) + len(weights[1]), len(weights[2])), dim=-1)
    qk = RootMeanSquare.apply(qk.reshape(rows, total, -1, dim)).transpose(1, 2)
    heads, groups = len(weights[0]) // dim, len(weights[1]) // dim
    scale = torch.cat(
        ((attention.q_norm.weight * dim**-0.5).expand(heads, dim), attention.k_norm.weight.expand(groups, dim))
    )
    q, k = rotate(qk * scale[:, None].to(x.dtype), *rope).split((heads, groups), dim=1)
    return q.view(rows, groups, -1, total, dim), k, v.reshape(rows, total, groups, dim).transpose(1, 2)


def feed_forward(layer: Part, hidden: Tensor) -> Tensor:
    x = rms(hidden, layer.post_attention_layernorm.weight)
    gate, up = F.linear(x, torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight))).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)


def text_layer(
    layer: Part,
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    prefix: int,
    masks: tuple[Tensor, Tensor, Tensor],
    is_last: bool,
) -> tuple[Tensor, Tensor]:
    """hidden [B, S + K * L, D]: prefix rows, then the slots one after another; the last layer drops the prefix.

    Returns the new hidden states and the slots' attention weights on the prefix.
    """
    rows, total, _ = hidden.shape
    parts, (causal, far_mask, own_mask) = (prefix, total - prefix), masks
    q, k, v = queries_keys_values(layer, rms(hidden, layer.input_layernorm.weight), rope)
    (k_far, k_own), (v_far, v_own) = k.split(parts, dim=2), v.split(parts, dim=2)
    q_far, q_own = q.split(parts, dim=3)
    x, weights = slot_attention(q_own, (k_far, v_far), (k_own, v_own), far_mask, own_mask)
    if is_last:
        hidden = hidden[:, prefix:]
    else:
        x = torch.cat((prefix_attention(q_far, k_far, v_far, causal), x), dim=3)
    x = x.flatten(1, 2).transpose(1, 2).reshape(rows, hidden.shape[1], -1)
    return feed_forward(layer, hidden + F.linear(x, layer.self_attn.o_proj.weight)), weights


def attention_masks(batch: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Additive: causal [S, S], far [B, 1, 1, 1, S] and own [B, 1, K, 1, L, L] (see slot_attention)."""
    prefix, segments = batch["prefix_ids"].shape[1], batch["segments"]
    causal = torch.full((prefix, prefix), NEG, dtype=dtype).triu(1)
    is_pad = torch.arange(prefix)[None] >= batch["prefix_lengths"][:, None]
    own = (segments[..., :, None] != segments[..., None, :]) | torch.ones(2 * segments.shape[-1:]).triu(1).bool()
    return causal, (is_pad * NEG).to(dtype)[:, None, None, None], (own * NEG).to(dtype)[:, None, :, None]


def focus_loss(weights: Tensor, at: Tensor, on: Tensor) -> Tensor:
    """How far two heads of each key-value group look away from the shapes that an answer is about.

    weights [B, G, K, R, L, S]; at [Q, 3] (row, slot, place); on bool [Q, 2, S], the tokens for the first group of heads
    and those for the second.
    """
    if not len(at):
        return torch.zeros(())
    row, slot, place = at.unbind(1)
    mass = (weights[row, :, slot, :, place][:, :, :2].float() * on[:, :, None]).sum(-1)
    return -(mass + 1e-4).log()[on.any(-1)].mean()


@dataclass(frozen=True)
class TextRun:
    """What training reads off the language model."""

    hidden: Tensor  # [B, K, L, D], the slots after the final norm
    focus: Tensor  # see focus_loss
    answers: Tensor  # [Q, D], what the answers' places hold after FOCUS_LAYERS
    questions: Tensor  # [Q, D], what the same places hold before FOCUS_LAYERS
    seen: Tensor  # [P, D], what the tokens that belong to one of two pictures hold after PICTURE_LAYER


def run_text(text: Part, batch: dict[str, Tensor], vision: list[Tensor]) -> TextRun:
    config = text.config
    rows, slots, length = batch["slot_ids"].shape
    prefix = batch["prefix_ids"].shape[1]
    ids = torch.cat((batch["prefix_ids"], batch["slot_ids"].flatten(1)), dim=1)
    dtype = text.layers[0].mlp.up_proj.weight.dtype
    hidden = F.embedding(ids, text.embed_tokens.weight).to(dtype)
    at = (batch["vision_rows"] >= 0).nonzero(as_tuple=True)
    source, flat = batch["vision_rows"][at], at[0] * ids.shape[1] + at[1]
    main, *levels = [v.flatten(0, 1) for v in vision]
    hidden = hidden.flatten(0, 1).index_copy(0, flat, main[source]).view(rows, ids.shape[1], -1)
    cos, sin = text_rope(
        batch["positions"],
        config.head_dim,
        config.rope_parameters["mrope_section"],
        config.rope_parameters["rope_theta"],
    )
    rope, masks = (cos.to(dtype), sin.to(dtype)), attention_masks(batch, dtype)
    row, slot, place = batch["focus_at"].unbind(1)
    places = row, prefix + slot * length + place
    focus, questions, answers, seen = torch.zeros(()), hidden, hidden, hidden
    for index, layer in enumerate(text.layers):
        if index == FOCUS_LAYERS[0]:
            questions = hidden[places]
        hidden, weights = text_layer(layer, hidden, rope, prefix, masks, index + 1 == len(text.layers))
        if index in FOCUS_LAYERS:
            focus = focus + focus_loss(weights, batch["focus_at"], batch["focus_on"]) / len(FOCUS_LAYERS)
            answers = hidden[places]
        if index == PICTURE_LAYER:
            seen = hidden[:, :prefix][batch["pictures"] >= 0]
        if index < len(levels):
            hidden = hidden.flatten(0, 1).index_add(0, flat, levels[index][source]).view(rows, ids.shape[1], -1)
    return TextRun(rms(hidden, text.norm.weight).view(rows, slots, length, -1), focus, answers, questions, seen)


def answer_logits(text: Part, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [A, vocab] and targets [A] at the places that predict an answer's tokens."""
    targets = labels[:, :, 1:]
    chosen = targets != -100
    return F.linear(hidden[:, :, :-1][chosen], text.embed_tokens.weight.to(hidden.dtype)), targets[chosen]
