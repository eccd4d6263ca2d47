"""The one function that names media: which bytes, processed how, encoded by what, for whom.

Two items share a key only if their embeddings are equal, so the key covers everything that the embedding depends on,
each field framed by its length so that no two field lists can read the same. Pure; used by the gateway.
"""

import hashlib

import msgspec

from common.messages import MediaOptions, Modality

_encoder = msgspec.json.Encoder(order="deterministic")


def media_key(
    source: bytes | memoryview,
    *,
    modality: Modality,
    options: MediaOptions,
    fingerprint: str,
    cache_salt: str | None = None,
) -> str:
    """SHA-256, in hex, over the source bytes and all that changes their embedding.

    `fingerprint` stands for the vision weights, the processor's settings and the wire dtype. `cache_salt` keeps
    tenants apart: with different salts the same picture has different keys.
    """
    digest = hashlib.sha256()
    fields = (
        b"tandem.media_key.v1",
        source,
        modality.encode(),
        _encoder.encode(options),
        fingerprint.encode(),
        b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass"),
    )
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()
