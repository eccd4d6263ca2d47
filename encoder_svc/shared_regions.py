"""Which embeddings are held in memory that decoders of this host can map.

Owns the bound of how many there are, since each takes two descriptors. None are made before a decoder of this host has
fetched something: for one elsewhere they would only be copies. Safe to use from several threads.
"""

import resource
import threading
import weakref

import structlog

from common.metrics import Gauge
from common.shared_region import SharedRegion, host_id

logger = structlog.get_logger(__name__)

SHARED_BYTES = Gauge(
    "tandem_encoder_shared_bytes", "Bytes of held embeddings in memory that decoders of the same host map"
)

MIN_BYTES = 1 << 20  # less travels as fast in one message
MAX_REGIONS = 4096
DESCRIPTORS_SHARE = 4  # a region may be made of every so many descriptors that this process may have


class SharedRegions:
    """Makes regions for the embeddings of one encoder, unless `may_share` is false."""

    def __init__(self, *, may_share: bool = True) -> None:
        self._host = host_id() if may_share else None
        self._is_wanted = False
        self._regions: weakref.WeakSet[SharedRegion] = weakref.WeakSet()
        self._lock = threading.Lock()
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_regions = min(MAX_REGIONS, soft_limit // DESCRIPTORS_SHARE)
        SHARED_BYTES.set_function(lambda: self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions that are in use."""
        with self._lock:
            return sum(region.num_bytes for region in self._regions)

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
        with self._lock:
            if len(self._regions) >= self._max_regions:
                return None
            try:
                region = SharedRegion(num_bytes)
            except OSError as error:
                logger.warning("no memory to share: embeddings are sent instead", reason=str(error))
                self._is_wanted = False
                return None
            self._regions.add(region)
            return region
