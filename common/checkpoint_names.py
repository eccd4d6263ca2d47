"""Names of the tensors of a Qwen3-VL checkpoint, and which role needs which.

Owns the map from both published naming schemes to one canonical name: `visual.*`, `language_model.*` and
`lm_head.weight`. Pure string work: knows no torch, no files and no network, so the gateway may import it.
"""

import re
from typing import Literal

Role = Literal["encoder", "decoder", "gateway"]

# The newer scheme nests both halves in `model.`; in the older one `model.` is the language model alone.
_PREFIXES = (
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("language_model.", "language_model."),
    ("model.", "language_model."),
)
# Rotary frequencies follow from the configuration; some checkpoints store them as buffers.
_DERIVED = re.compile(r"\.rotary_(pos_)?emb\.inv_freq$")
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")


def canonical_name(stored_name: str) -> str:
    """The one name of a tensor under both schemes. A name of neither is returned as it is."""
    for stored, canonical in _PREFIXES:
        if stored_name.startswith(stored):
            return canonical + stored_name.removeprefix(stored)
    return stored_name


def role_of(stored_name: str) -> Role | None:
    """The role that must load a tensor: `visual.*` is the encoder's, all else the decoder's. None: skipped by both."""
    if _DERIVED.search(stored_name):
        return None
    return "encoder" if canonical_name(stored_name).startswith("visual.") else "decoder"


def is_shard_name(name: object) -> bool:
    """Whether an index may name this file: a plain safetensors file name, no path and no pattern."""
    return isinstance(name, str) and _SHARD_NAME.fullmatch(name) is not None
