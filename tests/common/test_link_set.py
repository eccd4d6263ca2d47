"""Members that come and go: who is connected to, who gets new work, and when a connection ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import zmq.asyncio

from common.link import Link
from common.link_set import LinkSet
from common.members import Member
from common.transport import Dealer, Router
from tests.common.sockets import Greeter, background, eventually, hello, zmq_context


@dataclass
class World:
    """A set of links among services that answer."""

    context: zmq.asyncio.Context
    stack: AsyncExitStack
    busy: set[str] = field(default_factory=set)
    changes: list[int] = field(default_factory=list)
    links: "LinkSet[Link]" = field(init=False)

    def __post_init__(self) -> None:
        self.links = LinkSet(
            lambda member: Link(
                Dealer(self.context, member.endpoints[0], name="test"),
                lambda: hello("gateway", "g"),
                on_message=lambda link, message, payload: None,
                heartbeat_s=0.02,
            ),
            links_of=lambda link: (link,),
            is_busy=lambda link: link.endpoint in self.busy,
            on_change=lambda: self.changes.append(1),
            look_every_s=0.01,
        )

    async def service(self, name: str) -> str:
        """The address of a service that runs."""
        router = Router(self.context, "tcp://127.0.0.1:0", name="test")
        await self.stack.enter_async_context(background(Greeter(router, hello("encoder", name)).run()))
        return router.endpoint

    @property
    def up(self) -> list[str]:
        return sorted(link.peer.instance_id for link in self.links.connections if link.peer is not None)

    @property
    def ready(self) -> list[str]:
        return sorted(link.peer.instance_id for link in self.links.connections if link.peer and link.is_ready)

    async def until_up(self, *names: str) -> None:
        await eventually(lambda: self.up == sorted(names))


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    with zmq_context() as context:
        async with AsyncExitStack() as stack:
            found = World(context, stack)
            await stack.enter_async_context(background(found.links.run()))
            yield found


async def test_members_are_connected_to_as_they_come_and_left_when_they_go() -> None:
    async with world() as w:
        a, b = await w.service("a"), await w.service("b")
        w.links.set_members([Member((a,))])
        await w.until_up("a")
        kept = w.links.connections[0]
        w.links.set_members([Member((b,)), Member((a,))])
        await w.until_up("a", "b")
        assert kept in w.links.connections
        w.links.set_members([Member((b,))])
        await w.until_up("b")
        await eventually(lambda: len(w.changes) >= 4)  # three lists, and the end of one connection


async def test_a_member_that_takes_no_new_work_stays_connected_and_may_come_back() -> None:
    async with world() as w:
        a = await w.service("a")
        w.links.set_members([Member((a,))])
        await eventually(lambda: w.ready == ["a"])
        w.links.set_members([Member((a,), takes_new_work=False)])
        assert (w.up, w.ready) == (["a"], [])
        w.links.set_members([Member((a,))])
        assert w.ready == ["a"]


async def test_a_member_that_left_is_kept_until_its_work_has_ended() -> None:
    async with world() as w:
        a = await w.service("a")
        w.links.set_members([Member((a,))])
        await w.until_up("a")
        w.busy.add(a)
        w.links.set_members([])
        await asyncio.sleep(0.1)
        assert (w.up, w.ready) == (["a"], [])
        w.busy.clear()
        await eventually(lambda: not w.links.connections)


async def test_a_member_that_left_and_broke_off_is_forgotten_though_it_had_work() -> None:
    async with world() as w:
        router = Router(w.context, "tcp://127.0.0.1:0", name="test")
        async with background(Greeter(router, hello("encoder", "a")).run()):
            w.links.set_members([Member((router.endpoint,))])
            await w.until_up("a")
            w.busy.add(router.endpoint)
            w.links.set_members([])
        router.close()
        await eventually(lambda: not w.links.connections)


async def test_a_member_that_is_listed_again_before_its_connection_ended_keeps_it() -> None:
    async with world() as w:
        a = await w.service("a")
        w.links.set_members([Member((a,))])
        await w.until_up("a")
        kept = w.links.connections[0]
        w.busy.add(a)
        w.links.set_members([])
        w.links.set_members([Member((a,))])
        w.busy.clear()
        await asyncio.sleep(0.05)
        assert w.links.connections == [kept]
        assert w.ready == ["a"]
