"""Calls to Redis that can never hurt: each within a time, few at once, and none while Redis is known to be away.

Owns the breaker and the counters of calls. Whatever goes wrong is the result None. Knows nothing of what is called.
Runs on the event loop of its process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from redis.exceptions import RedisError, ResponseError

from common.metrics import Counter, Gauge

logger = structlog.get_logger(__name__)

CACHE_CALLS = Counter("tandem_cache_calls_total", "Calls to the Redis cache", ["call", "outcome"])
CACHE_BREAKER_OPEN = Gauge("tandem_cache_breaker_open", "1 while Redis is skipped because it failed")

MAX_CALLS = 16  # at once, each on a connection of its own
TURNS_AFTER_WAIT = 10

T = TypeVar("T")


class RedisGuard:
    """Runs calls for one process."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._breaker = Breaker()
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._answered_at = 0.0
        self._late: set[asyncio.Task[object]] = set()  # calls that go on although nobody waits for them any more

    @property
    def is_closed(self) -> bool:
        """Whether Redis answers: the last call reached it, and none waits for longer than a request would."""
        return self._breaker.is_closed and not self._late

    async def close(self) -> None:
        """End the calls that still go on."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def run_briefly(self, name: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """As `run`, but a request waits for the result: once Redis is silent for `wait_s` it goes on as after a miss.

        The call then goes on alone, and until it has ended such calls are not made: a Redis that is frozen costs the
        first request `wait_s`, and the next ones nothing. Many calls at once may take longer, while answers come.
        """
        if self._late:
            CACHE_CALLS.labels(name, "skipped").inc()
            return None
        task = asyncio.create_task(self.run(name, timeout_s, call))
        try:
            await self._wait_while_answering(task)
        except BaseException:
            task.cancel()
            raise
        if task.done():
            return task.result()
        CACHE_CALLS.labels(name, "late").inc()
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return None

    async def _wait_while_answering(self, task: "asyncio.Task[T | None]") -> None:
        """Return when the task is done, or when no call was answered for `wait_s`."""
        began = time.monotonic()
        while not task.done():
            left_s = max(began, self._answered_at) + self._wait_s - time.monotonic()
            await asyncio.wait({task}, timeout=max(0.0, left_s))
            for _ in range(TURNS_AFTER_WAIT):
                if not task.done():  # the loop may have been busy: an answer that is here needs some turns of it
                    await asyncio.sleep(0)
            if max(began, self._answered_at) + self._wait_s <= time.monotonic():
                return

    async def run(self, name: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """The call's result, or None when it fails, takes longer, or is not made because Redis is away.

        Its time begins when it has a connection: it is Redis that is judged, not our own queue.
        """
        if not self._breaker.allows(time.monotonic()):
            CACHE_CALLS.labels(name, "skipped").inc()
            return None
        async with self._room:
            if not self._breaker.allows(time.monotonic()):  # it failed while this call waited
                CACHE_CALLS.labels(name, "skipped").inc()
                return None
            return await self._call(name, timeout_s, call)

    async def _call(self, name: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        task = asyncio.current_task()
        assert task is not None
        cancels_before = task.cancelling()
        try:
            return await self._judged(name, timeout_s, call)
        finally:
            # The client may lose a cancellation that comes while it connects or closes a connection.
            if task.cancelling() > cancels_before:
                raise asyncio.CancelledError

    async def _judged(self, name: str, timeout_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        try:
            async with asyncio.timeout(timeout_s):
                result = await call()
        except ResponseError as exc:  # Redis is there and says no: it is full, or read-only
            CACHE_CALLS.labels(name, "refused").inc()
            logger.warning("Redis refused a call", call=name, reason=type(exc).__name__)
            self._record_success()
            return None
        except Exception as exc:  # a cache is never worth a request: whatever answers there, requests go on
            self._record_failure(name, exc)
            return None
        self._record_success()
        CACHE_CALLS.labels(name, "miss" if result is None else "ok").inc()
        return result

    def _record_success(self) -> None:
        self._answered_at = time.monotonic()
        self._breaker.record_success()
        CACHE_BREAKER_OPEN.set(0)

    def _record_failure(self, name: str, exc: Exception) -> None:
        CACHE_CALLS.labels(name, "failed").inc()
        if self._breaker.record_failure(time.monotonic()):
            is_expected = isinstance(exc, RedisError | OSError | TimeoutError)
            logger.warning(
                "Redis is skipped for a while",
                call=name,
                reason=type(exc).__name__,
                exc_info=None if is_expected else exc,
            )
        CACHE_BREAKER_OPEN.set(1)


class Breaker:
    """Skips a dependency after a failure, for a time that doubles with each failure in a row. Pure: `now` is given."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 10.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = first_s
        self._open_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether nothing has failed since the last success."""
        return self._open_until == 0.0

    def allows(self, now: float) -> bool:
        """Whether a call may be tried."""
        return now >= self._open_until

    def record_failure(self, now: float) -> bool:
        """Open the breaker; true when it was closed. Calls that fail together count as one failure."""
        was_closed = self.is_closed
        if not self.allows(now):
            return False
        self._open_until = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        return was_closed

    def record_success(self) -> None:
        """Close the breaker."""
        self._open_until = 0.0
        self._pause_s = self._first_s
