"""Embeddings of any size for the encoder's tests."""

import os
from typing import Any

from common.embedding import checksum
from common.messages import EmbeddingHeader
from encoder_svc.embedding_store import HeldEmbedding

FINGERPRINT = "f" * 64


def key(number: int) -> str:
    """A media key."""
    return f"{number:064x}"


def held(number: int, num_bytes: int = 1024, **changes: Any) -> HeldEmbedding:
    """Random bytes under a header that fits them."""
    payload = os.urandom(num_bytes)
    fields: dict[str, Any] = {
        "key": key(number),
        "grid": (1, 4, 4),
        "dtype": "float32",
        "rows": 1,
        "width": num_bytes // 4,
        "levels": 3,
        "fingerprint": FINGERPRINT,
        "checksum": checksum(payload),
        "chunk_bytes": 1 << 20,
    }
    return HeldEmbedding(EmbeddingHeader(**{**fields, **changes}), memoryview(payload))
