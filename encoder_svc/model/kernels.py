"""The layers' arithmetic in the form that the device runs fastest, of equal meaning on each.

Owns two things: how many rows go through a chain of layers at once, so that on a CPU what lies between them stays in
its cache, and the linear layer, with its weight laid out for the processor and its activation in the same kernel where
oneDNN has that. Knows nothing of the tower. Runs in the compute thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What one core's second-level cache holds at least, on the servers of the last years.
CACHE_BYTES_PER_THREAD = 1 << 20
# Whole multiples of 128: with AMX 341 rows took twice as long as 256.
MIN_TILE_ROWS, MAX_TILE_ROWS = 128, 512


@dataclass(frozen=True)
class Activation:
    """An activation as a function, and by the names that oneDNN's fused kernel has for it."""

    function: Callable[[Tensor], Tensor]
    fused_name: str
    fused_algorithm: str = ""


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, "gelu", "none"),
    "gelu_pytorch_tanh": Activation(partial(F.gelu, approximate="tanh"), "gelu", "tanh"),
    "silu": Activation(F.silu, "swish"),
    "relu": Activation(F.relu, "relu"),
}


def row_tiles(num_rows: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover the rows, each small enough for its widest intermediate of `row_bytes` a row to stay in cache.

    A GPU takes all rows at once.
    """
    step = rows_per_tile(row_bytes) * torch.get_num_threads() if device.type == "cpu" else num_rows
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def rows_per_tile(row_bytes: int) -> int:
    """How many rows of `row_bytes` each one core's cache holds, within limits."""
    fitting = CACHE_BYTES_PER_THREAD // row_bytes // MIN_TILE_ROWS * MIN_TILE_ROWS
    return min(max(fitting, MIN_TILE_ROWS), MAX_TILE_ROWS)


class Linear(nn.Module):
    """`activation(x @ weight.T + bias)`, without an activation where none is given.

    After `pack` there is no plain `weight` any more: on a CPU oneDNN lays it out for the processor once, where a plain
    product does so in every call.
    """

    def __init__(self, in_size: int, out_size: int, activation: Activation | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size))
        self._activation = activation
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weight out for the processor, where oneDNN runs the dtype natively."""
        if self.weight is not None and self.weight.device.type == "cpu" and has_fused_linear(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous())
            self.weight = None

    def take_weights(self) -> tuple[Tensor, Tensor]:
        """Weight [out, in] and bias [out], for another layout; the layer is of no use any more."""
        assert self.weight is not None, "it was packed or taken"
        weight, self.weight = self.weight.detach(), None
        return weight, self.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]; packed, it rounds once, after the activation, where the two steps round twice."""
        if self._packed is None:
            assert self.weight is not None, "a layer is packed or it has its weight"
            out = F.linear(x, self.weight, self.bias)
            return out if self._activation is None else self._activation.function(out)
        name, algorithm = "none", ""
        if self._activation is not None:
            name, algorithm = self._activation.fused_name, self._activation.fused_algorithm
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, name, [], algorithm)
        return fused


def has_fused_linear(dtype: torch.dtype) -> bool:
    """Whether oneDNN's fused kernel is there and this processor runs it natively in the dtype."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
