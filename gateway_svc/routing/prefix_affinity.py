"""Which decoder has seen the beginning of a prompt before: so that the next turn of a conversation meets its KV cache.

A prompt is a chain of hashes, one for each full block of tokens, over all that the decoders' own prefix cache depends
on: ids, media keys in their places, and the salt. Each decoder's chains are remembered up to what its cache may hold.
It is a guess, which costs nothing when it is wrong. Pure.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from common.messages import GenerateRequest

BLOCK_TOKENS = 64
DEFAULT_BLOCKS = 4096  # of a decoder that does not say how much its cache holds
DIGEST_BYTES = 16


def prefix_hashes(request: GenerateRequest) -> list[bytes]:
    """One hash for each full block of the prompt; equal only where everything before is equal too."""
    tokens = memoryview(array("I", request.prompt_token_ids)).cast("B")
    size = BLOCK_TOKENS * array("I").itemsize
    keys = _keys_by_block(request)
    chain = hashlib.blake2b((request.cache_salt or "").encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
    hashes = []
    for block in range(len(request.prompt_token_ids) // BLOCK_TOKENS):
        chain.update(tokens[block * size : (block + 1) * size])
        for key in keys.get(block, ()):
            chain.update(key)
        hashes.append(chain.digest())
    return hashes


def _keys_by_block(request: GenerateRequest) -> dict[int, list[bytes]]:
    """Media keys, by the block that their first placeholder is in."""
    keys: dict[int, list[bytes]] = {}
    for item in request.media:
        keys.setdefault(item.spans[0].offset // BLOCK_TOKENS, []).append(item.key.encode())
    return keys


class SeenPrefixes:
    """What one decoder was sent, the least recently used forgotten first."""

    def __init__(self, max_tokens: int = 0) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS or DEFAULT_BLOCKS
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def count_tokens(self, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt that were there before."""
        num_blocks = 0
        for block in hashes:
            if block not in self._hashes:
                break
            num_blocks += 1
        return num_blocks * BLOCK_TOKENS

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remember a prompt. Its end is forgotten before its beginning, which is what others share."""
        for block in reversed(hashes[: self._max_blocks]):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)
