"""A media host that misbehaves in every way that a path names, and records who asked for what."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BODY = b"the file"


@dataclass
class MediaHost:
    """The running host."""

    port: int = 0
    requests: list[str] = field(default_factory=list)  # request line and headers, as they came
    num_open: int = 0  # connections
    file: bytes = BODY  # what "/tagged" and "/fresh" are at the moment

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def answer(self, path: str) -> bytes:
        """Head and body for a path."""
        etag = f'etag: "{zlib.crc32(self.file)}"'
        fixed = {
            "/tagged": _response("200 OK", self.file, etag),
            "/fresh": _response("200 OK", self.file, "cache-control: public, max-age=60"),
            "/fresh-elsewhere": _response("302 Found", b"", "location: /fresh"),
            "/not-modified": _response("304 Not Modified", b"", etag),
            "/ok": _response("200 OK", BODY),
            "/404": _response("404 Not Found", BODY),
            "/empty": _response("200 OK", b""),
            "/redirect": _response("302 Found", b"", "location: /ok"),
            "/loop": _response("302 Found", b"", "location: /loop"),
            "/to-private": _response("302 Found", b"", "location: http://169.254.169.254/latest"),
            "/to-file": _response("302 Found", b"", "location: file:///etc/passwd"),
            "/nowhere": _response("302 Found", b""),
            "/lies": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n",
            "/cut": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + BODY,
            "/nonsense": b"SSH-2.0-x\r\n\r\n",
        }
        return fixed[path.partition("?")[0]]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            path = head.split(" ")[1]
            if path.partition("?")[0] in ("/drip", "/endless"):
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
                while True:
                    writer.write(b"x" * (1 if path.startswith("/drip") else 65_536))
                    await writer.drain()
                    await asyncio.sleep(0.02 if path.startswith("/drip") else 0)
            if path == "/tagged" and f'if-none-match: "{zlib.crc32(self.file)}"' in head.lower():
                path = "/not-modified"
            writer.write(self.answer(path))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the fetcher left, which is what some tests are about
        finally:
            self.num_open -= 1
            writer.close()


def _response(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def media_host() -> AsyncIterator[MediaHost]:
    """A host on a free loopback port."""
    host = MediaHost()
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
