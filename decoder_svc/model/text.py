"""The language model: one packed step in, logits out.

Owns the order of the parts, the use of the vision payload (embeddings and DeepStack) and the output projection. No
state between calls: everything a step needs is in `ModelInput` and the KV cache. Runs in the compute thread.
Legend: `T` packed tokens, `V` vision tokens, `H` hidden, `L` DeepStack levels, `R` rows whose logits are wanted.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from common.errors import CheckpointError, ModelFailure
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.attention import PagedAttention, TorchPagedAttention
from decoder_svc.model.deepstack import add_deepstack
from decoder_svc.model.fused import FusedLayers, fuse
from decoder_svc.model.kernels import Kernels, TorchKernels
from decoder_svc.model.layers import DecoderLayer, RMSNorm, StepContext
from decoder_svc.model.linear import Linear, can_pack, pack_weight, packed_linear
from decoder_svc.model.mrope import frequency_axes, inverse_frequencies, mrope_cos_sin
from decoder_svc.model.parallel import WHOLE, Alone, Ranks, num_kv_heads, vocabulary_range
from decoder_svc.model.tiles import TiledWeight
from decoder_svc.model_input import ModelInput

# The architecture's split of 64 frequencies, for configurations that do not say it.
DEFAULT_MROPE_SECTION = (24, 20, 20)


class TextModel(nn.Module):
    """Qwen3-VL's language model, dense or MoE, for packed sequences.

    Parameter names are the checkpoint's below `language_model.`, with q, k, v fused into `qkv_proj` and gate, up into
    `gate_up_proj`; `lm_head` exists only when it is not tied to `embed_tokens`.
    """

    _axes: Tensor
    _frequencies: Tensor

    def __init__(
        self,
        config: Qwen3VLTextConfig,
        attention: PagedAttention | None = None,
        kernels: Kernels | None = None,
        *,
        tie_word_embeddings: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`config` is that of this rank's share when there are several `ranks`."""
        super().__init__()
        _check_heads(config)
        self.ranks: Ranks = ranks if ranks is not None else Alone()
        self._own_vocabulary = slice(*vocabulary_range(config.vocab_size, self.ranks.shard))
        self.config = config
        self.attention: PagedAttention = attention if attention is not None else TorchPagedAttention()
        self.kernels: Kernels = kernels if kernels is not None else TorchKernels()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        num_logits = self._own_vocabulary.stop - self._own_vocabulary.start
        self.lm_head = None if tie_word_embeddings else Linear(config.hidden_size, num_logits, bias=False)
        self._packed_head: Tensor | TiledWeight | None = None
        self._fused: FusedLayers | None = None
        theta, section = _rope(config)
        self.register_buffer("_axes", frequency_axes(config.head_dim, section), persistent=False)
        self.register_buffer("_frequencies", inverse_frequencies(config.head_dim, theta), persistent=False)

    def pack(self) -> "TextModel":
        """Lay the weights of all linear layers out for the processor, once they are loaded.

        A tied projection gets a packed copy of the embeddings, which stay for the lookup.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.lm_head is None and can_pack(self.embed_tokens.weight):
            self._packed_head = pack_weight(self.embed_tokens.weight[self._own_vocabulary])
        if self.ranks.shard == WHOLE:
            self._fused = fuse([cast(DecoderLayer, layer) for layer in self.layers], self.norm, self.kernels)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which is the dtype of the logits."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.embed_tokens.weight.device

    def forward(self, model_input: ModelInput, kv_cache: KVCache) -> Tensor:
        """Run one step; the new keys and values are in `kv_cache` afterwards.

        returns  [R, vocab] logits of `logits_rows`, in the model's dtype
        """
        last, _ = self.hidden_states(model_input, kv_cache)
        return self.logits(last)

    @torch.inference_mode()
    def hidden_states(
        self, model_input: ModelInput, kv_cache: KVCache, before_layers: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run one step up to the output projection.

        returns  [R, H] hidden states of `logits_rows` after the last norm, and copies [T, H] of the residual stream
                 before chosen layers, by layer

        Source: transformers 5.24, modeling_qwen3_vl.py, `Qwen3VLTextModel.forward`.
        """
        self._check_vision(model_input)
        self.ranks.begin_step(model_input)
        hidden = self.embed_tokens.weight.index_select(0, model_input.input_ids)  # [T, H]
        taken: dict[int, Tensor] = {}
        levels = self._place_vision(hidden, model_input)
        step = self._step_context(model_input, kv_cache)
        if self._fused is not None and not before_layers and self._fused.can_run(hidden, step):
            normed = self._fused.run(hidden, step, levels, model_input.vision_rows)
            return _wanted_rows(normed, model_input), taken
        for idx, layer in enumerate(self.layers):
            if idx in before_layers:
                taken[idx] = hidden.clone()
            hidden = layer(hidden, step)
            if idx < len(levels):
                add_deepstack(hidden, model_input.vision_rows, levels[idx])
        return self.norm(_wanted_rows(hidden, model_input), self.kernels), taken

    @torch.inference_mode()
    def logits(self, wanted: Tensor) -> Tensor:
        """The output projection: [R, H] after the last norm -> [R, vocab]; of several ranks, rank 0 gets it."""
        if self.lm_head is not None:
            own: Tensor = self.lm_head(wanted)
        elif self._packed_head is not None:
            own = packed_linear(wanted, self._packed_head)
        else:
            own = F.linear(wanted, self.embed_tokens.weight[self._own_vocabulary])
        return self.ranks.join_columns(own, self.config.vocab_size)

    def _step_context(self, model_input: ModelInput, kv_cache: KVCache) -> StepContext:
        cos, sin = mrope_cos_sin(model_input.positions, self._frequencies, self._axes)
        plan = self.attention.prepare(model_input, kv_cache)
        return StepContext(cos, sin, model_input.slot_mapping, kv_cache, self.kernels, self.attention, plan, self.ranks)

    def _check_vision(self, model_input: ModelInput) -> None:
        """Raise ModelFailure for a payload that does not fit, before any rank begins."""
        embeds, width = model_input.vision_embeds, self.config.hidden_size
        if embeds is None:
            return
        num_levels = embeds.shape[1] // width - 1
        if embeds.shape[0] != model_input.vision_rows.shape[0] or embeds.shape[1] % width or num_levels < 0:
            raise ModelFailure(
                f"vision embeddings of shape {list(embeds.shape)} do not fit {model_input.vision_rows.shape[0]} rows "
                f"of a multiple of {width}; the encoder serves another model"
            )
        if num_levels > len(self.layers):
            raise ModelFailure(f"{num_levels} DeepStack levels need as many layers, the model has {len(self.layers)}")

    def _place_vision(self, hidden: Tensor, model_input: ModelInput) -> list[Tensor]:
        """Replace the placeholder rows of `hidden` [T, H] by the main embeddings; returns the L levels [V, H]."""
        embeds = model_input.vision_embeds
        if embeds is None:
            return []
        main, *levels = torch.split(embeds.to(hidden), hidden.shape[1], dim=1)
        hidden.index_copy_(0, model_input.vision_rows, main)
        return levels


def _wanted_rows(hidden: Tensor, model_input: ModelInput) -> Tensor:
    """Of [T, H] the rows [R, H] whose logits are wanted: when tokens are decoded, all."""
    rows = model_input.logits_rows
    return hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows)


def _rope(config: Qwen3VLTextConfig) -> tuple[float, Sequence[int]]:
    """Base of the rotary frequencies, and how many of them turn with time, row and column."""
    rope: Mapping[str, Any] = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise CheckpointError(f"rope_type {rope_type!r} of the language model is not supported; only 'default' is")
    return float(rope["rope_theta"]), tuple(rope.get("mrope_section") or DEFAULT_MROPE_SECTION)


def _check_heads(config: Qwen3VLTextConfig) -> None:
    """Refuse heads that cannot be grouped, before any weight is read."""
    kv_heads = num_kv_heads(config)
    if config.num_attention_heads % kv_heads:
        raise CheckpointError(f"{kv_heads} KV heads do not divide {config.num_attention_heads} attention heads")
