"""A ZMQ socket on the event loop: no message is missed, and nothing of it stays behind in the loop."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import cast

import pytest
import zmq
import zmq.asyncio

from common.loop_socket import LoopSocket
from tests.common.sockets import zmq_context

TIME_S = 5.0


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq_context() as context:
        yield context


@pytest.fixture
def ours(context: zmq.asyncio.Context) -> LoopSocket:
    socket = LoopSocket.of(context, zmq.DEALER)
    socket.bind("tcp://127.0.0.1:*")
    return socket


@pytest.fixture
def peer(ours: LoopSocket) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ours.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        socket.send(b"here")
        assert ours.poll(TIME_S * 1000)
        assert ours.recv() == b"here"
        yield socket


async def receive(socket: LoopSocket) -> list[bytes]:
    async with asyncio.timeout(TIME_S):
        return [frame.bytes for frame in await socket.receive()]


async def waiting(socket: LoopSocket) -> "asyncio.Task[list[bytes]]":
    task = asyncio.create_task(receive(socket))
    while socket._waiter is None:  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)
    return task


async def test_messages_come_in_order_whether_they_are_waited_for_or_not(
    ours: LoopSocket, peer: "zmq.Socket[bytes]"
) -> None:
    for number in range(20):
        task = await waiting(ours)
        peer.send_multipart([b"%d" % number, b"a"])
        peer.send_multipart([b"%d" % number, b"b"])
        assert await task == [b"%d" % number, b"a"]
        assert await receive(ours) == [b"%d" % number, b"b"]


async def test_a_message_that_comes_while_this_socket_sends_is_not_missed(
    ours: LoopSocket, peer: "zmq.Socket[bytes]"
) -> None:
    for _ in range(5):
        task = await waiting(ours)
        peer.send(b"question")
        time.sleep(0.02)  # noqa: ASYNC251 - the loop must not hear of the message before it sends
        ours.send_at_once([b"answer"])
        assert await task == [b"question"]
        assert peer.recv() == b"answer"


def test_a_send_goes_through_as_soon_as_a_connection_stands(context: zmq.asyncio.Context, ours: LoopSocket) -> None:
    late = LoopSocket.of(context, zmq.DEALER)
    late.immediate = 1
    monitor: object = late.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events = zmq.Socket.shadow(cast("zmq.asyncio.Socket", monitor).underlying)  # one that waits
    late.connect(ours.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    while not events.poll(0):
        with contextlib.suppress(zmq.Again):
            late.send_at_once([b"early"])  # from now on ZMQ would not look for a millisecond
    late.send_at_once([b"here"])
    assert ours.poll(TIME_S * 1000)
    assert ours.recv() in {b"early", b"here"}


async def test_whoever_gives_up_waiting_takes_no_message_along(ours: LoopSocket, peer: "zmq.Socket[bytes]") -> None:
    task = await waiting(ours)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    peer.send(b"after")
    assert await receive(ours) == [b"after"]

    task = await waiting(ours)
    peer.send(b"meanwhile")
    while not ours.poll(0):
        time.sleep(0.001)  # noqa: ASYNC251 - the message is there, and the loop has not told the task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await receive(ours) == [b"meanwhile"]


async def test_an_idle_socket_whose_messages_nobody_takes_leaves_the_loop_at_rest(
    ours: LoopSocket, peer: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await waiting(ours)
    peer.send(b"one")
    await task
    num_asked = 0

    def ask(option: int) -> int:
        nonlocal num_asked
        num_asked += 1
        return zmq.Socket.getsockopt(ours, option)

    monkeypatch.setattr(LoopSocket, "getsockopt", lambda self, option: ask(option))
    peer.send(b"two")
    await asyncio.sleep(0.1)
    assert num_asked <= 3
    assert await receive(ours) == [b"two"]


@pytest.mark.parametrize("by_context", [False, True])
async def test_a_closed_socket_cancels_whoever_waits_and_is_watched_no_more(
    context: zmq.asyncio.Context, ours: LoopSocket, by_context: bool
) -> None:
    task = await waiting(ours)
    descriptor = ours._watched_fd
    if by_context:
        context.destroy(linger=0)
    else:
        ours.close(linger=0)
    await asyncio.wait([task], timeout=TIME_S)
    assert task.cancelled()
    assert not asyncio.get_running_loop().remove_reader(descriptor)


def test_a_socket_may_outlive_its_loop(ours: LoopSocket, peer: "zmq.Socket[bytes]") -> None:
    async def talk() -> None:
        task = await waiting(ours)
        peer.send(b"one")
        await task

    asyncio.run(talk())
    ours.close()
    assert ours.closed
