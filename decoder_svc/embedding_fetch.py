"""Fetches embeddings from encoders: one connection to each, chunks with credit into one buffer.

Owns the links to the encoders' data sockets and the fetches that run over them. From an encoder of this host the bytes
may come as memory to map. A fetch gives the checked bytes or raises; it ends when the encoder goes away, when no chunk
comes for a while, or when it is cancelled, and then tells the encoder so. Runs on the event loop; knows nothing of
requests or sequences.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import zmq.asyncio

from common.embedding import ExpectedEmbedding, Payload, check_checksum, checksum, copy_summed, new_payload
from common.errors import EncoderUnavailable, PeerUnreachable, ProtocolError, TandemError
from common.link import Link
from common.link_set import LinkSet
from common.members import Member, MemberSource
from common.messages import (
    MAX_CHUNK_BYTES,
    AnyMessage,
    EmbeddingHeader,
    Fetch,
    FetchChunk,
    FetchCredit,
    FetchReply,
    Hello,
    SharedMemory,
)
from common.metrics import Counter
from common.shared_region import MappedRegions, map_region
from common.transport import CurveKeys, Dealer
from common.wire import error_from_detail

logger = structlog.get_logger(__name__)

FETCHED_BYTES = Counter("tandem_decoder_fetched_bytes_total", "Payload bytes fetched from encoders")
MAPPED_BYTES = Counter(
    "tandem_decoder_mapped_bytes_total", "Of the payload bytes fetched from encoders, those in memory of this host"
)

CREDIT_CHUNKS = 16
RENEWED_CHUNKS = 8  # credit is given anew for several chunks at once: each message wakes the encoder's loop
STALL_S = 5.0
MAX_LOST = 256
CONNECT_S = 2.0  # a fetch waits so long for a connection that is being made


@dataclass
class _Fetch:
    expected: ExpectedEmbedding
    encoder_id: str
    link: Link
    fetch_id: str
    done: "asyncio.Future[None]"
    host: str | None  # None where memory is not to be mapped
    header: EmbeddingHeader | None = None
    shared: SharedMemory | None = None
    payload: Payload = field(default_factory=bytearray)
    checksum: int = 0
    num_received: int = 0


class EncoderFetcher:
    """Connections to the encoders that this decoder was told of. The owner awaits `run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        hello: Callable[[], Hello],
        keys: CurveKeys | None = None,
        *,
        source: MemberSource,
        stall_s: float = STALL_S,
        connect_s: float = CONNECT_S,
        new_payload: Callable[[int], Payload] = new_payload,
        host: str | None = None,
    ) -> None:
        """`source` tells which encoders there are, also while the fetcher runs; `new_payload` gives memory for so many
        bytes. Memory of encoders on `host`, if it is told, is mapped."""
        self._new_payload = new_payload
        self._host = host
        self._unmapped: deque[str] = deque(maxlen=MAX_LOST)  # encoders whose memory could not be mapped
        self._mapped = MappedRegions()
        self._source = source
        self._stall_s = stall_s
        self._fetches: dict[str, _Fetch] = {}
        self._ids = itertools.count()
        self._connect_s = connect_s
        self._changed = asyncio.Event()
        self._lost: deque[str] = deque(maxlen=MAX_LOST)  # encoders that were here: nobody waits for them

        def connect(member: Member) -> Link:
            return Link(
                Dealer(
                    context, member.endpoints[-1], name="encoder-data", max_payload_bytes=MAX_CHUNK_BYTES, keys=keys
                ),
                hello,
                role="encoder",
                on_message=self._on_message,
                on_up=self._on_up,
                on_down=self._on_down,
            )

        # An encoder that left may hold what a gateway has named or will name: it is left when it ends.
        self._members = LinkSet(connect, links_of=lambda link: (link,), is_busy=lambda link: True)

    def set_members(self, members: Sequence[Member]) -> None:
        """Which encoders there are now; of a member's endpoints the last is that of its data."""
        self._members.set_members(members)

    @property
    def encoder_ids(self) -> list[str]:
        """Instance ids of the encoders that are up."""
        return [link.peer.instance_id for link in self._members.connections if link.peer is not None]

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._members.run())
            tasks.create_task(self._source.run(self.set_members))

    async def fetch(
        self, encoder_id: str, expected: ExpectedEmbedding, timeout_s: float
    ) -> tuple[EmbeddingHeader, Payload]:
        """The embedding, complete and checked.

        Raises EncoderUnavailable when this encoder cannot give it (another may), ProtocolError when what it gives is
        not what was expected, TimeoutError after `timeout_s`.
        """
        link = await self._link_to(encoder_id, min(timeout_s, self._connect_s))
        done = asyncio.get_running_loop().create_future()
        may_map = encoder_id not in self._unmapped and self._mapped.has_room(len(self._fetches) + 1)
        fetch = _Fetch(expected, encoder_id, link, f"f{next(self._ids)}", done, self._host if may_map else None)
        self._fetches[fetch.fetch_id] = fetch
        try:
            async with asyncio.timeout(timeout_s):
                return await self._receive(fetch, timeout_s)
        except BaseException:
            link.try_send(FetchCredit(fetch_id=fetch.fetch_id, chunks=0))
            raise
        finally:
            del self._fetches[fetch.fetch_id]

    async def _link_to(self, encoder_id: str, timeout_s: float) -> Link:
        """The connection to an encoder; one that a gateway knows already may have to be made here first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while encoder_id not in self._lost:
                    changed = self._changed
                    for link in self._members.connections:
                        if link.peer is not None and link.peer.instance_id == encoder_id:
                            return link
                    await changed.wait()
        raise EncoderUnavailable(f"this decoder has no connection to encoder {encoder_id!r}")

    async def _receive(self, fetch: _Fetch, timeout_s: float) -> tuple[EmbeddingHeader, Payload]:
        expected = fetch.expected
        try:
            fetch.link.send(
                Fetch(
                    fetch_id=fetch.fetch_id,
                    key=expected.key,
                    fingerprint=expected.fingerprint,
                    credit=CREDIT_CHUNKS,
                    time_left_s=timeout_s,
                    host=fetch.host,
                )
            )
            await self._wait(fetch)
            if fetch.shared is not None and not await self._map(fetch, fetch.shared):
                await self._wait(fetch)
        except PeerUnreachable as exc:
            raise EncoderUnavailable(exc.message) from exc
        assert fetch.header is not None
        check_checksum(fetch.header, fetch.checksum)
        FETCHED_BYTES.inc(len(fetch.payload))
        return fetch.header, fetch.payload

    async def _wait(self, fetch: _Fetch) -> None:
        """Until all is there that the encoder gives. Raises what became of it instead."""
        before = -1
        while not fetch.done.done():
            if before == (before := fetch.num_received):
                raise EncoderUnavailable(f"the encoder sent nothing for {self._stall_s} s")
            await asyncio.wait({fetch.done}, timeout=self._stall_s)
        fetch.done.result()

    async def _map(self, fetch: _Fetch, shared: SharedMemory) -> bool:
        """Map the payload, or else ask for its chunks: then they come."""
        assert fetch.header is not None
        try:
            payload, fetch.checksum = await asyncio.to_thread(_map_summed, shared, fetch.header.num_bytes)
        except (OSError, ProtocolError) as error:
            logger.warning(
                "an encoder's memory cannot be mapped: it sends", encoder=fetch.encoder_id, reason=str(error)
            )
            if fetch.encoder_id not in self._unmapped:
                self._unmapped.append(fetch.encoder_id)
            fetch.payload = self._new_payload(fetch.header.num_bytes)
            fetch.done = asyncio.get_running_loop().create_future()
            fetch.link.send(FetchCredit(fetch_id=fetch.fetch_id, chunks=CREDIT_CHUNKS))
            return False
        self._mapped.add(payload.obj, len(payload))
        fetch.payload = payload
        fetch.link.try_send(FetchCredit(fetch_id=fetch.fetch_id, chunks=0, is_mapped=True))
        MAPPED_BYTES.inc(len(payload))
        return True

    def _on_up(self, link: Link) -> None:
        for names in (self._lost, self._unmapped):  # whatever kept its memory from being mapped may be over
            if link.peer is not None and link.peer.instance_id in names:
                names.remove(link.peer.instance_id)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # those who wait for the next change wait for a new event

    def _on_message(self, link: Link, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        if not isinstance(message, FetchReply | FetchChunk):
            logger.warning("an encoder sent an unexpected message", message=type(message).__name__)
            return
        fetch = self._fetches.get(message.fetch_id)
        if fetch is None or fetch.link is not link or fetch.done.done():
            return  # given up meanwhile
        try:
            if isinstance(message, FetchReply):
                self._begin(fetch, message)
            else:
                self._take_chunk(fetch, message, payload)
        except TandemError as error:
            fetch.done.set_exception(error)

    def _begin(self, fetch: _Fetch, reply: FetchReply) -> None:
        if reply.error is not None:
            raise EncoderUnavailable(error_from_detail(reply.error).message)
        if reply.header is None or fetch.header is not None:
            raise ProtocolError("the encoder answered a fetch without a header, or twice")
        fetch.expected.check(reply.header)
        fetch.header = reply.header
        if reply.shared is not None and fetch.host is not None:
            fetch.shared = reply.shared
            fetch.done.set_result(None)
        else:
            fetch.payload = self._new_payload(reply.header.num_bytes)

    def _take_chunk(self, fetch: _Fetch, chunk: FetchChunk, payload: Sequence[memoryview]) -> None:
        header = fetch.header
        if header is None or chunk.index != fetch.num_received or len(payload) != 1:
            raise ProtocolError("an embedding's chunks came out of order")
        start = chunk.index * header.chunk_bytes
        target = memoryview(fetch.payload)[start : start + header.chunk_bytes]
        if len(payload[0]) != len(target):
            raise ProtocolError(f"chunk {chunk.index} has {len(payload[0])} bytes, expected {len(target)}")
        fetch.checksum = copy_summed(target, payload[0], fetch.checksum)
        fetch.num_received += 1
        if fetch.num_received == header.num_chunks:
            fetch.done.set_result(None)
        elif fetch.num_received % RENEWED_CHUNKS == 0:
            self._renew(fetch, header.num_chunks - fetch.num_received)

    def _renew(self, fetch: _Fetch, num_left: int) -> None:
        """Give the credit that the last chunks used, as far as there are chunks that have none yet."""
        without = num_left - (CREDIT_CHUNKS - RENEWED_CHUNKS)
        if without > 0:
            fetch.link.try_send(FetchCredit(fetch_id=fetch.fetch_id, chunks=min(without, RENEWED_CHUNKS)))

    def _on_down(self, link: Link, instance_id: str) -> None:
        self._lost.append(instance_id)
        self._wake()
        for fetch in self._fetches.values():
            if fetch.link is link and not fetch.done.done():
                fetch.done.set_exception(EncoderUnavailable("the encoder went away"))


def _map_summed(shared: SharedMemory, num_bytes: int) -> tuple[memoryview, int]:
    """A payload in another process's memory, and its CRC-32. Takes milliseconds of a thread."""
    payload = map_region(shared, num_bytes)
    return payload, checksum(payload)
