"""Tensors to payload bytes and back, without copies where memory allows it.

The only module of `common`, with `checkpoint`, that knows torch; the gateway imports neither.
"""

import os

import numpy as np
import torch
from torch import Tensor

from common.embedding import HOT_BYTES, Payload
from common.errors import ConfigError, ModelFailure
from common.int8_rows import unpack_rows
from common.messages import EmbeddingHeader, WireDtype

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
"""An integer dtype of the same size, and the bits of infinity, which is where the finite values of a dtype end."""


def dtype_name(dtype: torch.dtype) -> WireDtype:
    """The wire's name of a dtype; raises KeyError for one that never travels."""
    names: dict[torch.dtype, WireDtype] = {
        torch.float32: "float32",
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
    }
    return names[dtype]


def payload_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view: the tensor must outlive it or stay referenced by it."""
    return memoryview(tensor.detach().contiguous().view(torch.uint8).numpy().data).cast("B")


def tensor_of(header: EmbeddingHeader, payload: Payload, dtype: torch.dtype = torch.float32) -> Tensor:
    """The `[rows, width]` tensor of a payload whose length was checked against its header.

    Shares the payload's memory, except for int8, of which it is the values in `dtype`.
    """
    if header.dtype == "int8":
        return unpack_rows(torch.frombuffer(payload, dtype=torch.uint8).view(header.rows, -1), header.levels, dtype)
    flat = torch.frombuffer(payload, dtype=DTYPES[header.dtype])
    return flat.view(header.rows, header.width)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise ModelFailure when a value of a CPU tensor is NaN or infinite."""
    if not _is_finite(tensor):
        raise ModelFailure(f"{what} holds values that are not finite")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, from their bits: of one sign, all that is not lies above all that is.

    Two maxima of integers take 2 ms for 32 MB of bfloat16; torch.isfinite takes 150 ms on one core.
    """
    signed, first_not_finite = _BITS[tensor.dtype]
    unsigned = np.dtype(f"u{signed.itemsize}")
    first_negative = first_not_finite + (1 << (8 * signed.itemsize - 1))
    bits = tensor.detach().contiguous().view(-1).view(signed).numpy()
    for start in range(0, bits.size, HOT_BYTES):
        part = bits[start : start + HOT_BYTES]
        if part.max() >= first_not_finite or part.view(unsigned).max() >= first_negative:
            return False
    return True


def pick_device(name: str) -> str:
    """A device that exists: `auto` is CUDA where there is one. Raises ConfigError for one that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"{name!r} is no device: use cpu, cuda, cuda:N or auto") from exc
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return name


def pick_dtype(name: str, of_checkpoint: object) -> torch.dtype:
    """A compute dtype: `auto` is the checkpoint's, or float32 where it says none that we compute in."""
    if name != "auto":
        return DTYPES[name]
    if isinstance(of_checkpoint, torch.dtype) and of_checkpoint in DTYPES.values():
        return of_checkpoint
    return torch.float32


def use_threads(count: int) -> int:
    """Set the threads of torch's CPU kernels; 0 takes the cores that this process may use."""
    chosen = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen
