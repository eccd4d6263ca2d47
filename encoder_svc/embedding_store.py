"""Embeddings that this encoder holds: under leases while requests need them, then as an LRU within a byte budget.

Owns the memory accounting: what is leased stays, what is not is evicted oldest first, and nothing is admitted that
would exceed the budget. A lease belongs to one request and ends by `release` or by its time, so a gateway that died
leaks nothing. Pure but for the buffers it holds: `now` is an argument. Used on the event loop only.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.errors import Overloaded
from common.messages import EmbeddingHeader


@dataclass(frozen=True)
class HeldEmbedding:
    """An embedding in memory. `payload` is a read-only view of its bytes, kept alive by whoever sends it."""

    header: EmbeddingHeader
    payload: memoryview


@dataclass
class _Entry:
    embedding: HeldEmbedding
    leases: dict[str, float] = field(default_factory=dict)  # request id -> time at which the lease ends


class EmbeddingStore:
    """Held embeddings by media key."""

    def __init__(self, budget_bytes: int, lease_s: float) -> None:
        self._budget_bytes = budget_bytes
        self._lease_s = lease_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._keys_by_request: dict[str, set[str]] = {}
        self.held_bytes = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes that cannot be evicted now."""
        return sum(e.embedding.header.num_bytes for e in self._entries.values() if e.leases)

    @property
    def num_leases(self) -> int:
        """Leases over all items."""
        return sum(len(entry.leases) for entry in self._entries.values())

    def get(self, key: str) -> HeldEmbedding | None:
        """A held embedding, now the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.embedding

    def lease(self, key: str, request_id: str, now: float) -> bool:
        """Keep an item for a request; false when it is not held."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.leases[request_id] = now + self._lease_s
        self._keys_by_request.setdefault(request_id, set()).add(key)
        return True

    def put(self, embedding: HeldEmbedding) -> None:
        """Hold an embedding, evicting unleased ones for it. Raises Overloaded when leased ones fill the budget."""
        key, num_bytes = embedding.header.key, embedding.header.num_bytes
        if key in self._entries:
            return
        self._evict_until(self._budget_bytes - num_bytes)
        if self._entries and self.held_bytes + num_bytes > self._budget_bytes:
            raise Overloaded(
                f"the encoder holds {self.held_bytes} bytes that requests still need, of {self._budget_bytes}, "
                f"and has no room for {num_bytes} more: try again later",
                retry_after_s=1.0,
            )
        self._entries[key] = _Entry(embedding)
        self.held_bytes += num_bytes

    def release(self, request_id: str) -> None:
        """End all leases of a request."""
        for key in list(self._keys_by_request.get(request_id, ())):
            self._end_lease(key, request_id)
        self._evict_until(self._budget_bytes)

    def end_lease(self, key: str, request_id: str) -> None:
        """End one lease of a request, if there is one."""
        if key in self._keys_by_request.get(request_id, ()):
            self._end_lease(key, request_id)
            self._evict_until(self._budget_bytes)

    def expire(self, now: float) -> int:
        """End the leases whose time is up; returns how many there were."""
        expired = [
            (key, request_id)
            for key, entry in self._entries.items()
            for request_id, ends in entry.leases.items()
            if ends <= now
        ]
        for key, request_id in expired:
            self._end_lease(key, request_id)
        self._evict_until(self._budget_bytes)
        return len(expired)

    def _end_lease(self, key: str, request_id: str) -> None:
        del self._entries[key].leases[request_id]
        keys = self._keys_by_request[request_id]
        keys.discard(key)
        if not keys:
            del self._keys_by_request[request_id]

    def _evict_until(self, limit_bytes: int) -> None:
        if self.held_bytes <= limit_bytes:
            return
        for key in [key for key, entry in self._entries.items() if not entry.leases]:
            self.held_bytes -= self._entries.pop(key).embedding.header.num_bytes
            if self.held_bytes <= limit_bytes:
                return
