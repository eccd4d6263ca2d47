"""A link's life: up, down, another process at the same address, and a peer that falls silent."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq.asyncio

from common.errors import PeerUnreachable, ProtocolError
from common.link import MAX_MALFORMED, AttentiveClock, Link
from common.messages import AnyMessage, Cancel, LoadReport, Refused, Role
from common.transport import Dealer, Router
from common.wire import error_detail
from tests.common.sockets import Greeter, background, eventually, hello, ipc_address, zmq_context

ENCODER = hello("encoder", "e-1")


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq_context() as context:
        yield context


@pytest.fixture(params=["ipc", "tcp"])
def router(context: zmq.asyncio.Context, request: pytest.FixtureRequest) -> Iterator[Router]:
    if request.param == "tcp":
        yield Router(context, "tcp://127.0.0.1:*", name="test")
        return
    with ipc_address() as address:
        yield Router(context, address, name="test")


@dataclass
class Story:
    """A link and what its owner was told."""

    link: Link
    events: list[str] = field(default_factory=list)
    messages: list[AnyMessage] = field(default_factory=list)


@contextlib.asynccontextmanager
async def linked(
    context: zmq.asyncio.Context,
    endpoint: str,
    liveness_s: float = 30.0,
    role: Role | None = None,
    heartbeat_s: float = 0.02,
) -> AsyncIterator[Story]:
    def on_message(link: Link, message: AnyMessage, payload: Sequence[memoryview]) -> None:
        story.messages.append(message)

    link = Link(
        Dealer(context, endpoint, name="test-dealer"),
        lambda: hello("gateway", "g-1"),
        role=role,
        on_message=on_message,
        on_up=lambda link: story.events.append(f"up {link.peer.instance_id if link.peer else None}"),
        on_down=lambda link, instance_id: story.events.append(f"down {instance_id}"),
        heartbeat_s=heartbeat_s,
        liveness_s=liveness_s,
    )
    story = Story(link)
    async with background(link.run()):
        yield story
    link.close()


async def test_a_link_is_up_once_its_hello_is_answered(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story:
        assert not story.link.is_up
        with pytest.raises(PeerUnreachable, match="has not answered"):
            story.link.send(Cancel(request_id="r"))
        assert not story.link.try_send(Cancel(request_id="r"))
        async with background(greeter.run()):
            await eventually(lambda: story.link.is_ready)
            assert story.link.peer == ENCODER
            story.link.send(Cancel(request_id="r"))
            await eventually(lambda: [heard.message for heard in greeter.heard] == [Cancel(request_id="r")])
    assert story.events == ["up e-1"]


async def test_hello_is_said_as_soon_as_a_connection_stands_and_stands_again(
    context: zmq.asyncio.Context, router: Router
) -> None:
    async with linked(context, router.endpoint, heartbeat_s=600.0) as story:
        async with background(Greeter(router, ENCODER).run()):
            await eventually(lambda: story.events == ["up e-1"])
        router.close()
        await eventually(lambda: story.events == ["up e-1", "down e-1"])
        again = Router(context, router.endpoint, name="test")
        async with background(Greeter(again, ENCODER).run()):
            await eventually(lambda: story.events == ["up e-1", "down e-1", "up e-1"])


async def test_the_heartbeat_brings_changes_of_state(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, msgspec.structs.replace(ENCODER, is_ready=False))
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        assert not story.link.is_ready
        greeter.answer = ENCODER
        await eventually(lambda: story.link.is_ready)
        greeter.answer = msgspec.structs.replace(ENCODER, is_draining=True)
        await eventually(lambda: not story.link.is_ready)
        assert story.link.is_up
    assert story.events == ["up e-1"] * 3


async def test_a_load_report_that_says_draining_ends_readiness_at_once(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_ready)
        router.send(greeter.peers[0], LoadReport(instance_id="e-1", queue_s=2.0, is_draining=True))
        await eventually(lambda: not story.link.is_ready)
        assert story.link.load is not None
        assert story.link.load.queue_s == 2.0


async def test_a_service_of_another_role_never_counts_as_up(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint, role="decoder") as story, background(greeter.run()):
        await eventually(lambda: story.link.refusal is not None)
        assert "not of a decoder" in (story.link.refusal or "")
        assert not story.link.is_up
    assert story.events == []


async def test_messages_reach_the_owner(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        router.send(greeter.peers[0], Cancel(request_id="x"))
        await eventually(lambda: story.messages == [Cancel(request_id="x")])


async def test_a_refusal_is_remembered_until_the_peer_agrees(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    greeter.is_silent = True
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: greeter.peers)
        router.send(greeter.peers[0], Refused(error=error_detail(ProtocolError("another model"))))
        await eventually(lambda: story.link.refusal == "another model")
        assert not story.link.is_up
        greeter.is_silent = False
        await eventually(lambda: story.link.is_up)
        assert story.link.refusal is None


@pytest.mark.parametrize("router", ["ipc", "tcp"], indirect=True)
async def test_a_peer_that_restarts_is_lost_and_found_as_another(context: zmq.asyncio.Context, router: Router) -> None:
    async with linked(context, router.endpoint) as story:
        async with background(Greeter(router, ENCODER).run()):
            await eventually(lambda: story.link.is_up)
        router.close()
        await eventually(lambda: not story.link.is_up)
        again = Router(context, router.endpoint, name="test")
        async with background(Greeter(again, hello("encoder", "e-2")).run()):
            await eventually(lambda: story.link.is_ready)
            assert story.link.peer is not None
            assert story.link.peer.instance_id == "e-2"
    assert story.events == ["up e-1", "down e-1", "up e-2"]


async def test_another_process_behind_an_unbroken_connection_is_noticed(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        greeter.answer = hello("encoder", "e-2")
        await eventually(lambda: len(story.events) == 3)
    assert story.events == ["up e-1", "down e-1", "up e-2"]


async def test_a_silent_peer_is_given_up_and_taken_back(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint, liveness_s=1.0) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        greeter.is_silent = True
        await eventually(lambda: not story.link.is_up)
        assert story.link.load is None
        greeter.is_silent = False
        await eventually(lambda: story.link.is_up)
    assert story.events == ["up e-1", "down e-1", "up e-1"]


@pytest.mark.parametrize("router", ["ipc"], indirect=True)
async def test_any_message_counts_as_a_sign_of_life(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint, liveness_s=1.0) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        greeter.is_silent = True
        for number in range(75):
            router.send(greeter.peers[0], LoadReport(instance_id="e-1", waiting=number))
            await asyncio.sleep(0.02)
        assert story.events == ["up e-1"]
        await eventually(lambda: story.events == ["up e-1", "down e-1"])


async def test_a_refusal_of_a_request_s_message_reaches_the_owner(context: zmq.asyncio.Context, router: Router) -> None:
    greeter = Greeter(router, ENCODER)
    refused = Refused(error=error_detail(ProtocolError("no such thing")), request_id="r")
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        router.send(greeter.peers[0], Refused(error=refused.error))
        router.send(greeter.peers[0], refused)
        await eventually(lambda: story.messages == [refused])


def test_time_in_which_our_own_loop_stood_still_does_not_count() -> None:
    seconds = iter([100.0, 100.5, 101.0, 131.0, 131.6])
    clock = AttentiveClock(0.5, lambda: next(seconds))
    assert [round(clock.look(), 6) for _ in range(4)] == [0.5, 1.0, 2.0, 2.6]
    assert round(clock.now, 6) == 2.6


@pytest.mark.parametrize("router", ["ipc"], indirect=True)
async def test_a_peer_is_not_blamed_for_a_time_when_our_own_loop_stood_still(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint, liveness_s=0.5) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        threading.Event().wait(1.0)
        await asyncio.sleep(0.1)
        assert story.events == ["up e-1"]


async def test_what_an_instance_must_hear_is_sent_once_it_is_back_and_nothing_overtakes_it(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        story.link.send_or_keep(Cancel(request_id="for nobody"))
        await eventually(lambda: story.link.is_up)
        story.link._go_down("silence, say")
        for number in range(3):
            story.link.send_or_keep(Cancel(request_id=f"r{number}"))
        await eventually(lambda: story.link.is_up)
        story.link.send(Cancel(request_id="new"))
        await eventually(lambda: len(greeter.heard) == 4)
        said = [heard.message for heard in greeter.heard]
        assert said == [Cancel(request_id=name) for name in ("r0", "r1", "r2", "new")]


async def test_what_was_kept_is_sent_with_the_heartbeat_when_nothing_else_is(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        story.link._go_down("silence, say")
        story.link.send_or_keep(Cancel(request_id="r"))
        await eventually(lambda: [heard.message for heard in greeter.heard] == [Cancel(request_id="r")])


async def test_another_instance_is_not_told_what_the_last_one_should_have_heard(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        story.link._go_down("silence, say")
        story.link.send_or_keep(Cancel(request_id="old"))
        greeter.answer = hello("encoder", "e-2")
        await eventually(lambda: story.link.is_up)
        story.link.send(Cancel(request_id="new"))
        await eventually(lambda: greeter.heard)
        assert [heard.message for heard in greeter.heard] == [Cancel(request_id="new")]


async def test_no_more_than_a_limit_of_messages_is_kept(
    context: zmq.asyncio.Context, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.link.MAX_KEPT", 2)
    greeter = Greeter(router, ENCODER)
    async with linked(context, router.endpoint) as story, background(greeter.run()):
        await eventually(lambda: story.link.is_up)
        story.link._go_down("silence, say")
        for number in range(5):
            story.link.send_or_keep(Cancel(request_id=f"r{number}"))
        await eventually(lambda: len(greeter.heard) == 2)
        assert [heard.message for heard in greeter.heard] == [Cancel(request_id="r3"), Cancel(request_id="r4")]


async def test_a_peer_whose_messages_cannot_be_read_goes_down_and_one_bad_message_is_forgiven(
    context: zmq.asyncio.Context, router: Router
) -> None:
    greeter = Greeter(router, ENCODER)
    async with background(greeter.run()), linked(context, router.endpoint) as story:
        await eventually(lambda: story.events == ["up e-1"])
        router._socket.send_at_once([greeter.peers[0], b"nonsense"])
        await eventually(lambda: story.link._num_malformed == 1)
        assert story.events == ["up e-1"]
        for _ in range(MAX_MALFORMED):
            router._socket.send_at_once([greeter.peers[0], b"nonsense"])
        await eventually(lambda: "down e-1" in story.events)
