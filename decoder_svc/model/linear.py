"""Linear layers whose weights are laid out once for the processor's matrix units.

Owns the layouts: on CPU the weight is reordered after loading, and the plain copy is dropped. A plain matrix product
reorders it in each call, which is most of its time for the few rows of a decode step. In bfloat16 on a processor with
AMX the layout and the product are ours (`linear_amx.cpp`, where it was built), else oneDNN's. Knows nothing of what the
layer is for. Packed once at start, used in the compute thread.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder_svc.model.amx import amx_library
from decoder_svc.model.tiles import TiledWeight, fits_tiles, lay_out


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can lay a weight out for this processor."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor | TiledWeight:
    """A weight [out, in] laid out for `packed_linear`, for any number of rows: in our tiles, or oneDNN's layout."""
    weight = weight.detach()
    if fits_tiles(weight) and amx_library() is not None:
        return lay_out(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def packed_linear(x: Tensor, packed: Tensor | TiledWeight, bias: Tensor | None = None) -> Tensor:
    """[rows, in] times a packed weight -> [rows, out]."""
    if isinstance(packed, TiledWeight):
        return _amx_linear(x, packed, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _amx_linear(x: Tensor, packed: TiledWeight, bias: Tensor | None) -> Tensor:
    library, x = amx_library(), x.contiguous()
    assert library is not None, "a weight in our tiles was packed here"
    assert x.dtype == torch.bfloat16
    assert x.shape[1] == packed.in_size, "rows fit the weight"
    out = x.new_empty(x.shape[0], packed.out_size)
    failed = library.tandem_linear_amx(
        x.data_ptr(),
        packed.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        out.shape[1],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for some panels of a weight")
    return out


class Linear(nn.Module):
    """`x @ weight.T + bias`. After `pack` there is no plain `weight` any more."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.in_size = in_size
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self.packed: Tensor | TiledWeight | None = None

    def pack(self) -> None:
        """Lay the weight out for the processor, where that can be done."""
        if self.weight is not None and can_pack(self.weight):
            self.packed = pack_weight(self.weight)
            self.weight = None

    @property
    def is_in_tiles(self) -> bool:
        """Whether the weight is packed in our tiles."""
        return isinstance(self.packed, TiledWeight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        assert self.weight is not None, "a layer is packed or it has its weight"
        return F.linear(x, self.weight, self.bias)
