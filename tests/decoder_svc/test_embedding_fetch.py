"""Fetching over real sockets, with a test at the encoder's side that keeps or breaks the protocol."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
import zmq.asyncio

from common import shared_region
from common.embedding import ExpectedEmbedding, checksum
from common.errors import EncoderUnavailable, ProtocolError, TandemError
from common.members import Member, StaticMembers
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
from common.shared_region import SharedRegion, host_id, map_region
from common.transport import Received, Router
from common.wire import error_detail
from decoder_svc import embedding_fetch
from decoder_svc.embedding_fetch import CREDIT_CHUNKS, EncoderFetcher
from tests.common.sockets import background, eventually, zmq_context
from tests.decoder_svc.requests import FINGERPRINT, key_of

ROWS, WIDTH = 64, 8
PAYLOAD = bytes(range(256)) * 8
EXPECTED = ExpectedEmbedding(key_of(1), (1, 16, 16), FINGERPRINT, ROWS, WIDTH, 1)
HEADER = EmbeddingHeader(
    key=key_of(1),
    grid=(1, 16, 16),
    dtype="float32",
    rows=ROWS,
    width=WIDTH,
    levels=1,
    fingerprint=FINGERPRINT,
    checksum=checksum(PAYLOAD),
    chunk_bytes=64,
)
Script = Callable[["FakeEncoder", Received, Fetch], Awaitable[None]]


def hello(role: str = "encoder") -> Hello:
    return Hello(role=role, instance_id=f"{role}-1", model="tiny", version="0", is_ready=True)  # type: ignore[arg-type]


@dataclass
class FakeEncoder:
    """The encoder's data socket. Answers Hello, and a fetch as the script says."""

    router: Router
    script: Script
    credits: asyncio.Queue[FetchCredit]
    instance_id: str = "encoder-1"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                received = await self.router.receive()
                match received.message:
                    case Hello():
                        self.router.send(received.peer, msgspec.structs.replace(hello(), instance_id=self.instance_id))
                    case Fetch() as fetch:
                        tasks.create_task(self.script(self, received, fetch))  # type: ignore[arg-type]
                    case FetchCredit() as credit:
                        self.credits.put_nowait(credit)

    def say(self, received: Received, message: AnyMessage, *payload: bytes) -> None:
        self.router.send(received.peer, message, *payload)

    def chunk(self, received: Received, fetch: Fetch, index: int, size: int = 64) -> None:
        data = PAYLOAD[index * 64 : index * 64 + size]
        self.say(received, FetchChunk(fetch_id=fetch.fetch_id, index=index), data)

    async def stopped(self) -> None:
        """Return when the receiver has ended the fetch."""
        async with asyncio.timeout(5):
            while (await self.credits.get()).chunks != 0:
                pass


async def serve(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    """Keep the protocol: never a chunk beyond the credit."""
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
    credit = fetch.credit
    for index in range(HEADER.num_chunks):
        while credit == 0:
            credit += (await encoder.credits.get()).chunks
        credit -= 1
        encoder.chunk(received, fetch, index)


@asynccontextmanager
async def fetching(
    script: Script, *, stall_s: float = 5.0, host: str | None = None
) -> AsyncIterator[tuple[EncoderFetcher, FakeEncoder]]:
    context = zmq.asyncio.Context()
    router = Router(context, "tcp://127.0.0.1:0", name="data", max_payload_bytes=MAX_CHUNK_BYTES)
    encoder = FakeEncoder(router, script, asyncio.Queue())
    fetcher = EncoderFetcher(
        context,
        lambda: hello("decoder"),
        source=StaticMembers([Member((router.endpoint,))]),
        stall_s=stall_s,
        host=host,
    )
    tasks = [asyncio.create_task(encoder.run()), asyncio.create_task(fetcher.run())]
    try:
        async with asyncio.timeout(10):
            while not fetcher.encoder_ids:  # noqa: ASYNC110 (a link has no event for it)
                await asyncio.sleep(0.005)
        yield fetcher, encoder
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        router.close()
        context.destroy(linger=0)


async def test_the_payload_arrives_whole_and_checked_in_many_chunks() -> None:
    async with fetching(serve) as (fetcher, _):
        header, payload = await fetcher.fetch("encoder-1", EXPECTED, 10)
        assert header == HEADER
        assert payload == PAYLOAD


async def test_an_encoder_that_left_the_list_is_fetched_from_until_it_ends() -> None:
    async with fetching(serve) as (fetcher, encoder):
        fetcher.set_members([])
        await fetcher._members._close_those_that_left()
        _, payload = await fetcher.fetch("encoder-1", EXPECTED, 10)
        assert payload == PAYLOAD
        encoder.router.close()
        await eventually(lambda: not fetcher._members.connections)
        with pytest.raises(EncoderUnavailable):
            await fetcher.fetch("encoder-1", EXPECTED, 10)


async def test_several_fetches_run_over_one_connection() -> None:
    async def answer(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        encoder.say(
            received, FetchReply(fetch_id=fetch.fetch_id, header=msgspec.structs.replace(HEADER, chunk_bytes=512))
        )
        for index in range(4):
            await asyncio.sleep(0)
            encoder.say(received, FetchChunk(fetch_id=fetch.fetch_id, index=index), PAYLOAD[index * 512 :][:512])

    async with fetching(answer) as (fetcher, _):
        results = await asyncio.gather(*(fetcher.fetch("encoder-1", EXPECTED, 10) for _ in range(20)))
        assert all(payload == PAYLOAD for _, payload in results)


async def test_credit_is_exactly_what_the_payload_needs_and_never_more_in_flight() -> None:
    outstanding = []

    async def count(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        assert fetch.credit == CREDIT_CHUNKS
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
        granted = fetch.credit
        for index in range(HEADER.num_chunks):
            while granted <= index:
                granted += (await encoder.credits.get()).chunks
            outstanding.append(granted - index)
            encoder.chunk(received, fetch, index)

    async with fetching(count) as (fetcher, encoder):
        await fetcher.fetch("encoder-1", EXPECTED, 10)
        assert max(outstanding) <= CREDIT_CHUNKS
        assert encoder.credits.empty(), "more credit than chunks"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", WIDTH + 1),
        ("rows", ROWS - 1),
        ("rows", ROWS + 1),
        ("levels", 2),
        ("fingerprint", "0" * 64),
        ("grid", (1, 8, 32)),
        ("key", key_of(2)),
    ],
)
async def test_a_header_that_is_not_what_was_expected_is_refused_by_field(field: str, value: object) -> None:
    async def answer(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        header = msgspec.structs.replace(HEADER, **{field: value})
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=header))

    async with fetching(answer) as (fetcher, encoder):
        with pytest.raises(ProtocolError, match=f"embedding's {field} is .* expected"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)
        await encoder.stopped()


async def _damaged(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    header = msgspec.structs.replace(HEADER, checksum=1, chunk_bytes=2048)
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=header))
    encoder.say(received, FetchChunk(fetch_id=fetch.fetch_id, index=0), PAYLOAD)


async def _out_of_order(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
    for index in (0, 2):
        encoder.chunk(received, fetch, index)


async def _twice(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    for _ in range(2):
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))


async def _short_chunk(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
    encoder.chunk(received, fetch, 0, size=63)


async def _chunk_without_header(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    encoder.chunk(received, fetch, 0)


async def _chunk_without_payload(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
    encoder.say(received, FetchChunk(fetch_id=fetch.fetch_id, index=0))


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (_damaged, "checksum"),
        (_out_of_order, "out of order"),
        (_twice, "twice"),
        (_short_chunk, "63 bytes, expected 64"),
        (_chunk_without_header, "out of order"),
        (_chunk_without_payload, "out of order"),
    ],
)
async def test_a_payload_that_breaks_the_protocol_is_refused_and_the_next_fetch_works(
    script: Script, word: str
) -> None:
    async with fetching(script) as (fetcher, encoder):
        with pytest.raises(ProtocolError, match=word):
            await fetcher.fetch("encoder-1", EXPECTED, 10)
        await encoder.stopped()
        encoder.script = serve
        assert (await fetcher.fetch("encoder-1", EXPECTED, 10))[1] == PAYLOAD


async def test_an_encoder_that_no_longer_holds_it_is_an_unavailable_source() -> None:
    async def answer(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        error: TandemError = EncoderUnavailable("not held here")
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, error=error_detail(error)))

    async with fetching(answer) as (fetcher, _):
        with pytest.raises(EncoderUnavailable, match="not held here"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)


async def test_an_unknown_encoder_is_an_unavailable_source() -> None:
    async with fetching(serve) as (fetcher, _):
        with pytest.raises(EncoderUnavailable, match="no connection to encoder 'other'"):
            await fetcher.fetch("other", EXPECTED, 0.05)


async def test_a_fetch_waits_for_a_connection_that_is_being_made_and_not_for_one_that_was_lost() -> None:
    async with fetching(serve) as (fetcher, encoder):
        encoder.router.close()
        await eventually(lambda: not fetcher.encoder_ids)
        async with asyncio.timeout(1.0):
            with pytest.raises(EncoderUnavailable, match="no connection"):
                await fetcher.fetch("encoder-1", EXPECTED, 10)  # known to be away: nothing to wait for
        with zmq_context() as context:
            router = Router(context, "tcp://127.0.0.1:0", name="data", max_payload_bytes=MAX_CHUNK_BYTES)
            other = FakeEncoder(router, serve, asyncio.Queue(), "encoder-2")
            async with background(other.run()):
                fetch = asyncio.create_task(fetcher.fetch("encoder-2", EXPECTED, 10))
                await asyncio.sleep(0)
                fetcher.set_members([Member((router.endpoint,))])
                _, payload = await fetch
        assert payload == PAYLOAD


async def _half(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER))
    for index in range(3):
        encoder.chunk(received, fetch, index)


async def test_an_encoder_that_stalls_is_given_up_and_told_so() -> None:
    async with fetching(_half, stall_s=0.05) as (fetcher, encoder):
        with pytest.raises(EncoderUnavailable, match=r"sent nothing for 0\.05 s"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)
        await encoder.stopped()


async def test_the_time_limit_of_a_fetch_holds() -> None:
    async with fetching(_half) as (fetcher, encoder):
        with pytest.raises(TimeoutError):
            await fetcher.fetch("encoder-1", EXPECTED, 0.05)
        await encoder.stopped()


async def test_a_cancelled_fetch_is_told_to_the_encoder() -> None:
    async with fetching(_half) as (fetcher, encoder):
        task = asyncio.create_task(fetcher.fetch("encoder-1", EXPECTED, 10))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await encoder.stopped()


async def test_an_encoder_that_dies_in_mid_payload_fails_the_fetch_at_once() -> None:
    async def die(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        await _half(encoder, received, fetch)
        encoder.router.close()

    async with fetching(die) as (fetcher, _), asyncio.timeout(5):
        with pytest.raises(EncoderUnavailable, match="went away"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)


needs_sharing = pytest.mark.skipif(host_id() is None, reason="this system has no memfd or no /proc")


def region_of(payload: bytes) -> SharedRegion:
    region = SharedRegion(len(payload))
    region.write(0, memoryview(payload))
    region.seal()
    return region


@needs_sharing
async def test_a_payload_in_memory_of_this_host_is_mapped() -> None:
    region, hosts = region_of(PAYLOAD), []

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        hosts.append(fetch.host)
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=region.place))

    async with fetching(share, host=host_id()) as (fetcher, encoder):
        header, payload = await fetcher.fetch("encoder-1", EXPECTED, 10)
        assert (header, bytes(payload)) == (HEADER, PAYLOAD)
        assert hosts == [host_id()]
        async with asyncio.timeout(5):
            assert await encoder.credits.get() == FetchCredit(fetch_id="f0", chunks=0, is_mapped=True)
        payload[0] = 7  # as memory of its own
        assert bytes((await fetcher.fetch("encoder-1", EXPECTED, 10))[1]) == PAYLOAD
        assert fetcher._fetches == {}


@needs_sharing
async def test_memory_that_cannot_be_mapped_is_sent_instead_and_not_offered_again() -> None:
    region, hosts = region_of(PAYLOAD[:-1]), []

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        hosts.append(fetch.host)
        if fetch.host is None:
            await serve(encoder, received, fetch)
            return
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=region.place))
        credit = (await encoder.credits.get()).chunks
        assert credit == CREDIT_CHUNKS
        for index in range(HEADER.num_chunks):
            while credit == 0:
                credit += (await encoder.credits.get()).chunks
            credit -= 1
            encoder.chunk(received, fetch, index)

    async with fetching(share, host=host_id()) as (fetcher, _):
        for _ in range(2):
            assert bytes((await fetcher.fetch("encoder-1", EXPECTED, 10))[1]) == PAYLOAD
        assert hosts == [host_id(), None]


@needs_sharing
async def test_other_bytes_in_shared_memory_are_an_error() -> None:
    region = region_of(PAYLOAD[::-1])

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=region.place))

    async with fetching(share, host=host_id()) as (fetcher, _):
        with pytest.raises(ProtocolError, match="checksum"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)


NO_PLACE = SharedMemory(pid=1, fd=0, name="0" * 32)


async def share_in_vain(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
    """Name memory that nobody can map, to whoever fetches, and send when that is wished or was at first."""
    encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=NO_PLACE))
    credit = fetch.credit if fetch.host is None else (await encoder.credits.get()).chunks
    for index in range(HEADER.num_chunks):
        while credit == 0:
            credit += (await encoder.credits.get()).chunks
        credit -= 1
        encoder.chunk(received, fetch, index)


@pytest.mark.parametrize("host", [None, "0" * 32])
async def test_memory_that_was_not_asked_for_is_not_looked_at(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def look(place: SharedMemory, num_bytes: int) -> memoryview:
        looked.append(place)
        raise ProtocolError("it is not there")

    monkeypatch.setattr(embedding_fetch, "map_region", look)
    async with fetching(share_in_vain, host=host) as (fetcher, _):
        for _ in range(3):
            assert bytes((await fetcher.fetch("encoder-1", EXPECTED, 10))[1]) == PAYLOAD
    assert looked == ([] if host is None else [NO_PLACE])


@needs_sharing
async def test_an_encoder_that_connects_anew_is_asked_for_memory_again() -> None:
    hosts = []

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        hosts.append(fetch.host)
        await share_in_vain(encoder, received, fetch)

    async with fetching(share, host=host_id()) as (fetcher, encoder):
        await fetcher.fetch("encoder-1", EXPECTED, 10)
        for name in ("encoder-2", "encoder-1"):
            encoder.instance_id = name
            await eventually(lambda name=name: fetcher.encoder_ids == [name])  # type: ignore[misc]
        await fetcher.fetch("encoder-1", EXPECTED, 10)
    assert hosts == [host_id(), host_id()]


@needs_sharing
async def test_no_more_is_mapped_than_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_region, "MAX_REGIONS", 2)
    region, hosts = region_of(PAYLOAD), []

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        hosts.append(fetch.host)
        if fetch.host is None:
            await serve(encoder, received, fetch)
        else:
            encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=region.place))

    async with fetching(share, host=host_id()) as (fetcher, _):
        kept = [(await fetcher.fetch("encoder-1", EXPECTED, 10))[1] for _ in range(3)]
        assert hosts == [host_id(), host_id(), None]
        del kept[0]
        await eventually(fetcher._mapped.has_room)  # the thread that mapped it may hold it for a moment
        kept.append((await fetcher.fetch("encoder-1", EXPECTED, 10))[1])
        assert hosts[3:] == [host_id()]
        kept.clear()
        await eventually(lambda: fetcher._mapped.has_room(2))
        hosts.clear()
        together = await asyncio.gather(*(fetcher.fetch("encoder-1", EXPECTED, 10) for _ in range(4)))
        assert all(payload == PAYLOAD for _, payload in together)
        assert hosts == [host_id(), host_id(), None, None]


@needs_sharing
async def test_an_encoder_that_dies_between_its_answer_and_the_mapping_fails_the_fetch_at_once() -> None:
    async def die(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=NO_PLACE))
        await encoder.credits.get()  # its memory was not there
        encoder.router.close()

    async with fetching(die, host=host_id()) as (fetcher, _), asyncio.timeout(5):
        with pytest.raises(EncoderUnavailable, match="went away"):
            await fetcher.fetch("encoder-1", EXPECTED, 10)
        assert fetcher._fetches == {}


@needs_sharing
async def test_a_fetch_that_is_cancelled_while_it_maps_tells_the_encoder_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region, begun, may_map = region_of(PAYLOAD), threading.Event(), threading.Event()
    mapped: list[weakref.ref[object]] = []

    def slowly(place: SharedMemory, num_bytes: int) -> memoryview:
        begun.set()
        may_map.wait(5)
        view = map_region(place, num_bytes)
        mapped.append(weakref.ref(view.obj))
        return view

    async def share(encoder: FakeEncoder, received: Received, fetch: Fetch) -> None:
        encoder.say(received, FetchReply(fetch_id=fetch.fetch_id, header=HEADER, shared=region.place))

    monkeypatch.setattr(embedding_fetch, "map_region", slowly)
    async with fetching(share, host=host_id()) as (fetcher, encoder):
        running = asyncio.create_task(fetcher.fetch("encoder-1", EXPECTED, 10))
        await asyncio.to_thread(begun.wait, 5)
        running.cancel()
        await encoder.stopped()
        may_map.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: mapped and mapped[0]() is None)
        assert fetcher._fetches == {}
        assert fetcher._mapped.num_bytes == 0
