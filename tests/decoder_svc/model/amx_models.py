"""Tiny models whose sizes the kernels for processors with AMX take."""

from pathlib import Path
from typing import Any

import torch

from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
HIDDEN = SIZES["hidden_size"]


def make_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, is_moe: bool = False, **text: Any) -> TextModel:
    """A model of random weights, by way of a checkpoint in `folder`."""
    config = tiny_config(is_moe=is_moe, text=SIZES | text, vision={"out_hidden_size": HIDDEN})
    save_checkpoint(tiny_model(config), folder)
    return load_text_model(folder, dtype=dtype, device="cpu")
