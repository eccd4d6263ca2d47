"""Reads an embedding from Redis straight into the buffer where it will stay, at the speed of the socket.

A general client parses and joins each value, which costs as much as the transfer. Here the reply's length is known
beforehand, so that its frame is only compared and its bytes are received in place, checked while the next ones arrive.
Redis-py opens and authenticates the connections. Blocking: runs in threads of its own; knows nothing of embeddings.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis
from isal import isal_zlib
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import ConfigError

NUM_THREADS = 4
READ_AHEAD = 8  # values asked for and not yet received
CONNECT_TIMEOUT_S = 0.25

T = TypeVar("T")


class BlockingReader:
    """Connections to one server, each used by one call at a time."""

    def __init__(self, url: str) -> None:
        try:
            self._pool = redis.ConnectionPool.from_url(
                url,
                protocol=2,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except ValueError as exc:
            raise ConfigError(f"the Redis URL is not valid: {exc}") from exc
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="redis-read")

    async def run(self, call: Callable[["Reading"], T], timeout_s: float) -> T:
        """Run `call` in a thread, with a connection, until `timeout_s` from now or until cancelled."""
        reading = Reading(time.monotonic() + timeout_s)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, call, reading)
        finally:
            reading.is_over.set()

    def close(self) -> None:
        """Close the connections; what runs ends with an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.disconnect()

    def _run(self, call: Callable[["Reading"], T], reading: "Reading") -> T:
        reading.left_s()
        connection = self._pool.get_connection()
        try:
            reading.connection = connection
            result = call(reading)
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]  # replies may still come, which the next call must never see
            raise
        finally:
            self._pool.release(connection)
        return result


class Reading:
    """One call's use of a connection. Raises OSError or RedisError when something is wrong, and then closes it."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.is_over = threading.Event()
        self.connection: Any = None

    def left_s(self) -> float:
        """Seconds that are left; raises TimeoutError when there are none, or nobody waits."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or self.is_over.is_set():
            raise TimeoutError("the time for reading from Redis is over")
        return left_s

    def command(self, *words: str | int) -> object:
        """One command's reply, as redis-py parses it."""
        self._socket().settimeout(self.left_s())
        self.connection.send_command(*words, check_health=False)
        return self.connection.read_response()

    def values_into(self, buffer: memoryview, commands: Sequence[tuple[str | int, ...]], size: int) -> int | None:
        """Receive the values that commands answer with, `size` bytes each but for the last, and their CRC-32.

        None when one is missing or of another length: then replies are left over, and the caller's connection must
        not be used again, for which `give_up` is there.
        """
        sock, checksum = self._socket(), 0
        asked = 0
        frame_end = b""
        for index in range(len(commands)):
            wanted = min(len(commands), index + READ_AHEAD)
            if asked < wanted and (asked == index or wanted - asked >= READ_AHEAD // 2 or wanted == len(commands)):
                self.connection.send_packed_command(
                    self.connection.pack_commands(commands[asked:wanted]), check_health=False
                )
                asked = wanted
            target = buffer[index * size : (index + 1) * size]
            if not self._receive_exactly(sock, frame_end + b"$%d\r\n" % len(target)):
                return None
            checksum = self._receive(sock, target, checksum)
            frame_end = b"\r\n"
        return checksum if self._receive_exactly(sock, frame_end) else None

    def give_up(self) -> None:
        """Close the connection: replies are left over."""
        self.connection.disconnect()

    def _socket(self) -> "socket.socket":
        if self.connection._sock is None:  # closed by the server since its last use
            self.connection.connect()
        sock: socket.socket = self.connection._sock
        return sock

    def _receive_exactly(self, sock: "socket.socket", expected: bytes) -> bool:
        """Whether the next bytes are these; reads no byte behind the first that differs from a shorter frame."""
        got = bytearray(len(expected))
        view, received = memoryview(got), 0
        while received < len(expected):
            sock.settimeout(self.left_s())
            count = sock.recv_into(view[received:])
            if count == 0:
                raise ConnectionError("Redis closed the connection")
            received += count
            if got[:received] != expected[:received]:
                return False
        return True

    def _receive(self, sock: "socket.socket", target: memoryview, checksum: int) -> int:
        """Fill `target`; gives the CRC-32 with what comes in, each part of it while it is in the core's cache."""
        sock.settimeout(self.left_s())
        while target:
            count = sock.recv_into(target)
            if count == 0:
                raise ConnectionError("Redis closed the connection")
            checksum = isal_zlib.crc32(target[:count], checksum)
            target = target[count:]
        return checksum
