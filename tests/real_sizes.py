"""The configurations of the published Qwen3-VL sizes, for tests that build them on the meta device."""

from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def _dense(hidden: int, layers: int, heads: int, inner: int, tower: dict[str, Any], is_tied: bool) -> Qwen3VLConfig:
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    return Qwen3VLConfig(
        text_config=text | _text(kv_heads=8),
        vision_config=tower | {"out_hidden_size": hidden},
        tie_word_embeddings=is_tied,
    )


def _moe(hidden: int, layers: int, heads: int, inner: int) -> Qwen3VLMoeConfig:
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "moe_intermediate_size": inner,
    }
    return Qwen3VLMoeConfig(
        text_config=text | _text(kv_heads=4) | {"num_experts": 128, "num_experts_per_tok": 8},
        vision_config=_LARGE_TOWER | {"out_hidden_size": hidden},
        tie_word_embeddings=False,
    )


def _text(kv_heads: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    return {
        "vocab_size": 151936,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": rope,
    }


REAL_SIZES: dict[str, Qwen3VLConfig | Qwen3VLMoeConfig] = {
    "2B": _dense(2048, 28, 16, 6144, _SMALL_TOWER, True),
    "4B": _dense(2560, 36, 32, 9728, _SMALL_TOWER, True),
    "8B": _dense(4096, 36, 32, 12288, _LARGE_TOWER, False),
    "32B": _dense(5120, 64, 64, 25600, _LARGE_TOWER, False),
    "30B-A3B": _moe(2048, 48, 32, 768),
    "235B-A22B": _moe(4096, 94, 64, 1536),
}
