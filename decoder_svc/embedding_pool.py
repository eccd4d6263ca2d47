"""Embeddings in the engine's hands: kept while a sequence needs them, then as a small LRU for the next one.

Pure but for the tensors it holds. Owns who needs what; an embedding that no sequence needs stays only as long as the
LRU's byte budget allows. Counts the bytes that are needed no more, so that others may be fetched. Used in the engine
thread.
"""

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq

from torch import Tensor


class EmbeddingPool:
    """Tensors `[tokens, H*(1+L)]` by media key."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._needs: dict[Hashable, frozenset[str]] = {}  # of each sequence that needs any
        self._num_needers: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # present and needed by nobody, least recently used first
        self._idle_bytes = 0
        self._released_bytes = 0
        self.tensors: dict[str, Tensor] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all embeddings here."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes of the embeddings here that a sequence needs."""
        return self.num_bytes - self._idle_bytes

    @property
    def has_needs(self) -> bool:
        """Whether any sequence needs an embedding, present or not."""
        return bool(self._needs)

    def needs_of(self, sequence: Hashable) -> frozenset[str]:
        """What a sequence needs."""
        return self._needs.get(sequence, frozenset())

    def need(self, sequence: Hashable, keys: Seq[str]) -> None:
        """A sequence needs exactly these items from now on, present or not; none when it is finished."""
        before, after = self.needs_of(sequence), frozenset(keys)
        if before == after:
            return
        if after:
            self._needs[sequence] = after
        else:
            del self._needs[sequence]
        for key in after - before:
            self._num_needers[key] = self._num_needers.get(key, 0) + 1
            if key in self._idle:
                self._wake(key)
        for key in before - after:
            self._num_needers[key] -= 1
            if self._num_needers[key] == 0:
                del self._num_needers[key]
                if key in self.tensors:
                    self._make_idle(key)

    def add(self, key: str, embedding: Tensor) -> None:
        """Take an embedding in; a second copy of one that is here is dropped."""
        if key in self.tensors:
            self._released_bytes += embedding.nbytes
            return
        self.tensors[key] = embedding
        if key not in self._num_needers:
            self._make_idle(key)

    def take_released_bytes(self) -> int:
        """Bytes that were added and are needed no more, since the last call; negative when some are needed again."""
        released, self._released_bytes = self._released_bytes, 0
        return released

    def _wake(self, key: str) -> None:
        del self._idle[key]
        self._idle_bytes -= self.tensors[key].nbytes
        self._released_bytes -= self.tensors[key].nbytes

    def _make_idle(self, key: str) -> None:
        self._idle[key] = None
        self._idle_bytes += self.tensors[key].nbytes
        self._released_bytes += self.tensors[key].nbytes
        while self._idle_bytes > self._cache_bytes:
            oldest, _ = self._idle.popitem(last=False)
            self._idle_bytes -= self.tensors.pop(oldest).nbytes
