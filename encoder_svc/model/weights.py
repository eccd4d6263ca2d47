"""Builds the vision tower and fills it from a checkpoint.

Owns the map from checkpoint tensors to the tower's parameters, which is the identity, and the weights derived from
them. No language module is built and no language tensor is read. Runs once, at start.
"""

from pathlib import Path
from typing import cast

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.checkpoint import load_weights, read_model_config, role_tensors, without_storage
from common.checkpoint_regions import Destination
from common.processor_config import ProcessorConfig
from encoder_svc.model.attention_choice import select_attention
from encoder_svc.model.compiled import compile_tower, run_all_graphs
from encoder_svc.model.vision import VisionTower


def load_vision_tower(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    device: str,
    processor: ProcessorConfig | None = None,
    is_compiled: bool = False,
) -> VisionTower:
    """The tower of a checkpoint, ready to run, with the best attention backend for the device.

    With the `processor` it takes bytes of pictures as well as normalised floats. With `is_compiled` its layers are
    made by torch.compile. Raises ConfigError where that fails.
    """
    # transformers has parsed the part into an object; the MoE class has the same fields.
    config = cast(Qwen3VLVisionConfig, read_model_config(checkpoint_dir).vision_config)
    attention = select_attention(
        device, dtype, num_heads=config.num_heads, head_dim=config.hidden_size // config.num_heads
    )
    with without_storage():
        tower = VisionTower(config, attention)
    destinations = {f"visual.{name}": Destination(name) for name, _ in tower.named_parameters()}
    load_weights(tower, role_tensors(checkpoint_dir, "encoder"), destinations, dtype=dtype, device=device)
    if processor is not None:
        tower.patch_embed.fold(processor)
    tower.eval()
    if not is_compiled:
        return tower.pack()
    compile_tower(tower)
    run_all_graphs(tower)
    return tower
