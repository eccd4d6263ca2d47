"""M-RoPE positions of a prompt: time, row and column of each token.

Pure: numpy and integers, no torch, no clock. Text advances all three axes together; a media span holds time still
and counts rows and columns of its merged grid; what follows starts one after the largest position so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MediaSpan:
    """Vision tokens `[offset, offset + num_tokens)` of a prompt: an image, or one frame group of a video.

    `grid_thw` is (frames, rows, columns) in patches; a video arrives as one span for each frame group, with t = 1.
    """

    offset: int
    grid_thw: tuple[int, int, int]
    merge_size: int

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the span."""
        t, h, w = self.grid_thw
        return t * (h // self.merge_size) * (w // self.merge_size)


def mrope_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
    """Positions of a prompt, and the delta of everything generated after it.

    spans    ascending, disjoint, inside the prompt
    returns  [3, num_tokens] int64, and delta: token i after the prompt has position i + delta on all axes

    Source: transformers 5.24, modeling_qwen3_vl.py, `Qwen3VLModel.get_rope_index`.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for span in spans:
        end = span.offset + span.num_tokens
        assert token <= span.offset, "media spans must be ascending and disjoint"
        assert end <= num_tokens, "media spans must lie inside the prompt"
        position = _fill_text(positions, token, span.offset, position)
        t, h, w = span.grid_thw
        rows, columns = h // span.merge_size, w // span.merge_size
        grid = np.indices((t, rows, columns), dtype=np.int64).reshape(3, -1)
        positions[:, span.offset : end] = grid + position
        token = end
        # The reference advances by the larger side alone: its spans have a single frame, or time within the sides.
        position += max(rows, columns)
    position = _fill_text(positions, token, num_tokens, position)
    highest = int(positions.max()) + 1 if num_tokens else 0
    return positions, highest - num_tokens


def _fill_text(positions: NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Number the tokens `[start, end)` from `position` on all axes; returns the next position."""
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start
