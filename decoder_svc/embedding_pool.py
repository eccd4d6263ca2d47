"""Embeddings in the engine's hands: kept while a sequence needs them, then as a small LRU for the next one.

Pure but for the tensors it holds. Owns who needs what; an embedding that no sequence needs is free at once, and stays
only as long as the LRU's byte budget allows. Used in the engine thread.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor


class EmbeddingPool:
    """Tensors `[tokens, H*(1+L)]` by media key."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._needed_by: dict[str, set[Any]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # present and needed by nobody, least recently used first
        self._idle_bytes = 0
        self._freed: list[str] = []
        self.tensors: dict[str, Tensor] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all embeddings here."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def need(self, sequence: object, keys: Seq[str]) -> None:
        """A sequence needs these items, present or not."""
        for key in keys:
            self._needed_by.setdefault(key, set()).add(sequence)
            if key in self._idle:
                del self._idle[key]
                self._idle_bytes -= self.tensors[key].nbytes

    def add(self, key: str, embedding: Tensor) -> None:
        """Take an embedding in."""
        if key in self.tensors:
            return
        self.tensors[key] = embedding
        if not self._needed_by.get(key):
            self._make_idle(key)

    def used(self, sequence: object, still_needed: Seq[str]) -> None:
        """A sequence now needs only these items: the rows of the others are in the KV cache."""
        for key in [k for k, needers in self._needed_by.items() if sequence in needers and k not in still_needed]:
            self._drop(sequence, key)

    def leave(self, sequence: object) -> None:
        """A sequence is finished or gone."""
        self.used(sequence, ())

    def take_freed(self) -> list[str]:
        """Keys that nobody needs any more since the last call; some may still be in the LRU."""
        freed, self._freed = self._freed, []
        return freed

    def _drop(self, sequence: object, key: str) -> None:
        self._needed_by[key].discard(sequence)
        if not self._needed_by[key]:
            del self._needed_by[key]
            if key in self.tensors:
                self._make_idle(key)

    def _make_idle(self, key: str) -> None:
        self._freed.append(key)
        self._idle[key] = None
        self._idle_bytes += self.tensors[key].nbytes
        while self._idle_bytes > self._cache_bytes:
            oldest, _ = self._idle.popitem(last=False)
            self._idle_bytes -= self.tensors.pop(oldest).nbytes
