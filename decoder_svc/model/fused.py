"""All layers of a step in one call, where the kernels for processors with AMX can run each of them.

Owns the choice and what `layers_amx.cpp` is given. In Python it takes 3 ms of a step of eight layers to call, allocate
and check for each operation, a quarter of what a step of single tokens takes; the results are equal to the last bit.
Several ranks go layer by layer, since they add up in the middle of each. Runs in the compute thread. Legend: `T` packed
tokens, `V` vision tokens, `H` hidden.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.model.amx import amx_library
from decoder_svc.model.attention import NativePlan
from decoder_svc.model.deepstack import add_deepstack
from decoder_svc.model.kernels import AMX_MAX_GROUP, NativeKernels, fits_amx, fits_kernels
from decoder_svc.model.layers import DecoderLayer, RMSNorm, StepContext, TextAttention, TextMLP
from decoder_svc.model.linear import Linear
from decoder_svc.model.tiles import TiledWeight

_POINTER, _SIZE, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Shape(ctypes.Structure):
    """`TandemShape` of `layers_amx.cpp`."""

    _fields_ = (
        *((name, _SIZE) for name in ("hidden", "inner", "num_heads", "num_kv_heads", "dim", "block_size")),
        ("eps", _DOUBLE),
        ("heads_eps", _DOUBLE),
    )


class _Layer(ctypes.Structure):
    """`TandemLayer` of `layers_amx.cpp`."""

    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm"),
            *("o", "o_bias", "post_norm", "gate_up", "down"),
        )
    )


class _Step(ctypes.Structure):
    """`TandemStep` of `layers_amx.cpp`."""

    _fields_ = (
        *((name, _POINTER) for name in ("hidden", "normed", "scratch", "pool", "bases", "cos", "sin", "slots")),
        *((name, _POINTER) for name in ("tables", "contexts", "starts", "decoding", "decoding_rows", "prefilling")),
        *((name, _SIZE) for name in ("rows", "num_decoding", "num_prefilling")),
        *((name, _SIZE) for name in ("table_width", "pool_stride", "bases_stride", "threads")),
    )


class FusedLayers:
    """A model's layers and the norm behind them."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        """Layers that can be fused; their parameters stay where they are from here on."""
        self._library = library
        attention, mlp = layers[0].self_attn, layers[0].mlp
        assert isinstance(mlp, TextMLP)
        self._shape = _Shape(
            hidden=norm.weight.shape[0],
            inner=mlp.down_proj.in_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            dim=attention.head_dim,
            eps=norm.eps,
            heads_eps=attention.q_norm.eps,
        )
        self._layers = (_Layer * len(layers))(*map(_pointers, layers))
        self._norm = norm.weight
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def can_run(self, hidden: Tensor, step: StepContext) -> bool:
        """Whether this step is one that these layers take."""
        return (
            isinstance(step.plan, NativePlan)
            and not step.plan.gathered
            and fits_amx(step.kv_cache)
            and fits_kernels(step.kv_cache.head_dim, hidden, step.kv_cache.pool)
            and all(tensor.is_contiguous() for tensor in (step.cos, step.sin, step.slot_mapping))
        )

    def run(self, hidden: Tensor, step: StepContext, levels: Sequence[Tensor], vision_rows: Tensor) -> Tensor:
        """Run a step that these layers take, with the DeepStack levels [V, H] that are added behind the first of them.

        hidden       [T, H]       the residual stream, which is overwritten
        vision_rows  [V] int64
        returns      [T, H]       what leaves the last norm
        """
        normed = torch.empty_like(hidden)
        arguments = self._arguments(hidden, normed, step)
        for layer, level in enumerate(levels):
            self._call(layer, 1, arguments)
            add_deepstack(hidden, vision_rows, level)
        if len(levels) < len(self._layers):
            self._call(len(levels), len(self._layers) - len(levels), arguments)
            return normed
        return step.kernels.rms_norm(hidden, self._norm, self._shape.eps)

    def _arguments(self, hidden: Tensor, normed: Tensor, step: StepContext) -> _Step:
        plan, cache = step.plan, step.kv_cache
        self._shape.block_size = cache.block_size
        return _Step(
            hidden=hidden.data_ptr(),
            normed=normed.data_ptr(),
            scratch=self._scratch_of(hidden.shape[0]).data_ptr(),
            pool=cache.pool.data_ptr(),
            bases=None if cache.bases is None else cache.bases.data_ptr(),
            cos=step.cos.data_ptr(),
            sin=step.sin.data_ptr(),
            slots=step.slot_mapping.data_ptr(),
            tables=plan.block_tables.data_ptr(),
            contexts=plan.context_lens.data_ptr(),
            starts=plan.cu_seqlens_q.data_ptr(),
            decoding=plan.decoding.data_ptr(),
            decoding_rows=plan.rows.data_ptr(),
            prefilling=plan.prefilling.data_ptr(),
            rows=hidden.shape[0],
            num_decoding=plan.decoding.shape[0],
            num_prefilling=plan.prefilling.shape[0],
            table_width=plan.block_tables.shape[1],
            pool_stride=cache.pool.stride(0) * cache.pool.itemsize,
            bases_stride=0 if cache.bases is None else cache.bases.stride(0),
            threads=torch.get_num_threads(),
        )

    def _call(self, first: int, count: int, arguments: _Step) -> None:
        """Run `count` layers from `first` on, which are the next ones of the step."""
        failed = self._library.tandem_run_layers(
            ctypes.addressof(self._shape),
            ctypes.addressof(self._layers[first]),
            count,
            self._norm.data_ptr(),
            ctypes.addressof(arguments),
        )
        if failed:
            raise MemoryError("no memory for what a step of the layers needs")
        arguments.pool += count * arguments.pool_stride
        if arguments.bases is not None:
            arguments.bases += count * arguments.bases_stride

    def _scratch_of(self, rows: int) -> Tensor:
        """Room for the intermediate results of so many rows, kept from step to step."""
        size = self._library.tandem_layers_scratch(ctypes.addressof(self._shape), rows)
        if self._scratch.shape[0] < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        return self._scratch


def fuse(layers: Sequence[DecoderLayer], norm: RMSNorm, kernels: object) -> FusedLayers | None:
    """Packed layers as one call, where the compiled kernels take all of them."""
    library = amx_library()
    if library is None or not isinstance(kernels, NativeKernels) or not all(_can_fuse(layer) for layer in layers):
        return None
    return FusedLayers(library, layers, norm)


def _can_fuse(layer: DecoderLayer) -> bool:
    """Whether a layer is dense, gated by SiLU, and packed in our tiles."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, TextMLP) or mlp.activation is not F.silu:
        return False
    if attention.num_heads > AMX_MAX_GROUP * attention.num_kv_heads:
        return False
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return all(product.is_in_tiles for product in products) and all(
        fits_kernels(norm.weight.shape[0], norm.weight) for norm in _norms(layer, attention)
    )


def _norms(layer: DecoderLayer, attention: TextAttention) -> tuple[RMSNorm, ...]:
    return layer.input_layernorm, attention.q_norm, attention.k_norm, layer.post_attention_layernorm


def _pointers(layer: DecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, TextMLP)
    input_norm, q_norm, k_norm, post_norm = (norm.weight.data_ptr() for norm in _norms(layer, attention))
    return _Layer(
        input_norm=input_norm,
        qkv=_packed(attention.qkv_proj),
        qkv_bias=_bias(attention.qkv_proj),
        q_norm=q_norm,
        k_norm=k_norm,
        o=_packed(attention.o_proj),
        o_bias=_bias(attention.o_proj),
        post_norm=post_norm,
        gate_up=_packed(mlp.gate_up_proj),
        down=_packed(mlp.down_proj),
    )


def _packed(product: Linear) -> int:
    assert isinstance(product.packed, TiledWeight)
    return product.packed.data.data_ptr()


def _bias(product: Linear) -> int | None:
    return None if product.bias is None else product.bias.data_ptr()
