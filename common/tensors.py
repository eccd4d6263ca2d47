"""Tensors to payload bytes and back, without copies where memory allows it.

The only module of `common`, with `checkpoint`, that knows torch; the gateway imports neither.
"""

import os

import torch
from torch import Tensor

from common.embedding import Payload
from common.errors import ConfigError, ModelFailure
from common.messages import EmbeddingHeader, WireDtype

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


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


def tensor_of(header: EmbeddingHeader, payload: Payload) -> Tensor:
    """The `[rows, width]` tensor over a payload that was checked against its header. Shares the payload's memory."""
    flat = torch.frombuffer(payload, dtype=DTYPES[header.dtype])
    return flat.view(header.rows, header.width)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise ModelFailure when a value is NaN or infinite."""
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFailure(f"{what} holds values that are not finite")


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
