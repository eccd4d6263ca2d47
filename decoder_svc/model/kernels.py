"""The small operations of a decoder layer, and who does them: plain torch, or the compiled kernels on CPU.

Owns the choice, torch's form of each operation, and the calls into `kernels.cpp` and `most_likely.cpp` through ctypes.
The compiled library is optional: it is built at installation where there is a compiler, and both forms are tested to
agree. Knows nothing of layers or sequences. Runs in the compute thread. Legend: `T` packed tokens, `H` hidden, `D`
head_dim, `R` rows of logits.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.compiled_library import find_compiled_library
from common.errors import ConfigError
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.amx import amx_library

# Sizes that `kernels.cpp` has room for, and what the kernels for processors with AMX take.
LANES, MAX_HEAD_DIM = 16, 256
AMX_HEAD_DIMS, AMX_TOKENS, AMX_MAX_GROUP, AMX_PAIRS = (64, 128), 16, 16, 32

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "tandem_rms_norm": [_INT, *[_POINTER] * 4, _SIZE, _SIZE, _FLOAT, _INT],
    "tandem_silu_gate": [_INT, *[_POINTER] * 2, _SIZE, _SIZE, _INT],
    "tandem_store_heads": [_INT, *[_POINTER] * 8, *[_SIZE] * 5, _FLOAT, _INT],
    "tandem_attend_decode": [_INT, *[_POINTER] * 4, _SIZE, *[_POINTER] * 3, *[_SIZE] * 5, _INT],
    "tandem_most_likely": [_INT, *[_POINTER] * 3, _SIZE, _SIZE, _INT],
}


class Heads(NamedTuple):
    """How the columns of a fused qkv projection are heads, and the norms of q and k [D]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor
    k_norm: Tensor
    eps: float


class Kernels(Protocol):
    """Operations that both forms offer, with equal results but for rounding."""

    @property
    def name(self) -> str:
        """What logs call this form."""
        ...

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
        """[T, H] divided by its root mean square, times weight [H]; `hidden` takes `delta` [T, H] in first."""
        ...

    def gate(self, gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        """[T, 2 * I], gates then ups -> [T, I]: act(gate) * up."""
        ...

    def store_heads(
        self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, slots: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        """Norm and rotate q and k, and put k and v into the cache.

        qkv       [T, (heads + 2 * kv_heads) * D]
        cos, sin  [T, D/2] float32
        slots     [T] int64
        returns   q [T, heads, D]
        """
        ...

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row [R, vocab] the largest number's place [R] int64, and whether all are finite [R] bool.

        Of equals it is the first one. A row that is not finite has any place.
        """
        ...


class TorchKernels:
    """Plain torch, on any device and in any dtype."""

    name = "torch"

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            hidden += delta
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return weight * (wide * scale).to(hidden.dtype)

    def gate(self, gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    def store_heads(
        self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, slots: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        turned = self.turn_heads(qkv, heads, cos, sin)
        values = qkv.view(qkv.shape[0], -1, heads.head_dim)[:, turned.shape[1] :]
        cache.write(layer, slots, turned[:, heads.num_heads :], values)
        return turned[:, : heads.num_heads]

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        is_host = logits.device.type == "cpu"
        scores = (
            logits.float() if is_host else logits
        )  # of which NumPy finds the largest in a twentieth of torch's time
        # NaN is the largest and the smallest of a row that has one; looking at each number takes ten times as long.
        is_finite = torch.isfinite(scores.amax(dim=1)) & torch.isfinite(scores.amin(dim=1))
        return torch.from_numpy(scores.numpy().argmax(axis=1)) if is_host else scores.argmax(dim=1), is_finite

    def turn_heads(self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm and rotate q and k, as for `store_heads`: [T, heads + kv_heads, D]."""
        parts = qkv.view(qkv.shape[0], -1, heads.head_dim)
        num_turned = heads.num_heads + heads.num_kv_heads
        # q and k together, in float32: half the operations, and one rounding.
        weight = torch.cat(
            [heads.q_norm.expand(heads.num_heads, -1), heads.k_norm.expand(heads.num_kv_heads, -1)]
        ).float()
        wide = parts[:, :num_turned].float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(heads.eps)) * weight
        first, second = wide.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)


class TorchCompiledKernels(TorchKernels):
    """Torch's forms, each fused by torch.compile into few launches, for any number of tokens. For CUDA."""

    name = "torch.compile"

    def __init__(self, backend: str = "inductor") -> None:
        torch_form = TorchKernels()
        fuse = functools.partial(torch.compile, dynamic=True, fullgraph=True, backend=backend)
        self.rms_norm = fuse(torch_form.rms_norm)  # type: ignore[method-assign]
        self.gate = fuse(torch_form.gate)  # type: ignore[method-assign]
        self.turn_heads = fuse(torch_form.turn_heads)  # type: ignore[method-assign]


class NativeKernels:
    """The compiled kernels: CPU, float32 and bfloat16, multiples of 16. All else goes to torch's form."""

    name = "compiled"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for function, types in _SIGNATURES.items():
            getattr(self._library, function).argtypes = types
            getattr(self._library, function).restype = None
        self._torch = TorchKernels()
        self._amx = amx_library()

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
        rows, size = hidden.shape
        if not fits_kernels(size, hidden, weight, delta):
            return self._torch.rms_norm(hidden, weight, eps, delta)
        out = torch.empty_like(hidden)
        arguments = (
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        if self._amx is not None and _fits_pairs(hidden, size):
            self._amx.tandem_rms_norm_amx(*arguments)
        else:
            self._library.tandem_rms_norm(hidden.dtype == torch.bfloat16, *arguments)
        return out

    def gate(self, gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if act is not F.silu or not fits_kernels(size, gate_up):
            return self._torch.gate(gate_up, act)
        out = gate_up.new_empty(rows, size)
        arguments = (gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        if self._amx is not None and _fits_pairs(gate_up, size):
            self._amx.tandem_silu_gate_amx(*arguments)
        else:
            self._library.tandem_silu_gate(gate_up.dtype == torch.bfloat16, *arguments)
        return out

    def store_heads(
        self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, slots: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        is_dense = cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
        fits = fits_kernels(heads.head_dim, qkv, heads.q_norm, heads.k_norm, cache.pool)
        if heads.head_dim % (2 * LANES) or not (fits and is_dense):
            return self._torch.store_heads(qkv, heads, cos, sin, slots, cache, layer)
        q = qkv.new_empty(qkv.shape[0], heads.num_heads, heads.head_dim)
        arguments = (
            qkv.data_ptr(),
            heads.q_norm.data_ptr(),
            heads.k_norm.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            q.data_ptr(),
            cache.pool[layer].data_ptr(),
        )
        sizes = (
            qkv.shape[0],
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cache.block_size,
            heads.eps,
            torch.get_num_threads(),
        )
        if cache.bases is None:
            self._library.tandem_store_heads(qkv.dtype == torch.bfloat16, *arguments, *sizes)
        else:
            assert self._amx is not None, "a cache is compressed where these kernels are"
            self._amx.tandem_store_heads_compressed(*arguments, cache.bases[layer].data_ptr(), *sizes)
        return q

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        if not fits_kernels(LANES, logits):
            return self._torch.most_likely(logits)
        places, is_finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        self._library.tandem_most_likely(
            logits.dtype == torch.bfloat16,
            logits.data_ptr(),
            places.data_ptr(),
            is_finite.data_ptr(),
            rows,
            size,
            torch.get_num_threads(),
        )
        return places, is_finite

    def can_attend(self, cache: KVCache, *tables: Tensor) -> bool:
        """Whether `attend_decode` takes a cache's dtype and sizes, and int32 tables."""
        return (
            cache.head_dim <= MAX_HEAD_DIM
            and fits_kernels(cache.head_dim, cache.pool)
            and all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
        )

    def attend_decode(
        self, q: Tensor, cache: KVCache, layer: int, tables: Tensor, contexts: Tensor, which: Tensor, rows: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """One new token of each of some sequences over its context, straight from its blocks.

        q, out    [T, heads, D], of which `rows` [d] int64 are read and written
        tables    [S, b] int32, contexts [S] int32, of which `which` [d] int64 are meant
        """
        assert q.dtype == out.dtype == cache.pool.dtype, "queries and the cache share a dtype"
        arguments = (
            out.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            contexts.data_ptr(),
            which.data_ptr(),
            rows.data_ptr(),
            rows.shape[0],
            q.shape[1],
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            torch.get_num_threads(),
        )
        if self._amx is not None and fits_amx(cache) and q.shape[1] <= AMX_MAX_GROUP * cache.num_kv_heads:
            self._amx.tandem_attend_decode_amx(q.data_ptr(), *_where(cache, layer), *arguments)
        else:
            assert cache.bases is None, "these kernels read plain blocks"
            pool = cache.pool[layer].data_ptr()
            self._library.tandem_attend_decode(q.dtype == torch.bfloat16, q.data_ptr(), pool, *arguments)

    def can_compress(
        self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> bool:
        """Whether the kernels write and read compressed blocks of such a cache, for queries of its dtype."""
        if self._amx is None or not _fits_amx(dtype, head_dim, block_size):
            return False
        block_bytes = 2 * num_kv_heads * block_size * head_dim * dtype.itemsize
        fits: bool = block_bytes <= self._amx.tandem_max_compressed_block()
        return fits and num_heads <= AMX_MAX_GROUP * num_kv_heads

    def can_attend_prefill(self, cache: KVCache) -> bool:
        """Whether `attend_prefill` takes a cache's dtype and sizes."""
        return self._amx is not None and fits_amx(cache)

    def attend_prefill(
        self, q: Tensor, cache: KVCache, layer: int, tables: Tensor, contexts: Tensor, starts: Tensor, which: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """The new tokens of some sequences, each over its context up to itself.

        q, out    [T, heads, D]
        tables    [S, b] int32, contexts [S] int32, starts [S+1] int32: first row of each sequence, then T
        which     [p] int64, the sequences that are meant
        """
        assert self._amx is not None, "there are no such kernels without AMX"
        assert q.dtype == out.dtype == cache.pool.dtype, "queries and the cache share a dtype"
        failed = self._amx.tandem_attend_prefill_amx(
            q.data_ptr(),
            *_where(cache, layer),
            out.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            contexts.data_ptr(),
            starts.data_ptr(),
            which.data_ptr(),
            which.shape[0],
            q.shape[1],
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the values of a sequence")


def fits_amx(cache: KVCache) -> bool:
    """Whether the kernels for processors with AMX take a cache's dtype and sizes."""
    return _fits_amx(cache.pool.dtype, cache.head_dim, cache.block_size)


def _fits_amx(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    return dtype == torch.bfloat16 and head_dim in AMX_HEAD_DIMS and block_size % AMX_TOKENS == 0


def _fits_pairs(rows: Tensor, size: int) -> bool:
    """Whether rows of `size` numbers are such as the small kernels for processors with AMX take."""
    return rows.dtype == torch.bfloat16 and size % AMX_PAIRS == 0


def _where(cache: KVCache, layer: int) -> tuple[int, int | None]:
    """A layer's blocks, and how they are kept."""
    return cache.pool[layer].data_ptr(), None if cache.bases is None else cache.bases[layer].data_ptr()


def fits_kernels(size: int, *tensors: Tensor | None) -> bool:
    """Whether tensors have the dtype and the density that the compiled kernels assume."""
    dtype = None
    for tensor in tensors:  # a plain loop: each microsecond is paid five times a layer
        if tensor is None:
            continue
        dtype = dtype or tensor.dtype
        if tensor.dtype != dtype or not (tensor.is_cpu and tensor.is_contiguous()):
            return False
    return size % LANES == 0 and dtype in (torch.float32, torch.bfloat16)


def compiled_library() -> Path | None:
    """The library that the installation built beside this file, if it did."""
    return find_compiled_library(Path(__file__).parent, "_kernels")


def select_kernels(device: torch.device | str, *, compile_layers: bool = False) -> TorchKernels | NativeKernels:
    """The compiled kernels on CPU where they were built, else plain torch, with `compile_layers` by torch.compile.

    Raises ConfigError for `compile_layers` on CPU, where our own kernels are faster.
    """
    if compile_layers:
        if torch.device(device).type == "cpu":
            raise ConfigError("--compile-layers is for CUDA: on CPU the decoder has kernels of its own; leave it out")
        return TorchCompiledKernels()
    library = compiled_library() if torch.device(device).type == "cpu" else None
    return TorchKernels() if library is None else NativeKernels(library)
