"""Shipping over real sockets: the receiver's credit is law, and every session ends."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.embedding import checksum
from common.errors import Overloaded
from common.messages import Fetch, FetchChunk, FetchCredit, FetchReply
from common.shared_region import host_id, map_region
from common.transport import Dealer, Received, Router
from encoder_svc import shipping as shipping_module
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.shared_regions import MIN_BYTES, SharedRegions
from encoder_svc.shipping import Shipping
from tests.common.sockets import background, connected, eventually, hello, ipc_address, received, zmq_context
from tests.encoder_svc.embeddings import FINGERPRINT, held, key

CHUNK = 1024


@dataclass
class Bench:
    """An encoder's shipping, with one decoder connected to it."""

    shipping: Shipping
    store: EmbeddingStore
    decoder: Dealer
    item: HeldEmbedding

    def fetch(self, credit: int, fetch_id: str = "f1", **fields: object) -> None:
        base: dict[str, object] = {"key": self.item.header.key, "fingerprint": FINGERPRINT, "time_left_s": 30.0}
        self.decoder.send(Fetch(fetch_id=fetch_id, credit=credit, **{**base, **fields}))  # type: ignore[arg-type]

    def renew(self, chunks: int, fetch_id: str = "f1") -> None:
        self.decoder.send(FetchCredit(fetch_id=fetch_id, chunks=chunks))

    async def chunks(self, count: int) -> list[Received]:
        """The next messages, all of which must be chunks."""
        arrived = [await received(self.decoder) for _ in range(count)]
        assert all(isinstance(one.message, FetchChunk) and len(one.payload) == 1 for one in arrived)
        return arrived

    async def is_quiet(self) -> bool:
        """Whether nothing is on its way: an answer to a question asked now comes first."""
        self.fetch(1, "quiet", key=key(99))
        answer = (await received(self.decoder)).message
        return isinstance(answer, FetchReply) and answer.fetch_id == "quiet"


@contextlib.asynccontextmanager
async def bench(num_chunks: int = 10) -> AsyncIterator[Bench]:
    with zmq_context() as context, ipc_address() as address:
        router = Router(context, address, name="data")
        store = EmbeddingStore(1 << 20, 60.0)
        item = held(1, num_chunks * CHUNK - 512, chunk_bytes=CHUNK)
        store.put(item)
        shipping = Shipping(router, store, FINGERPRINT)
        decoder = Dealer(context, address, name="test-dealer")
        await connected(decoder, router, hello("decoder", "d"))
        async with background(serve(router, shipping)):
            yield Bench(shipping, store, decoder, item)


async def serve(router: Router, shipping: Shipping) -> None:
    while True:
        got = await router.receive()
        if isinstance(got.message, Fetch):
            shipping.begin(got.peer, got.message)
        elif isinstance(got.message, FetchCredit):
            shipping.renew(got.peer, got.message)


async def test_a_fetch_with_enough_credit_brings_everything_in_order() -> None:
    async with bench() as b:
        b.fetch(4096)
        assert (await received(b.decoder)).message == FetchReply(fetch_id="f1", header=b.item.header)
        arrived = await b.chunks(10)
        assert [one.message for one in arrived] == [FetchChunk(fetch_id="f1", index=index) for index in range(10)]
        payload = b"".join(bytes(one.payload[0]) for one in arrived)
        assert payload == b.item.payload
        assert checksum(payload) == b.item.header.checksum
        assert b.shipping.bytes_in_flight == 0


async def test_no_more_is_sent_than_the_receiver_has_room_for() -> None:
    async with bench() as b:
        b.fetch(3)
        await received(b.decoder)
        for granted in (3, 1, 4):
            await b.chunks(granted)
            assert await b.is_quiet()
            assert b.shipping.bytes_in_flight == b.item.header.num_bytes
            b.renew({3: 1, 1: 4, 4: 4096}[granted])
        await b.chunks(2)
        assert b.shipping.bytes_in_flight == 0
        b.renew(1)
        assert await b.is_quiet()


async def test_a_fetch_that_is_given_up_ends() -> None:
    async with bench() as b:
        b.fetch(1)
        await received(b.decoder)
        await b.chunks(1)
        b.renew(0)
        assert await b.is_quiet()
        assert b.shipping.bytes_in_flight == 0
        b.renew(8)
        assert await b.is_quiet()


async def test_two_fetches_of_one_item_do_not_disturb_each_other() -> None:
    async with bench() as b:
        b.fetch(2, "f1")
        b.fetch(4096, "f2")
        arrived = [(await received(b.decoder)).message for _ in range(2 + 2 + 10)]
        assert [m.index for m in arrived if isinstance(m, FetchChunk) and m.fetch_id == "f2"] == list(range(10))
        assert [m.index for m in arrived if isinstance(m, FetchChunk) and m.fetch_id == "f1"] == [0, 1]


class RecordingRouter:
    """Notes what is handed over to be sent, and to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, memoryview]] = []

    def try_send(self, peer: bytes, message: object) -> bool:
        return True

    def send(self, peer: bytes, message: object, payload: memoryview) -> None:
        self.sent.append((peer, payload))


async def test_several_decoders_get_one_item_each_at_its_own_pace_as_views_of_what_is_held() -> None:
    router, store, item = RecordingRouter(), EmbeddingStore(1 << 20, 60.0), held(1, 4 * CHUNK, chunk_bytes=CHUNK)
    store.put(item)
    shipping = Shipping(router, store, FINGERPRINT)  # type: ignore[arg-type]
    for peer, credit in ((b"one", 1), (b"two", 4)):
        fetch = Fetch(fetch_id="f1", key=item.header.key, fingerprint=FINGERPRINT, credit=credit, time_left_s=30.0)
        shipping.begin(peer, fetch)
    shipping.renew(b"one", FetchCredit(fetch_id="f1", chunks=3))
    start = np.frombuffer(item.payload, np.uint8).ctypes.data
    places = [(peer, np.frombuffer(view, np.uint8).ctypes.data - start) for peer, view in router.sent]
    two = [(b"two", index * CHUNK) for index in range(4)]
    assert places == [(b"one", 0), *two, *((b"one", index * CHUNK) for index in range(1, 4))]
    assert shipping.bytes_in_flight == 0


async def test_what_is_being_sent_stays_within_the_budget_until_it_is_sent_whole() -> None:
    async with bench() as b:
        b.fetch(1)
        await received(b.decoder)
        await b.chunks(1)
        with pytest.raises(Overloaded):
            b.store.put(held(2, 1 << 20))
        assert b.store.leased_bytes == b.item.header.num_bytes
        b.renew(4096)
        arrived = await b.chunks(9)
        assert b"".join(bytes(one.payload[0]) for one in arrived) == b.item.payload[CHUNK:]
        assert b.store.leased_bytes == 0
        b.store.put(held(2, 1 << 20))
        assert b.store.get(b.item.header.key) is None


async def test_a_receiver_that_left_ends_its_session() -> None:
    async with bench() as b:
        b.fetch(1)
        await received(b.decoder)
        peer, _ = next(iter(b.shipping._sessions))
        b.decoder.close()

        def is_over() -> bool:
            b.shipping.renew(peer, FetchCredit(fetch_id="f1", chunks=1))
            return b.shipping.bytes_in_flight == 0

        await eventually(is_over)


async def test_a_session_ends_at_its_deadline() -> None:
    async with bench() as b:
        b.fetch(1, time_left_s=5.0)
        await received(b.decoder)
        await b.chunks(1)
        b.shipping.expire(time.monotonic())
        assert b.shipping.bytes_in_flight > 0
        b.shipping.expire(time.monotonic() + 5.0)
        assert b.shipping.bytes_in_flight == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"key": key(7)}, "not held here"), ({"fingerprint": "0" * 64}, "fingerprint differs")],
)
async def test_what_cannot_be_sent_is_answered_with_the_reason(fields: dict[str, object], reason: str) -> None:
    async with bench() as b:
        b.fetch(8, **fields)
        answer = (await received(b.decoder)).message
        assert isinstance(answer, FetchReply)
        assert answer.header is None
        assert answer.error is not None
        assert reason in answer.error.message
        assert b.shipping.bytes_in_flight == 0


async def test_more_fetches_than_the_limit_are_refused_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping_module, "MAX_SESSIONS", 1)
    async with bench() as b:
        b.fetch(1, "f1")
        b.fetch(1, "f2")
        async with asyncio.timeout(10):
            answers = [(await received(b.decoder)).message for _ in range(3)]
        refused = answers[2]
        assert isinstance(refused, FetchReply)
        assert refused.error is not None
        assert (refused.fetch_id, refused.error.code) == ("f2", "overloaded")


@contextlib.asynccontextmanager
async def near() -> AsyncIterator[Bench]:
    """The same with an item that decoders of this host can map."""
    with zmq_context() as context, ipc_address() as address:
        router = Router(context, address, name="data")
        store, regions = EmbeddingStore(2 * MIN_BYTES, 60.0), SharedRegions()
        plain = held(1, MIN_BYTES, chunk_bytes=MIN_BYTES // 10)
        regions.is_near(host_id())
        region = regions.take(MIN_BYTES)
        assert region is not None
        region.write(0, plain.payload)
        item = HeldEmbedding(plain.header, region.seal(), region)
        store.put(item)
        shipping = Shipping(router, store, FINGERPRINT, regions)
        decoder = Dealer(context, address, name="test-dealer", max_payload_bytes=MIN_BYTES)
        await connected(decoder, router, hello("decoder", "d"))
        async with background(serve(router, shipping)):
            yield Bench(shipping, store, decoder, item)


needs_sharing = pytest.mark.skipif(host_id() is None, reason="this system has no memfd or no /proc")


@needs_sharing
async def test_a_decoder_of_this_host_is_told_where_the_payload_is_and_it_stays_until_that_was_mapped() -> None:
    async with near() as b:
        b.fetch(16, host=host_id())
        reply = (await received(b.decoder)).message
        assert isinstance(reply, FetchReply)
        assert reply.shared is not None
        assert await b.is_quiet()
        assert map_region(reply.shared, MIN_BYTES) == b.item.payload
        assert b.store.leased_bytes == REGISTRY.get_sample_value("tandem_encoder_bytes_in_flight") == MIN_BYTES
        b.decoder.send(FetchCredit(fetch_id="f1", chunks=0, is_mapped=True))
        assert await b.is_quiet()
        assert b.store.leased_bytes == b.shipping.bytes_in_flight == 0
        assert REGISTRY.get_sample_value("tandem_encoder_bytes_in_flight") == 0


@needs_sharing
async def test_a_decoder_that_cannot_map_gets_chunks_after_all() -> None:
    async with near() as b:
        b.fetch(16, host=host_id())
        await received(b.decoder)
        b.renew(16)
        arrived = await b.chunks(11)
        assert b"".join(bytes(one.payload[0]) for one in arrived) == b.item.payload
        assert b.shipping.bytes_in_flight == 0


@needs_sharing
@pytest.mark.parametrize("host", [None, "0" * 32])
async def test_a_decoder_of_another_host_gets_chunks(host: str | None) -> None:
    async with near() as b:
        b.fetch(16, host=host)
        reply = (await received(b.decoder)).message
        assert isinstance(reply, FetchReply)
        assert reply.shared is None
        await b.chunks(11)
