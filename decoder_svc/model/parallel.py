"""The language model over several processes: which share of each parameter a rank holds, and what ranks do together.

Owns the split: attention by heads, MLPs and each expert by inner columns, the output projection by vocabulary; all else
is whole in every rank. A rank's share is itself a smaller model, whose configuration `local_config` makes: what leaves
attention and MLP are then terms of a sum over ranks. Knows nothing of processes or sockets. Legend: `T` packed tokens,
`H` hidden, `R` rows whose logits are wanted.
"""

import copy
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from common.checkpoint_regions import Owned
from common.errors import ConfigError
from decoder_svc.model_input import ModelInput


@dataclass(frozen=True)
class Shard:
    """One rank of several."""

    rank: int
    size: int

    def of(self, count: int) -> tuple[int, int]:
        """This rank's part of `count` things that all ranks share alike."""
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each


WHOLE = Shard(0, 1)


class Ranks(Protocol):
    """What the ranks of a model do together. Rank 0 has the scheduler and samples; the others follow."""

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        ...

    @property
    def is_in_step(self) -> bool:
        """Whether other ranks are in the middle of a step that this one began."""
        ...

    def begin_step(self, model_input: ModelInput) -> None:
        """Rank 0 gives the others what it is about to run."""
        ...

    def sum(self, term: Tensor) -> Tensor:
        """[T, H] of each rank -> their sum, in place."""
        ...

    def join_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """Logits [R, columns of this rank] -> at rank 0 [R, num_columns]; this ends the step."""
        ...


class Alone:
    """A model that is whole in one process."""

    shard = WHOLE
    is_in_step = False

    def begin_step(self, model_input: ModelInput) -> None:
        """Nobody to tell."""

    def sum(self, term: Tensor) -> Tensor:
        return term

    def join_columns(self, part: Tensor, num_columns: int) -> Tensor:
        return part


def check_split(config: Qwen3VLTextConfig, size: int) -> None:
    """Raise ConfigError when a model cannot be split over so many ranks, with those that it can."""
    if not _can_split(config, size):
        possible = [n for n in range(1, config.num_attention_heads + 1) if _can_split(config, n)]
        raise ConfigError(
            f"--tp {size} does not divide this model of {config.num_attention_heads} attention heads, "
            f"{num_kv_heads(config)} KV heads and inner sizes {sorted(_inner_sizes(config))}: use one of {possible}"
        )


def _can_split(config: Qwen3VLTextConfig, size: int) -> bool:
    kv_heads = num_kv_heads(config)
    has_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
    return has_kv_heads and not any(count % size for count in (config.num_attention_heads, *_inner_sizes(config)))


def num_kv_heads(config: Qwen3VLTextConfig) -> int:
    """Heads of keys and values; a configuration that names none has one for each query head."""
    return int(config.num_key_value_heads or config.num_attention_heads)


def _inner_sizes(config: Qwen3VLTextConfig) -> set[int]:
    """Inner sizes of dense MLPs and of experts."""
    moe = {int(config.moe_intermediate_size)} if getattr(config, "num_experts", 0) else set()
    return {int(config.intermediate_size)} | moe


def local_config(config: Qwen3VLTextConfig, size: int) -> Qwen3VLTextConfig:
    """The configuration of one rank's share: fewer heads and inner columns, all else as it is.

    With more ranks than KV heads each has one head, which others have as well.
    """
    if size == 1:
        return config
    local = copy.deepcopy(config)
    local.head_dim = config.head_dim
    local.num_attention_heads = config.num_attention_heads // size
    local.num_key_value_heads = max(1, num_kv_heads(config) // size)
    local.intermediate_size = config.intermediate_size // size
    if getattr(config, "num_experts", 0):
        local.moe_intermediate_size = config.moe_intermediate_size // size
    return local


def vocabulary_range(vocab_size: int, shard: Shard) -> tuple[int, int]:
    """The rows of the output projection that a rank has: as many for each, but for the last ones."""
    each = -(-vocab_size // shard.size)
    return min(shard.rank * each, vocab_size), min((shard.rank + 1) * each, vocab_size)


def owned_parameters(whole: nn.Module, config: Qwen3VLTextConfig, shard: Shard) -> dict[str, Owned]:
    """A rank's share of each parameter of the whole model that is shared out."""
    found = {}
    for name, parameter in whole.named_parameters():
        owned = _owned(name, tuple(parameter.shape), config, shard)
        if owned is not None:
            found[name] = owned
    return found


def _owned(name: str, shape: tuple[int, ...], config: Qwen3VLTextConfig, shard: Shard) -> Owned | None:
    """Rows of what makes heads and inner columns, and the columns that meet them in what leads back to the stream.

    Experts' parameters have an axis for the expert before these two.
    """
    if name == "lm_head.weight":
        return Owned(0, (vocabulary_range(shape[0], shard),))
    if ".qkv_proj." in name:
        return Owned(0, _head_ranges(config, shard))
    if ".gate_up_proj" in name:
        axis = len(shape) - 2
        inner = shape[axis] // 2
        first, end = shard.of(inner)
        return Owned(axis, ((first, end), (inner + first, inner + end)))
    if name.endswith("o_proj.weight") or ".down_proj" in name:
        return Owned(len(shape) - 1, (shard.of(shape[-1]),))
    return None


def _head_ranges(config: Qwen3VLTextConfig, shard: Shard) -> tuple[tuple[int, int], ...]:
    """Rows of the fused qkv projection: this rank's query heads, and the KV heads that they use."""
    num_heads, kv_heads, head_dim = config.num_attention_heads, num_kv_heads(config), config.head_dim
    first, end = shard.of(num_heads)
    first_kv = shard.rank * kv_heads // shard.size
    end_kv = first_kv + max(1, kv_heads // shard.size)
    heads = [(first, end)] + [(start + first_kv, start + end_kv) for start in (num_heads, num_heads + kv_heads)]
    return tuple((low * head_dim, high * head_dim) for low, high in heads)


def pad_columns(part: Tensor, num_columns: int, size: int) -> Tensor:
    """[R, columns of a rank] -> as many columns as every rank has that is not the last."""
    return F.pad(part, (0, -(-num_columns // size) - part.shape[1]))
