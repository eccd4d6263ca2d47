"""A client for many streams that costs little: it keeps bytes while streams run, and looks into them afterwards.

One connection for each stream, as asyncio protocols. Knows HTTP only as far as the servers measured need it.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any, cast


class _Stream(asyncio.Protocol):
    """One connection: a request, and the bytes of its answer."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.arrivals: list[float] = []
        self.first_content_at: float | None = None
        self.first_content = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, head_and_body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(head_and_body)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.arrivals.append(time.perf_counter())
        if self.first_content_at is None and b'"delta":{"content"' in self.received.replace(b": ", b":"):
            self.first_content_at = time.perf_counter()
            if not self.first_content.done():
                self.first_content.set_result(None)
        if self.received.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"data: [DONE]\n\n\r\n")) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.first_content, self.done):
            if not future.done():
                future.set_exception(ConnectionError("the server closed a stream before its end"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True)
class Answer:
    """One stream as it was received."""

    texts: list[str]
    ttft_s: float
    status: int
    longest_gap_s: float


@dataclass(frozen=True)
class Burst:
    """Many streams that ran at once. `wall_s` is from the first request to the last byte."""

    answers: list[Answer]
    wall_s: float

    @property
    def num_chunks(self) -> int:
        """Chunks with text."""
        return sum(len(answer.texts) for answer in self.answers)


def request_bytes(prompt: str, *, max_tokens: int, barrier: int, step_s: float) -> bytes:
    """A chat completion that the stub decoder understands; the bare server reads the same."""
    body = json.dumps(
        {
            "model": "bench",
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": max_tokens,
            "seed": barrier,
            "temperature": step_s * 100,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Streams:
    """Connections to one server, opened before anything is measured."""

    def __init__(self, streams: list[_Stream]) -> None:
        self._streams = streams

    @classmethod
    async def open(cls, port: int, count: int) -> "Streams":
        """Connect `count` times."""
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(_Stream, "127.0.0.1", port) for _ in range(count)]
        return cls([protocol for _, protocol in made])

    async def run(self, requests: list[bytes], *, timeout_s: float = 120.0) -> Burst:
        """Send a request on each connection and wait for all to end."""
        began = self.start(requests)
        return await self.finish(began, timeout_s=timeout_s)

    def start(self, requests: list[bytes]) -> float:
        """Send; returns when that was."""
        began = time.perf_counter()
        for stream, request in zip(self._streams, requests, strict=True):
            stream.send(request)
        return began

    async def all_begun(self) -> None:
        """Return when each stream has its first text."""
        await asyncio.gather(*(stream.first_content for stream in self._streams))

    def leave(self) -> None:
        """Close all connections, whatever is still to come."""
        for stream in self._streams:
            stream.done.cancel()
            stream.close()

    async def finish(self, began: float, *, timeout_s: float = 120.0) -> Burst:
        """Wait for the ends, close, and read what came."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(stream.done for stream in self._streams))
        wall_s = time.perf_counter() - began
        answers = [_answer(stream, began) for stream in self._streams]
        for stream in self._streams:
            stream.close()
        await asyncio.sleep(0)
        return Burst(answers, wall_s)


def _answer(stream: _Stream, began: float) -> Answer:
    head, _, body = bytes(stream.received).partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    texts = [text for event in _events(_unchunked(body)) if (text := _text_of(event))]
    assert stream.first_content_at is not None
    gaps = [later - earlier for earlier, later in itertools.pairwise(stream.arrivals)]
    return Answer(texts, stream.first_content_at - began, status, max(gaps, default=0.0))


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def _events(stream: bytes) -> list[dict[str, Any]]:
    lines = [block[6:] for block in stream.split(b"\n\n") if block.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def _text_of(event: dict[str, Any]) -> str:
    assert "error" not in event, event
    text: str = event["choices"][0]["delta"].get("content") or ""
    return text
