"""Which embeddings are held in memory that decoders of this host can map.

None are made before a decoder of this host has fetched something: for one elsewhere they would only be copies. Safe to
use from several threads, of which each may take one at the same time although there is room for one alone.
"""

import math
import time

import structlog

from common.metrics import Gauge
from common.shared_region import MappedRegions, SharedRegion, host_id

logger = structlog.get_logger(__name__)

SHARED_BYTES = Gauge(
    "tandem_encoder_shared_bytes", "Bytes of held embeddings in memory that decoders of the same host map"
)

MIN_BYTES = 1 << 20  # less travels as fast in one message
RETRY_S = 60.0  # after the system refused one


class SharedRegions:
    """Makes regions for the embeddings of one encoder, unless `may_share` is false."""

    def __init__(self, *, may_share: bool = True) -> None:
        self._host = host_id() if may_share else None
        self._is_wanted = False
        self._mapped = MappedRegions()
        self._refused_at = -math.inf

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions that are in use."""
        return self._mapped.num_bytes

    def report(self) -> None:
        """Show these bytes as the metric, counted when they are asked for. For the one encoder of a process."""
        SHARED_BYTES.set_function(lambda: self.num_bytes)

    def is_near(self, host: str | None) -> bool:
        """Whether a process that fetches is on this host: from the first one on, regions are made."""
        if self._host is None or host != self._host:
            return False
        self._is_wanted = True
        return True

    def take(self, num_bytes: int) -> SharedRegion | None:
        """A region to fill, or None when other memory is to be used."""
        if not self._is_wanted or num_bytes < MIN_BYTES:
            return None
        if not self._mapped.has_room() or time.monotonic() < self._refused_at + RETRY_S:
            return None
        try:
            region = SharedRegion(num_bytes)
        except OSError as error:
            logger.warning("no memory to share: embeddings are sent instead", reason=str(error))
            self._refused_at = time.monotonic()
            return None
        self._mapped.add(region.mapping, num_bytes)
        return region


NEVER_SHARED = SharedRegions(may_share=False)
"""For whoever shares nothing: it makes none, whoever fetches."""
