"""Builds the language model and fills it from a checkpoint.

Owns the map from checkpoint tensors to the model's fused parameters, the three layouts of expert weights, and the
question whether the output projection is tied. No vision module is built and no vision tensor is read. Runs once,
at start.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from common.checkpoint import (
    Share,
    StoredTensor,
    load_weights,
    read_model_config,
    read_tensor,
    role_tensors,
    without_storage,
)
from common.checkpoint_regions import Destination
from common.errors import CheckpointError
from decoder_svc.model.attention import select_attention
from decoder_svc.model.kernels import select_kernels
from decoder_svc.model.parallel import WHOLE, Ranks, check_split, local_config, num_kv_heads, owned_parameters
from decoder_svc.model.text import TextModel

logger = logging.getLogger(__name__)

EMBED = "language_model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_EXPERTS = re.compile(r"^(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)$")


def load_text_model(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    device: str,
    block_size: int = 16,
    pack: bool = True,
    ranks: Ranks | None = None,
    compile_layers: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> TextModel:
    """The language model of a checkpoint, ready to run.

    `block_size` and `kv_dtype`, by default `dtype`, are those of the KV cache it will run over: they decide which
    attention kernels can be used. Weights are packed for the processor unless `pack` is false, which leaves the
    parameters readable. Of several `ranks` each gets its share of the model, and reads no more of the checkpoint. With
    `compile_layers`, on CUDA, torch.compile fuses the small operations of layers. Raises ConfigError when the model
    cannot be split so, or for `compile_layers` on CPU.
    """
    config = read_model_config(checkpoint_dir)
    stored = role_tensors(checkpoint_dir, "decoder")
    is_tied = config.tie_word_embeddings and not _has_own_lm_head(stored)
    if is_tied:
        stored = _drop_tied_copy(stored)
    # transformers has parsed the part into an object; the MoE class has the dense one's fields and a few more.
    text_config = cast(Qwen3VLTextConfig, config.text_config)
    kernels = select_kernels(device, compile_layers=compile_layers)
    attention = select_attention(device, dtype, block_size, kernels, kv_dtype)
    shard = ranks.shard if ranks is not None else WHOLE
    check_split(text_config, shard.size)
    own_config = local_config(text_config, shard.size)
    with without_storage():
        model = TextModel(own_config, attention, kernels, tie_word_embeddings=is_tied, ranks=ranks)
        whole = model if shard == WHOLE else TextModel(text_config, tie_word_embeddings=is_tied)
    share = None if shard == WHOLE else Share(whole, owned_parameters(whole, text_config, shard))
    load_weights(model, stored, text_destinations(whole, stored), dtype=dtype, device=device, share=share)
    if shard.rank > 0:
        _drop_biases_of_sums(model)
    model.eval()
    if pack:
        model.pack()
    logger.info("language model loaded: %s kernels, %s attention", kernels.name, attention.name)
    return model


def _drop_biases_of_sums(model: TextModel) -> None:
    """A bias behind a sum over ranks is added once: by rank 0."""
    for name, parameter in model.named_parameters():
        if name.endswith(".o_proj.bias"):
            parameter.data.zero_()


def _has_own_lm_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a checkpoint that calls itself tied stores an output projection that differs; the reference uses it."""
    if LM_HEAD not in stored or EMBED not in stored:
        return False
    head, table = stored[LM_HEAD], stored[EMBED]
    is_alike = (head.shape, head.dtype) == (table.shape, table.dtype)
    own = not (is_alike and torch.equal(read_tensor(head), read_tensor(table)))
    if own:
        logger.warning(
            "config.json ties the word embeddings, but lm_head.weight differs from them; it is used as it is"
        )
    return own


def _drop_tied_copy(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Keep one of two equal tables, under the name of the embeddings."""
    kept = dict(stored)
    copy = kept.pop(LM_HEAD, None)
    if copy is not None:
        kept.setdefault(EMBED, copy)
    return kept


def text_destinations(model: TextModel, stored: Mapping[str, StoredTensor]) -> dict[str, Destination]:
    """Where each checkpoint tensor goes, by canonical name. `stored` decides between the expert layouts."""
    destinations: dict[str, Destination] = {}
    for name, parameter in model.named_parameters():
        experts = _EXPERTS.match(name)
        if name == LM_HEAD:
            destinations[LM_HEAD] = Destination(name)
        elif experts:
            destinations.update(_expert_destinations(name, tuple(parameter.shape), stored))
        elif ".qkv_proj." in name:
            destinations.update(_qkv_destinations(model, name))
        elif ".gate_up_proj." in name:
            destinations.update(
                _split_rows(
                    name,
                    "gate_up_proj",
                    {"gate_proj": parameter.shape[0] // 2, "up_proj": parameter.shape[0] // 2},
                )
            )
        else:
            destinations[f"language_model.{name}"] = Destination(name)
    return destinations


def _qkv_destinations(model: TextModel, name: str) -> dict[str, Destination]:
    config = model.config
    kv_rows = num_kv_heads(config) * config.head_dim
    rows = {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
    return _split_rows(name, "qkv_proj", rows)


def _split_rows(name: str, fused: str, rows: Mapping[str, int]) -> dict[str, Destination]:
    """Consecutive rows of one fused parameter, each from a tensor of its own."""
    destinations = {}
    start = 0
    for part, count in rows.items():
        source = f"language_model.{name.replace(fused, part)}"
        destinations[source] = Destination(name, (slice(start, start + count),))
        start += count
    return destinations


def _expert_destinations(
    name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Destination]]:
    """One fused tensor in either orientation, or one tensor for each expert.

    `shape` is ours and transformers' own: [experts, out, in]. Published checkpoints store [experts, in, out].
    """
    fused = stored.get(f"language_model.{name}")
    if fused is None and f"language_model.{name.rpartition('.')[0]}.0.down_proj.weight" in stored:
        yield from _per_expert_destinations(name, shape)
        return
    num_experts, out_size, in_size = shape
    if fused is not None and out_size == in_size:
        raise CheckpointError(
            f"{fused.name} is square ([{num_experts}, {out_size}, {in_size}]), so its orientation cannot be told; "
            "store one tensor for each expert"
        )
    is_transposed = fused is not None and fused.shape == (num_experts, in_size, out_size)
    yield f"language_model.{name}", Destination(name, is_transposed=is_transposed)


def _per_expert_destinations(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Destination]]:
    prefix, _, leaf = name.rpartition(".")
    num_experts, out_size, _ = shape
    if leaf == "gate_up_proj":
        half = out_size // 2
        regions = {"gate_proj": (slice(0, half),), "up_proj": (slice(half, out_size),)}
    else:
        regions = {"down_proj": (slice(None),)}
    for expert in range(num_experts):
        for part, rows in regions.items():
            yield f"language_model.{prefix}.{expert}.{part}.weight", Destination(name, (expert, *rows))
