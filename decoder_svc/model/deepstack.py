"""How a vision embedding's DeepStack levels join the residual stream. A pure tensor function."""

from torch import Tensor


def add_deepstack(hidden: Tensor, vision_rows: Tensor, level: Tensor) -> None:
    """Add one DeepStack level to the vision rows of the residual stream, in place.

    hidden       [T, H]          output of decoder layer i, for i < L
    vision_rows  [V]     int64   rows of `hidden` that are vision tokens, ascending
    level        [V, H]          output of DeepStack merger i

    Source: transformers 5.24, modeling_qwen3_vl.py, `_deepstack_process`.
    """
    hidden.index_add_(0, vision_rows, level)
