"""Linear layers whose weights are laid out once for the processor's matrix units.

Owns the layout: on CPU the weight is reordered by oneDNN after loading, and the plain copy is dropped. A plain matrix
product reorders it in each call, which is most of its time for the few rows of a decode step. Knows nothing of what the
layer is for. Packed once at start, used in the compute thread.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can lay a weight out for this processor."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout, for any number of rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, in] times a packed weight -> [rows, out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class Linear(nn.Module):
    """`x @ weight.T + bias`. After `pack` there is no plain `weight` any more."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weight out for the processor, where that can be done."""
        if self.weight is not None and can_pack(self.weight):
            self._packed = pack_weight(self.weight)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        assert self.weight is not None, "a layer is packed or it has its weight"
        return F.linear(x, self.weight, self.bias)
