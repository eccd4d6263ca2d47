"""Work that several want at once and that is done once: whoever comes while it runs waits for the same result.

It goes on as long as anyone waits for it, and is cancelled with the last one. Knows nothing of the work. Runs on the
event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    num_waiting: int = 0


class SingleFlight(Generic[T]):
    """The work that is under way, by key."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    async def run(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work that goes by this key, started now if it does not run. Raises what it raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start(), name="flight"))
            flight.task.add_done_callback(lambda task: self._forget(key, task))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()

    def _forget(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if task.done() and not task.cancelled():
            task.exception()  # told to those who wait, of whom there may be none any more
