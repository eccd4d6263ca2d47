"""Where a checkpoint lies: a local directory as it is, or a hub id of which only the role's files are fetched.

Owns the lists of files per role and the reading of the shard index. Knows no torch: the gateway uses it for its
tokenizer and processor files. Blocking; runs once, at start, in a thread of its own.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from common.checkpoint_names import Role, is_shard_name, role_of
from common.errors import CheckpointError, ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# The largest published index (235B, one tensor an expert) is about 4 MB.
MAX_INDEX_BYTES = 64 << 20

_CONFIG_FILES: dict[Role, tuple[str, ...]] = {
    "encoder": (
        "config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ),
    # The vocabulary is what structured output needs of the tokenizer.
    "decoder": ("config.json", "generation_config.json", "tokenizer.json"),
    "gateway": (
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.json",
        "chat_template.jinja",
    ),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def resolve_checkpoint(model: str, role: Role, revision: str | None = None) -> Path:
    """The directory of a checkpoint. A local directory is taken as it is; a hub id is downloaded for the role."""
    local = Path(model).expanduser()
    if model and local.is_dir():
        return local
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"the model {model!r} is neither a directory nor a hub id (owner/name); give one of the two")
    try:
        return _download(model, role, revision)
    except RevisionNotFoundError as exc:
        raise ConfigError(f"the hub's {model!r} has no revision {revision!r}; check the revision") from exc
    except RepositoryNotFoundError as exc:
        raise ConfigError(
            f"the model {model!r} is neither a local directory nor found on the hub; "
            "check the name, or set HF_TOKEN if it is private"
        ) from exc
    except (HfHubHTTPError, httpx.HTTPError, OSError) as exc:
        raise ConfigError(
            f"the model {model!r} could not be downloaded ({type(exc).__name__}); "
            "check the network, or give a local directory"
        ) from exc


def _download(model: str, role: Role, revision: str | None) -> Path:
    """Fetch the role's small files first, then only the shards that the index assigns to the role."""
    wanted = [*_CONFIG_FILES[role], *([] if role == "gateway" else [INDEX_FILE])]
    path = Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    if role == "gateway":
        return path
    shards = role_shards(path, role)
    # The folder of a snapshot is named by its commit: both steps read the same one.
    path = Path(snapshot_download(model, revision=path.name, allow_patterns=shards))
    absent = [name for name in shards if not (path / name).is_file()]
    if absent:
        raise CheckpointError(
            f"the hub's {model!r} lacks {', '.join(absent[:5])}; only safetensors checkpoints can be served"
        )
    return path


def role_shards(checkpoint_dir: Path, role: Role) -> list[str]:
    """Names of the safetensors files that hold tensors of the role, sorted; the single file if there is no index."""
    weight_map = read_index(checkpoint_dir)
    if weight_map is None:
        return [SINGLE_FILE]
    return sorted({shard for name, shard in weight_map.items() if role_of(name) == role})


def read_index(checkpoint_dir: Path) -> dict[str, str] | None:
    """The index's map from stored tensor name to shard file name, or None for a checkpoint without an index."""
    path = checkpoint_dir / INDEX_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{INDEX_FILE} has {path.stat().st_size} bytes, at most {MAX_INDEX_BYTES} are read")
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{INDEX_FILE} is not JSON with a weight_map; download the checkpoint again") from exc
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"the weight_map of {INDEX_FILE} is empty or no object; download the checkpoint again")
    _check_shard_names(weight_map.values())
    return weight_map


def _check_shard_names(names: Iterable[object]) -> None:
    bad = sorted({str(name)[:100] for name in names if not is_shard_name(name)})
    if bad:
        raise CheckpointError(f"{INDEX_FILE} names {bad[0]!r}: a shard must be a plain *.safetensors file name")
