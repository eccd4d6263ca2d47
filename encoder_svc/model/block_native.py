"""The tower's layers that treat rows alone by the compiled kernels of `block_amx.cpp`: bfloat16 on processors with AMX.

Owns the layout of the weights and the calls through ctypes. A thread takes some rows through all layers on one side of
a block's attention, or of a merger, so that nothing between them leaves its core's cache. The library is optional
(`amx.py`). Knows nothing of images. Runs in the compute thread. Legend: `P` packed patches, `C` width of the tower, `J`
width of the m*m patches that a merger joins.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelFailure
from encoder_svc.model.kernels import Linear, rows_per_tile

TILE = 32  # rows and columns of a product at once
ACTIVATION = "gelu_pytorch_tanh"  # the one that the kernel has, and all published towers


@dataclass(frozen=True)
class BlockLayers:
    """The layers of one block, in the checkpoint's terms. What takes their weights leaves them without."""

    norm1: nn.LayerNorm
    qkv: Linear
    proj: Linear
    norm2: nn.LayerNorm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class _Layer:
    """A weight in tiles and its bias in float32; both sizes are filled up with zeros to whole tiles."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: Linear) -> "_Layer":
        weight, bias = linear.take_weights()
        weight = F.pad(weight, (0, -weight.shape[1] % TILE, 0, -weight.shape[0] % TILE))
        return cls(in_tiles(weight), F.pad(bias.float(), (0, -len(bias) % TILE)))


class AmxBlock:
    """The layers before a block's attention, and those behind it."""

    def __init__(self, library: ctypes.CDLL, layers: BlockLayers, num_heads: int) -> None:
        self._library = library
        self._num_heads = num_heads
        self._eps = layers.norm1.eps
        self._norm1, self._norm2 = (_norm_of(norm) for norm in (layers.norm1, layers.norm2))
        self._qkv, self._proj, self._fc1, self._fc2 = (
            _Layer.of(linear) for linear in (layers.qkv, layers.proj, layers.fc1, layers.fc2)
        )

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """q, k (rotated) and v of the normed rows.

        hidden    [P, C] bfloat16
        cos, sin  [P, 1, 1, head_dim/2] float32
        out       [P, 3, heads, head_dim] bfloat16, each head's patches together, written
        """
        num_patches, width = _checked(hidden)
        assert cos.shape == sin.shape == (num_patches, 1, 1, width // self._num_heads // 2)
        assert out.permute(1, 2, 0, 3).is_contiguous()
        assert out.numel() == 3 * hidden.numel()
        failed = self._library.tandem_project_qkv(
            hidden.data_ptr(),
            self._norm1.weight.data_ptr(),
            self._norm1.bias.data_ptr(),
            self._eps,
            self._qkv.weight.data_ptr(),
            self._qkv.bias.data_ptr(),
            cos.contiguous().data_ptr(),
            sin.contiguous().data_ptr(),
            out.data_ptr(),
            num_patches,
            width,
            self._num_heads,
            _rows_at_once(num_patches, 4 * width),
            torch.get_num_threads(),
        )
        _check_memory(failed, num_patches)

    def finish(self, mixed: Tensor, hidden: Tensor) -> None:
        """Add to `hidden` [P, C], in place: the output projection of `mixed` [P, heads, head_dim], then the MLP."""
        num_patches, width = _checked(hidden)
        assert mixed.numel() == hidden.numel()
        assert mixed.dtype == hidden.dtype
        mixed = mixed.contiguous()
        inner = len(self._fc1.bias)
        failed = self._library.tandem_finish_block(
            mixed.data_ptr(),
            hidden.data_ptr(),
            self._proj.weight.data_ptr(),
            self._proj.bias.data_ptr(),
            self._norm2.weight.data_ptr(),
            self._norm2.bias.data_ptr(),
            self._eps,
            self._fc1.weight.data_ptr(),
            self._fc1.bias.data_ptr(),
            self._fc2.weight.data_ptr(),
            self._fc2.bias.data_ptr(),
            num_patches,
            width,
            inner,
            _rows_at_once(num_patches, width + inner),
            torch.get_num_threads(),
        )
        _check_memory(failed, num_patches)


class AmxMerger:
    """A merger's norm and MLP, whose GELU is the exact one."""

    def __init__(self, library: ctypes.CDLL, norm: nn.LayerNorm, fc1: Linear, fc2: Linear) -> None:
        self._library = library
        self._eps = norm.eps
        self._norm = _norm_of(norm)
        self._fc1, self._fc2 = _Layer.of(fc1), _Layer.of(fc2)

    def merge(self, joined: Tensor, out: Tensor) -> None:
        """[R, J] bfloat16 -> `out` [R, out_hidden], written; its rows may lie apart."""
        num_rows, width = _checked(joined)
        assert width == len(self._fc1.bias)
        assert out.shape == (num_rows, len(self._fc2.bias))
        assert out.dtype == joined.dtype
        assert out.stride(1) == 1
        failed = self._library.tandem_merge(
            joined.data_ptr(),
            self._norm.weight.data_ptr(),
            self._norm.bias.data_ptr(),
            self._eps,
            len(self._norm.bias),
            self._fc1.weight.data_ptr(),
            self._fc1.bias.data_ptr(),
            self._fc2.weight.data_ptr(),
            self._fc2.bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            width,
            out.shape[1],
            _rows_at_once(num_rows, 2 * width),
            torch.get_num_threads(),
        )
        _check_memory(failed, num_rows)


def merges(width: int, out_width: int) -> bool:
    """Whether the kernel computes mergers for a tower and a text model of such widths."""
    return width % TILE == 0 and out_width % TILE == 0


def takes(width: int, head_dim: int, hidden_act: str) -> bool:
    """Whether the kernels compute blocks of such sizes and activation."""
    return width % TILE == 0 and head_dim % 2 == 0 and hidden_act == ACTIVATION


def in_tiles(weight: Tensor) -> Tensor:
    """A weight [out, in], both multiples of 32, as [out / 32, in / 32, 2, 16 pairs of in, 16 of out, 2]."""
    out_size, in_size = weight.shape
    tiles = weight.reshape(out_size // TILE, 2, TILE // 2, in_size // TILE, TILE // 2, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()


def _norm_of(norm: nn.LayerNorm) -> _Layer:
    return _Layer(norm.weight.detach().float(), norm.bias.detach().float())


def _checked(hidden: Tensor) -> tuple[int, int]:
    assert hidden.dtype == torch.bfloat16
    assert hidden.device.type == "cpu"
    assert hidden.is_contiguous()
    num_patches, width = hidden.shape
    return num_patches, width


def _rows_at_once(num_rows: int, columns: int) -> int:
    """Rows that one thread takes: what its cache holds, fewer where there are too few for all threads."""
    share = -(-num_rows // torch.get_num_threads())
    return min(rows_per_tile(2 * columns), -(-share // TILE) * TILE)


def _check_memory(failed: int, num_rows: int) -> None:
    if failed:
        raise ModelFailure(f"there is no memory for the layers of {num_rows} rows: allow fewer patches a batch")
