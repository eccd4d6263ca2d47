"""Tiny random Qwen3-VL checkpoints, made with transformers' own classes and saved in every layout that is published.

Owns the random weights (scaled so that outputs vary) and the writing of safetensors: both naming schemes, single or
sharded, experts in either fused orientation or one tensor each. Used by parity and integration tests.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

Scheme = Literal["new", "old"]
Shards = Literal["single", "by_half"]
ExpertLayout = Literal["published", "transformers", "per_expert"]

ENCODER_SHARD = "model-00001-of-00002.safetensors"
DECODER_SHARD = "model-00002-of-00002.safetensors"

_TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, Any] = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 48,
    "num_position_embeddings": 144,
    "deepstack_visual_indexes": [0, 2, 3],
}
_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
_IDS = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}


def tiny_config(
    *,
    is_moe: bool = False,
    is_tied: bool = False,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **top_level: Any,
) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """A configuration of a few thousand parameters; `text`, `vision` and `top_level` override its values."""
    text_config = {**_TEXT, **(_MOE if is_moe else {}), **(text or {})}
    config_class = Qwen3VLMoeConfig if is_moe else Qwen3VLConfig
    return config_class(
        text_config=text_config,
        vision_config={**_VISION, **(vision or {})},
        tie_word_embeddings=is_tied,
        **{**_IDS, **top_level},
    )


def tiny_model(config: Any, *, seed: int = 0, gain: float = 1.5) -> Any:
    """transformers' model with random float32 weights; a larger `gain` makes outputs depend more on every input.

    Returns `Qwen3VLForConditionalGeneration` or its MoE sibling, in eval mode.
    """
    is_moe = isinstance(config, Qwen3VLMoeConfig)
    model = (Qwen3VLMoeForConditionalGeneration if is_moe else Qwen3VLForConditionalGeneration)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") or ".norm" in name:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.1 * noise)
            elif "embed" in name and "patch_embed" not in name:
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                fan_in = parameter[0].numel() if "experts" not in name else parameter.shape[-1]
                parameter.copy_(noise * gain / fan_in**0.5)
    model.requires_grad_(False)
    return model


def save_checkpoint(
    model: Any,
    directory: Path,
    *,
    scheme: Scheme = "new",
    shards: Shards = "single",
    experts: ExpertLayout = "published",
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
    config_change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write `config.json` and the weights. `change` and `config_change` may edit them in place first, to break them."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(model, scheme=scheme, experts=experts, dtype=dtype)
    if change is not None:
        change(tensors)
    raw_config = model.config.to_dict()
    if config_change is not None:
        config_change(raw_config)
    (directory / "config.json").write_text(json.dumps(raw_config))
    if shards == "single":
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {name: ENCODER_SHARD if is_vision(name) else DECODER_SHARD for name in tensors}
    for shard in (ENCODER_SHARD, DECODER_SHARD):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(held, directory / shard, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def checkpoint_tensors(
    model: Any, *, scheme: Scheme = "new", experts: ExpertLayout = "published", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The model's tensors under their stored names. A tied `lm_head.weight` is left out, as published."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored_name = name if scheme == "new" else old_name(name)
        if ".mlp.experts." in name:
            tensors.update(_expert_tensors(stored_name, tensor.to(dtype), experts))
        else:
            tensors[stored_name] = tensor.to(dtype).clone()
    return tensors


def is_vision(stored_name: str) -> bool:
    """Whether a tensor belongs to the encoder's half, in either scheme."""
    return stored_name.startswith(("visual.", "model.visual."))


def old_name(name: str) -> str:
    """The older scheme: `visual.*` beside `model.*`, which is the language model alone."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def _expert_tensors(name: str, tensor: torch.Tensor, layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """transformers' [experts, out, in] in the asked layout."""
    if layout == "transformers":
        return {name: tensor.clone()}
    if layout == "published":
        return {name: tensor.transpose(1, 2).contiguous()}
    prefix, _, leaf = name.rpartition(".")
    parts = (
        {"down_proj": tensor}
        if leaf == "down_proj"
        else dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
    )
    return {
        f"{prefix}.{expert}.{part}.weight": weights[expert].clone()
        for part, weights in parts.items()
        for expert in range(tensor.shape[0])
    }
