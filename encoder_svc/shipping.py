"""Sends held embeddings to whoever fetches them, in chunks, never more than the receiver has room for.

Owns the sessions of running fetches: each has credit, which the receiver renews, and ends when the last chunk is
sent, when the receiver says so, or at its deadline; until then what it sends stays in the store. Chunks are views of
the held payload: no copy is made. A receiver on this host is told where the payload is instead, where it can be mapped.
Runs on the event loop.
"""

import time
from dataclasses import dataclass

import structlog

from common.errors import Overloaded, PeerUnreachable, ProtocolError, TandemError
from common.messages import Fetch, FetchChunk, FetchCredit, FetchReply
from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.transport import Router
from common.wire import error_detail
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.shared_regions import NEVER_SHARED, SharedRegions

logger = structlog.get_logger(__name__)

FETCHES = Counter("tandem_encoder_fetches_total", "Embeddings asked for by decoders", ["outcome"])
SENT_BYTES = Counter("tandem_encoder_sent_bytes_total", "Payload bytes sent to decoders")
SHIP_SECONDS = Histogram(
    "tandem_encoder_ship_seconds", "Time of one fetch, from the first chunk to the last", buckets=SECONDS_BUCKETS
)
BYTES_IN_FLIGHT = Gauge("tandem_encoder_bytes_in_flight", "Payload bytes of fetches that have not finished")

MAX_SESSIONS = 4096
LONGEST_FETCH_S = 120.0


@dataclass
class _Session:
    embedding: HeldEmbedding
    deadline: float
    began: float
    next_index: int = 0


class Shipping:
    """Running fetches of one encoder."""

    def __init__(
        self, router: Router, store: EmbeddingStore, fingerprint: str, regions: SharedRegions = NEVER_SHARED
    ) -> None:
        self._router = router
        self._regions = regions
        self._store = store
        self._fingerprint = fingerprint
        self._sessions: dict[tuple[bytes, str], _Session] = {}

    @property
    def bytes_in_flight(self) -> int:
        """Payload bytes of running fetches."""
        return sum(session.embedding.header.num_bytes for session in self._sessions.values())

    def begin(self, peer: bytes, fetch: Fetch) -> None:
        """Answer a fetch: the header, and the first chunks or where the payload can be mapped; or why not."""
        try:
            embedding = self._find(fetch)
        except TandemError as error:
            FETCHES.labels("refused").inc()
            self._router.try_send(peer, FetchReply(fetch_id=fetch.fetch_id, error=error_detail(error)))
            return
        now = time.monotonic()
        if (peer, fetch.fetch_id) in self._sessions:  # the receiver forgot one, as a restarted process does
            self._end(peer, fetch.fetch_id, "given_up")
        self._sessions[peer, fetch.fetch_id] = _Session(embedding, now + min(fetch.time_left_s, LONGEST_FETCH_S), now)
        BYTES_IN_FLIGHT.set(self.bytes_in_flight)
        is_near = self._regions.is_near(fetch.host)
        shared = embedding.region.place if is_near and embedding.region is not None else None
        if not self._router.try_send(peer, FetchReply(fetch_id=fetch.fetch_id, header=embedding.header, shared=shared)):
            self._end(peer, fetch.fetch_id, "gone")
        elif shared is None:
            self._send_chunks(peer, fetch.fetch_id, fetch.credit)

    def renew(self, peer: bytes, credit: FetchCredit) -> None:
        """Send more chunks, or end the fetch when the receiver has mapped the payload, or gives it up."""
        if (peer, credit.fetch_id) not in self._sessions:
            return
        if credit.chunks == 0:
            self._end(peer, credit.fetch_id, "mapped" if credit.is_mapped else "given_up")
        else:
            self._send_chunks(peer, credit.fetch_id, credit.chunks)

    def expire(self, now: float) -> None:
        """End the fetches whose time is up."""
        for peer, fetch_id in [name for name, session in self._sessions.items() if session.deadline <= now]:
            self._end(peer, fetch_id, "expired")

    def _find(self, fetch: Fetch) -> HeldEmbedding:
        if fetch.fingerprint != self._fingerprint:
            raise ProtocolError("the fetch is for another vision tower than this encoder's (fingerprint differs)")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} fetches run here, which is the limit: try again later")
        self._store.get(fetch.key)  # counts as a use of it
        if (embedding := self._store.pin(fetch.key)) is None:
            raise ProtocolError("the embedding is not held here (any more)")
        return embedding

    def _send_chunks(self, peer: bytes, fetch_id: str, count: int) -> None:
        session = self._sessions[peer, fetch_id]
        header, payload = session.embedding.header, session.embedding.payload
        try:
            for index in range(session.next_index, min(session.next_index + count, header.num_chunks)):
                chunk = payload[index * header.chunk_bytes : (index + 1) * header.chunk_bytes]
                self._router.send(peer, FetchChunk(fetch_id=fetch_id, index=index), chunk)
                session.next_index = index + 1
                SENT_BYTES.inc(len(chunk))
        except PeerUnreachable:
            self._end(peer, fetch_id, "gone")
            return
        if session.next_index == header.num_chunks:
            self._end(peer, fetch_id, "sent")

    def _end(self, peer: bytes, fetch_id: str, outcome: str) -> None:
        session = self._sessions.pop((peer, fetch_id))
        self._store.unpin(session.embedding.header.key)
        if outcome == "sent":
            SHIP_SECONDS.observe(time.monotonic() - session.began)
        FETCHES.labels(outcome).inc()
        BYTES_IN_FLIGHT.set(self.bytes_in_flight)
