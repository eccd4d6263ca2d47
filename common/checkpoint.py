"""Reading a checkpoint: its configuration, the tensors of one role, and a strict load into a module.

A service opens only the safetensors files that hold its role's tensors, and reads only those tensors: the other
half may be absent from the disk. Everything unknown, missing or wrong-shaped is collected into one
`CheckpointError`. Knows nothing of the modules' layouts: they say where each tensor goes by a `Destination`.
Runs once, at start, in a thread of its own. The gateway never imports this module (torch).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig

from common.checkpoint_names import Role, canonical_name, role_of
from common.checkpoint_regions import Destination, Owned, pieces_of
from common.errors import CheckpointError
from common.hub import INDEX_FILE, SINGLE_FILE, read_index

MAX_CONFIG_BYTES = 8 << 20
MAX_LISTED = 20
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_CONFIG_CLASSES: dict[str, type[Qwen3VLConfig] | type[Qwen3VLMoeConfig]] = {
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: the file, the name in it, its shape, and safetensors' name of its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_model_config(checkpoint_dir: Path) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """Parse `config.json`. Another model type, an invalid value or a quantised checkpoint is refused by name."""
    raw = _read_config_json(checkpoint_dir)
    model_type = raw.get("model_type")
    config_class = _CONFIG_CLASSES.get(model_type) if isinstance(model_type, str) else None
    if config_class is None:
        served = ", ".join(sorted(_CONFIG_CLASSES))
        raise CheckpointError(f"config.json has model_type {repr(model_type)[:100]}; served are {served}")
    _refuse_quantized(raw)
    try:
        return config_class.from_dict(raw)
    except Exception as exc:  # transformers' validators raise many kinds; all mean that config.json is wrong
        raise CheckpointError(f"config.json is not a valid {model_type} configuration: {str(exc)[:500]}") from exc


def _read_config_json(checkpoint_dir: Path) -> dict[str, Any]:
    path = checkpoint_dir / "config.json"
    if not path.is_file():
        raise CheckpointError("the checkpoint has no config.json; give the directory of a Qwen3-VL checkpoint")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"config.json has {path.stat().st_size} bytes, at most {MAX_CONFIG_BYTES} are read")
    try:
        raw = json.loads(path.read_bytes())
    except ValueError as exc:
        raise CheckpointError("config.json is not JSON; download the checkpoint again") from exc
    if not isinstance(raw, dict):
        raise CheckpointError("config.json holds no object; download the checkpoint again")
    return raw


def _refuse_quantized(raw: dict[str, Any]) -> None:
    for part in (raw, raw.get("text_config"), raw.get("vision_config")):
        quantization = part.get("quantization_config") if isinstance(part, dict) else None
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"the checkpoint is quantised ({str(method)[:100]!r} in quantization_config), which is not supported; "
                "use the unquantised checkpoint"
            )


def role_tensors(checkpoint_dir: Path, role: Role) -> dict[str, StoredTensor]:
    """All tensors of a role by canonical name. Opens only files that hold some, and reads no tensor's bytes."""
    found: dict[str, StoredTensor] = {}
    for file, names in _names_by_file(checkpoint_dir, role).items():
        with _open(file) as handle:
            held = set(handle.keys())
            absent = sorted(name for name in names or () if name not in held)
            if absent:
                raise CheckpointError(f"{file.name} lacks tensors that {INDEX_FILE} lists in it: {_listed(absent)}")
            for stored_name in sorted(held if names is None else names):
                if role_of(stored_name) != role:
                    continue
                canonical = canonical_name(stored_name)
                if canonical in found:
                    raise CheckpointError(f"{stored_name} and {found[canonical].name} are the same tensor; keep one")
                piece = handle.get_slice(stored_name)
                found[canonical] = StoredTensor(file, stored_name, tuple(piece.get_shape()), piece.get_dtype())
    if not found:
        raise CheckpointError(f"the checkpoint holds no tensor for the {role}; give a whole Qwen3-VL checkpoint")
    return found


def _names_by_file(checkpoint_dir: Path, role: Role) -> dict[Path, list[str] | None]:
    """Files that hold tensors of the role, with their names in it; None where only the file itself knows."""
    weight_map = read_index(checkpoint_dir)
    if weight_map is None:
        return {checkpoint_dir / SINGLE_FILE: None}
    files: dict[Path, list[str] | None] = {}
    for name, shard in weight_map.items():
        if role_of(name) == role:
            names = files.setdefault(checkpoint_dir / shard, [])
            assert names is not None
            names.append(name)
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A safetensors handle over one file; a missing or damaged file is a `CheckpointError`."""
    if not file.is_file():
        raise CheckpointError(f"the checkpoint lacks {file.name}; download it again, in safetensors format")
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except SafetensorError as exc:
        raise CheckpointError(f"{file.name} is not a valid safetensors file; download it again") from exc


class _WithoutRandomInit(TorchFunctionMode):
    """Skips the random initialisation of modules: on the meta device it costs seconds of imports and fills nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Share:
    """What one of several processes holds: of the `owned` parameters of a `whole` module their share, else all."""

    whole: nn.Module
    owned: Mapping[str, Owned]


@contextmanager
def without_storage() -> Iterator[None]:
    """Modules built in this context have shapes and no memory, until `load_weights` fills them."""
    with torch.device("meta"), _WithoutRandomInit():
        yield


def load_weights(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    destinations: Mapping[str, Destination],
    *,
    dtype: torch.dtype,
    device: str,
    share: Share | None = None,
) -> None:
    """Fill a module that was built on the meta device, strictly, one tensor at a time.

    Each parameter is allocated once, in its final dtype and device, and each stored tensor is copied from the
    mapped file into its region, so the peak is the module plus one tensor. With a `share`, destinations are those in
    its whole module, the checkpoint must fit that, and of tensors that are shared out only the share is read.
    """
    whole = module if share is None else share.whole
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    _check_strictly(shapes, stored, destinations)
    parameters = _materialise(module, dtype, torch.device(device))
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.file, []).append(name)
    with torch.no_grad():
        for file, names in by_file.items():
            with _open(file) as handle:
                for name in names:
                    destination = destinations[name]
                    parameter, stored_name = parameters[destination.parameter], stored[name].name
                    owned = None if share is None else share.owned.get(destination.parameter)
                    if owned is None:
                        destination.view(parameter).copy_(handle.get_tensor(stored_name))
                        continue
                    for index, piece in pieces_of(destination, shapes[destination.parameter], owned):
                        piece.view(parameter).copy_(handle.get_slice(stored_name)[index])


def _check_strictly(
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    destinations: Mapping[str, Destination],
) -> None:
    """Collect everything that is wrong with what fills parameters of these shapes into one error."""
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    wrong_shape, wrong_dtype = [], []
    for name in sorted(stored.keys() & destinations.keys()):
        tensor = stored[name]
        expected = tuple(destinations[name].view(parameters[destinations[name].parameter]).shape)
        if tensor.shape != expected:
            wrong_shape.append(f"{tensor.name} has {_shape(tensor.shape)}, expected {_shape(expected)}")
        if tensor.dtype not in _DTYPES:
            wrong_dtype.append(f"{tensor.name} is {tensor.dtype}")
    problems = {
        "missing tensors": sorted(destinations.keys() - stored.keys()),
        "unknown tensors": sorted(stored[name].name for name in stored.keys() - destinations.keys()),
        "wrong shapes": wrong_shape,
        "unsupported dtypes": wrong_dtype,
    }
    found = [f"{len(items)} {kind}: {_listed(items)}" for kind, items in problems.items() if items]
    if found:
        raise CheckpointError("the checkpoint does not fit its config.json; " + "; ".join(found))


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Replace every parameter by an uninitialised one in its final place; move the buffers. Returns parameters."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in list(module.named_parameters()):
        owner_name, _, leaf = name.rpartition(".")
        fresh = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
        setattr(module.get_submodule(owner_name), leaf, fresh)
        parameters[name] = fresh
    for name, buffer in list(module.named_buffers()):
        owner_name, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner_name), leaf, buffer.to(device))
    return parameters


def read_tensor(stored: StoredTensor) -> Tensor:
    """One tensor as it is stored, over the mapped file."""
    with _open(stored.file) as handle:
        tensor: Tensor = handle.get_tensor(stored.name)
        return tensor


def vision_fingerprint(checkpoint_dir: Path, processor_settings: bytes, wire_dtype: str) -> str:
    """Hex sha256 of all that decides a vision embedding: the tower's weights, the processor, the wire dtype.

    Names are canonical and sorted, so resharding or renaming the same weights keeps the fingerprint. Every field
    is framed by its length, so no two different inputs give the same bytes.
    """
    digest = hashlib.sha256()
    for field in (b"tandem-vision-1", processor_settings, wire_dtype.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    for name, stored in sorted(role_tensors(checkpoint_dir, "encoder").items()):
        header = f"{name}|{stored.dtype}|{_shape(stored.shape)}".encode()
        data = read_tensor(stored).contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(len(header).to_bytes(8, "little") + header + data.nbytes.to_bytes(8, "little"))
        digest.update(data.data)
    return digest.hexdigest()


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _listed(items: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more
