"""Connections to the members of a tier, which come and go.

Owns the tasks that keep the connections. A member that leaves the list, or takes no new work, is asked for nothing new;
its connections stay until they break or nothing runs over them, so that what runs there ends there. Runs on the event
loop; knows nothing of requests.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

from common.link import Link
from common.members import Member

logger = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0


C = TypeVar("C")


class LinkSet(Generic[C]):
    """The connections of one tier, each of one link or several. The owner awaits `run`."""

    def __init__(
        self,
        connect: Callable[[Member], C],
        *,
        links_of: Callable[[C], Sequence[Link]],
        is_busy: Callable[[C], bool],
        on_change: Callable[[], None] = lambda: None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`connect` opens the sockets; `is_busy` says whether something still runs over a connection. There are none
        until members are set."""
        self._connect = connect
        self._links_of = links_of
        self._is_busy = is_busy
        self._on_change = on_change
        self._look_every_s = look_every_s
        self._by_endpoints: dict[tuple[str, ...], C] = {}
        self._left: set[tuple[str, ...]] = set()
        self._tasks: dict[tuple[str, ...], list[asyncio.Task[None]]] = {}
        self._failed: asyncio.Future[None] | None = None

    @property
    def connections(self) -> list[C]:
        """All connections, also those to members that have left and still have work."""
        return list(self._by_endpoints.values())

    def set_members(self, members: Sequence[Member]) -> None:
        """Connect to who is new, and ask nothing new of who has left or is about to."""
        self._apply(members)
        self._on_change()

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            for endpoints in self._by_endpoints:
                self._start(endpoints)
            while not self._failed.done():
                await asyncio.wait({self._failed}, timeout=self._look_every_s)
                await self._close_those_that_left()
            self._failed.result()
        finally:
            self._failed.cancel()
            self._failed = None
            for endpoints in list(self._by_endpoints):
                await self._disconnect(endpoints)

    def _apply(self, members: Sequence[Member]) -> None:
        listed = {member.endpoints: member for member in members}
        for endpoints, member in listed.items():
            if endpoints not in self._by_endpoints:
                self._by_endpoints[endpoints] = self._connect(member)
                if self._failed is not None:
                    self._start(endpoints)  # else `run` does
            self._left.discard(endpoints)
            self._retire(endpoints, not member.takes_new_work)
        for endpoints in self._by_endpoints.keys() - listed.keys() - self._left:
            logger.info("a member has left", endpoints=endpoints)
            self._left.add(endpoints)
            self._retire(endpoints, True)

    def _retire(self, endpoints: tuple[str, ...], is_retiring: bool) -> None:
        for link in self._links_of(self._by_endpoints[endpoints]):
            link.is_retiring = is_retiring

    def _start(self, endpoints: tuple[str, ...]) -> None:
        links = self._links_of(self._by_endpoints[endpoints])
        tasks = [asyncio.create_task(link.run(), name="link") for link in links]
        for task in tasks:
            task.add_done_callback(self._on_done)
        self._tasks[endpoints] = tasks

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """A link never ends by itself: what it failed with is the owner's to hear."""
        if task.cancelled() or (error := task.exception()) is None or self._failed is None or self._failed.done():
            return
        self._failed.set_exception(error)

    async def _close_those_that_left(self) -> None:
        for endpoints in list(self._left):
            connection = self._by_endpoints[endpoints]
            if self._is_busy(connection) and all(link.is_up for link in self._links_of(connection)):
                continue
            self._left.discard(endpoints)
            await self._disconnect(endpoints)
            self._on_change()

    async def _disconnect(self, endpoints: tuple[str, ...]) -> None:
        connection, tasks = self._by_endpoints.pop(endpoints), self._tasks.pop(endpoints, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links_of(connection):
            link.close()
