"""Server-sent events: a stream that opens with its first event, stays alive, notices leaving clients, and ends clearly.

Owns the pulling of a producer with time limits, keep-alive comments, and the response itself. An error before the
stream is open is an ordinary HTTP error; after it, an error event and the end, without `[DONE]`. Knows nothing of
what the events say. Runs in the request's task.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import Cancelled, Overloaded, TandemError
from gateway_svc.http.errors import error_body, internal_error

MAX_PENDING = 1024
STALL_S = 60.0
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS: Mapping[str, str] = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
logger = structlog.get_logger(__name__)


def encode_event(value: object) -> bytes:
    """One event of JSON data. JSON has no line breaks of its own, so one `data:` line holds it."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Puller(Generic[T]):
    """Runs a producer in a task of its own and hands over what there is, for as long as the client is there.

    A pull that times out leaves the producer at work; a slow client holds it up once `MAX_PENDING` items wait, and
    one that takes none of them for `stall_s` is given up: the source is closed. Close it in every case: that ends
    the producer.
    """

    def __init__(self, source: AsyncGenerator[T, None], receive: Receive, *, stall_s: float = STALL_S) -> None:
        self._source = source
        self._stall_s = stall_s
        self._items: list[T] = []
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._producer = asyncio.create_task(self._produce())
        self._client_gone = asyncio.create_task(_disconnect(receive))
        for task in (self._producer, self._client_gone):
            task.add_done_callback(lambda _: self._changed.set())

    async def pull(self, timeout_s: float | None) -> list[T]:
        """All items since the last pull, after waiting for the first; none when there was none in time.

        Raises StopAsyncIteration at the end, Cancelled when the client left, and what the producer raises.
        """
        if not (self._items or self._producer.done() or self._client_gone.done()):
            await self._wait(timeout_s)
        if self._items:
            items, self._items = self._items, []
            self._has_room.set()
            return items
        if self._producer.done():
            self._producer.result()
            raise StopAsyncIteration
        if not self._client_gone.done():
            return []
        raise Cancelled("the client closed the connection")

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something happens, or for so long. A plain timer: this runs for each token of each stream."""
        self._changed.clear()
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(timeout_s, self._changed.set) if timeout_s is not None else None
        try:
            await self._changed.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

    async def aclose(self) -> None:
        """Stop the producer and wait until it has cleaned up."""
        self._producer.cancel()
        self._client_gone.cancel()
        await asyncio.gather(self._producer, self._client_gone, return_exceptions=True)
        await self._source.aclose()

    async def _produce(self) -> None:
        async with aclosing(self._source) as source:
            async for item in source:
                self._items.append(item)
                self._changed.set()
                if len(self._items) >= MAX_PENDING:
                    self._has_room.clear()
                    await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._has_room.wait()
        except TimeoutError as exc:
            raise Cancelled(f"the client has read nothing of its stream for {self._stall_s:g} s") from exc


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(puller: Puller[T]) -> list[T]:
    """All items; for answers that are not streamed."""
    items: list[T] = []
    try:
        while True:
            items += await puller.pull(None)
    except StopAsyncIteration:
        return items
    finally:
        await puller.aclose()


@dataclass(frozen=True)
class EventFormat:
    """How the values of a stream become bytes, errors included, and what ends it."""

    encode: Callable[[object], bytes] = encode_event
    done: bytes = DONE


DATA_ALONE = EventFormat()


class EventWriter(Protocol[T_contra]):
    """What a stream says."""

    def opening(self) -> Iterable[object]:
        """Before the first item."""
        ...

    def events(self, item: T_contra) -> Iterable[object]:
        """For an item; there may be nothing to say."""
        ...

    def closing(self) -> Iterable[object]:
        """At a good end."""
        ...


async def open_stream(
    puller: Puller[T],
    writer: EventWriter[T],
    *,
    open_s: float,
    keep_alive_s: float,
    request_id: str,
    form: EventFormat = DATA_ALONE,
) -> Response:
    """Wait for the first items, at most `open_s`, and answer with a stream. Earlier errors are raised."""
    try:
        first = await puller.pull(open_s)
    except BaseException:
        await puller.aclose()
        raise
    return EventStreamResponse(puller, writer, first, keep_alive_s=keep_alive_s, request_id=request_id, form=form)


class EventStreamResponse(Response, Generic[T]):
    """The response of an open stream."""

    media_type = "text/event-stream"

    def __init__(
        self,
        puller: Puller[T],
        writer: EventWriter[T],
        first: list[T],
        *,
        keep_alive_s: float,
        request_id: str,
        form: EventFormat = DATA_ALONE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._puller = puller
        self._writer = writer
        self._first = first
        self._keep_alive_s = keep_alive_s
        self._request_id = request_id
        self._form = form
        self.init_headers(STREAM_HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the producer ends, fails, or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for block in self._blocks():
                if block:
                    await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Cancelled:
            logger.debug("the client left the stream", request_id=self._request_id)
        finally:
            await self._puller.aclose()

    async def _blocks(self) -> AsyncGenerator[bytes, None]:
        items = self._first
        is_open = False
        encode = self._form.encode
        try:
            while True:
                yield b"".join(self._encoded(items, with_opening=not is_open)) if items else KEEP_ALIVE
                is_open = is_open or bool(items)
                items = await self._puller.pull(self._keep_alive_s)
        except StopAsyncIteration:
            yield b"".join([*map(encode, self._writer.closing()), self._form.done])
        except Cancelled:
            raise
        except asyncio.CancelledError:
            # The server stops and its time for running answers is up: the client is told, and the response ends in
            # good order, which is all that was still to be done.
            yield encode(error_body(Overloaded("this server is shutting down: send the request again")))
        except TandemError as error:
            yield encode(error_body(error))
        except Exception:
            logger.exception("a stream failed", request_id=self._request_id)
            yield encode(error_body(internal_error(self._request_id)))

    def _encoded(self, items: Iterable[T], *, with_opening: bool) -> Iterator[bytes]:
        if with_opening:
            yield from map(self._form.encode, self._writer.opening())
        for item in items:
            yield from map(self._form.encode, self._writer.events(item))
