"""Embeddings that this encoder holds: under leases while requests need them, then as an LRU within a byte budget.

Owns the memory accounting: what is leased or being sent stays, what is not is evicted oldest first, and room is
reserved before an item is encoded, so nothing is computed that has no place. A lease belongs to one request and ends by
`release` or by its time, so a gateway that died leaks nothing. Pure but for the buffers it holds: `now` is an argument.
Used on the event loop only.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.errors import Overloaded
from common.messages import EmbeddingHeader
from common.shared_region import SharedRegion


@dataclass(frozen=True)
class HeldEmbedding:
    """An embedding in memory. `payload` is a read-only view of its bytes, kept alive by whoever sends it.

    The bytes are in `region` where processes of this host can map them.
    """

    header: EmbeddingHeader
    payload: memoryview
    region: SharedRegion | None = None


@dataclass
class _Entry:
    embedding: HeldEmbedding
    leases: dict[str, float] = field(default_factory=dict)  # request id -> time at which the lease ends
    num_pins: int = 0  # transfers that read it now
    is_in_redis: bool = False

    @property
    def is_needed(self) -> bool:
        return bool(self.leases) or self.num_pins > 0


class EmbeddingStore:
    """Held embeddings by media key."""

    def __init__(self, budget_bytes: int, lease_s: float) -> None:
        self._budget_bytes = budget_bytes
        self._lease_s = lease_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._keys_by_request: dict[str, set[str]] = {}
        self._reserved: dict[str, int] = {}
        self.held_bytes = 0
        self.reserved_bytes = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes that cannot be evicted now: under a lease, or being sent."""
        return sum(e.embedding.header.num_bytes for e in self._entries.values() if e.is_needed)

    @property
    def num_leases(self) -> int:
        """Leases over all items."""
        return sum(len(entry.leases) for entry in self._entries.values())

    @property
    def num_leases_only_here(self) -> int:
        """Leases on items that Redis was not given."""
        return sum(len(entry.leases) for entry in self._entries.values() if not entry.is_in_redis)

    def note_in_redis(self, key: str) -> None:
        """Redis was given a pinned item as well."""
        self._entries[key].is_in_redis = True

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

    def reserve(self, key: str, num_bytes: int, retry_after_s: float = 1.0) -> None:
        """Keep room for an item that will be put, evicting unneeded ones for it. Raises Overloaded when there is none,
        with the hint to come back after `retry_after_s`.

        An item larger than the whole budget gets room when nothing else needs any.
        """
        if key in self._reserved:
            return
        self._evict_until(self._budget_bytes - self.reserved_bytes - num_bytes)
        taken = self.held_bytes + self.reserved_bytes
        if taken and taken + num_bytes > self._budget_bytes:
            raise Overloaded(
                f"the encoder holds {taken} bytes that requests still need, of {self._budget_bytes}, "
                f"and has no room for {num_bytes} more: try again later",
                retry_after_s=retry_after_s,
            )
        self._reserved[key] = num_bytes
        self.reserved_bytes += num_bytes

    def unreserve(self, key: str) -> None:
        """Give back the room kept for an item, if there is any."""
        self.reserved_bytes -= self._reserved.pop(key, 0)

    def put(self, embedding: HeldEmbedding) -> None:
        """Hold an embedding, in the room reserved for it or in what is left. Raises Overloaded as `reserve` does."""
        key, num_bytes = embedding.header.key, embedding.header.num_bytes
        if key in self._entries:
            self.unreserve(key)
            return
        if self._reserved.get(key) != num_bytes:
            self.unreserve(key)
            self.reserve(key, num_bytes)
        self.unreserve(key)
        self._entries[key] = _Entry(embedding)
        self.held_bytes += num_bytes

    def pin(self, key: str) -> HeldEmbedding | None:
        """An embedding that stays until `unpin`, for whoever sends it, or None when it is not held."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.num_pins += 1
        return entry.embedding

    def unpin(self, key: str) -> None:
        """A transfer has ended."""
        self._entries[key].num_pins -= 1
        self._evict_until(self._budget_bytes)

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
        for key in [key for key, entry in self._entries.items() if not entry.is_needed]:
            self.held_bytes -= self._entries.pop(key).embedding.header.num_bytes
            if self.held_bytes <= limit_bytes:
                return
