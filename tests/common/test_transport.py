"""Real sockets: what arrives, what is refused, what is never queued, and who is let in."""

import ast
import asyncio
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio
import zmq.auth

from common.errors import ConfigError, PeerUnreachable, ProtocolError
from common.messages import Cancel, FetchChunk, LoadReport, Refused
from common.transport import (
    MALFORMED_FRAMES,
    MAX_FRAMES,
    Authenticator,
    CurveKeys,
    Dealer,
    Router,
    check_bind,
)
from common.wire import PROTOCOL_MAJOR, pack
from tests.common.sockets import background, can_send, connected, eventually, hello, ipc_address, received, zmq_context
from tests.paths import REPOSITORY, SHARED, needs_shared

MESSAGE = Cancel(request_id="r-1")
CANARY = SHARED / "cases" / "SEC-08" / "canary.pkl"
WIRE_CASES = SHARED / "cases" / "DIS-14" / "wire"


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq_context() as context:
        yield context


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tcp":
        yield "tcp://127.0.0.1:*"
        return
    with ipc_address() as address:
        yield address


@pytest.fixture
def router(context: zmq.asyncio.Context, address: str) -> Router:
    return Router(context, address, name="test", max_payload_bytes=64 << 20)


@pytest.fixture
def dealer(context: zmq.asyncio.Context, router: Router) -> Dealer:
    return Dealer(context, router.endpoint, name="test-dealer", max_payload_bytes=64 << 20)


def raw_dealer(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    return socket


def malformed(socket: str = "test") -> float:
    return MALFORMED_FRAMES.labels(socket)._value.get()


async def test_a_message_arrives_and_its_answer_comes_back(router: Router, dealer: Dealer) -> None:
    peer = await connected(dealer, router, MESSAGE)
    router.send(peer, hello(), b"one", memoryview(b"two"))
    answer = await received(dealer)
    assert answer.message == hello()
    assert [bytes(frame) for frame in answer.payload] == [b"one", b"two"]


async def test_a_large_payload_travels_unchanged_and_its_buffer_may_be_dropped(router: Router, dealer: Dealer) -> None:
    peer = await connected(dealer, router, MESSAGE)
    payload = os.urandom(1 << 20) * 32
    view = memoryview(bytearray(payload))
    router.send(peer, FetchChunk(fetch_id="f", index=0), view)
    del view
    gc.collect()
    arrived = await received(dealer)
    assert len(arrived.payload) == 1
    assert arrived.payload[0] == payload


async def test_a_payload_is_not_copied_by_the_receiver(router: Router, dealer: Dealer) -> None:
    peer = await connected(dealer, router, MESSAGE)
    router.send(peer, FetchChunk(fetch_id="f", index=0), bytes(1 << 20))
    arrived = await received(dealer)
    assert isinstance(arrived.payload[0].obj, zmq.Frame)


@needs_shared
@pytest.mark.parametrize("case", ["cut", "empty", "len2g", "map2g", "nest", "one", "random"])
async def test_frames_that_broke_others_are_counted_and_answered(
    context: zmq.asyncio.Context, router: Router, case: str
) -> None:
    frame = (WIRE_CASES / f"{case}.bin").read_bytes()
    await refused_then_served(context, router, [[frame], [frame] * 10, [pack(MESSAGE)[:5] + frame]])


@needs_shared
async def test_a_pickle_is_refused_as_header_and_untouched_as_payload(
    context: zmq.asyncio.Context, router: Router, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = CANARY.read_bytes()
    await refused_then_served(context, router, [[canary], [canary, canary]])
    socket = raw_dealer(context, router.endpoint)
    await socket.send_multipart([pack(MESSAGE), canary])
    assert bytes((await received(router)).payload[0]) == canary
    output = capfd.readouterr()
    assert "CANARY" not in output.out + output.err


async def test_too_many_frames_are_refused(context: zmq.asyncio.Context, router: Router) -> None:
    await refused_then_served(context, router, [[pack(MESSAGE)] * MAX_FRAMES, [b""] * 100])


async def refused_then_served(context: zmq.asyncio.Context, router: Router, bad: list[list[bytes]]) -> None:
    """Each malformed message is counted and answered once, and the good one after them is received."""
    before = malformed()
    socket = raw_dealer(context, router.endpoint)
    for frames in bad:
        await socket.send_multipart(frames)
    await socket.send(pack(MESSAGE))
    assert (await received(router)).message == MESSAGE
    assert malformed() - before == len(bad)
    async with asyncio.timeout(10):
        for _ in bad:
            frames = await socket.recv_multipart()
            assert b"Refused" in frames[0]


async def test_a_refusal_names_the_request_of_the_message_also_when_only_its_id_could_be_read(
    router: Router, dealer: Dealer
) -> None:
    peer = await connected(dealer, router, MESSAGE)
    bad_field = pack(MESSAGE).replace(b"Cancel", b"Canker")
    dealer._socket.send_at_once([bad_field])
    dealer._socket.send_at_once([pack(MESSAGE)] * MAX_FRAMES)
    dealer._socket.send_at_once([b"garbage"])
    dealer.send(MESSAGE)
    again = await received(router)
    assert again.peer == peer
    router.refuse(again, ProtocolError("out of place"))
    refused = [(await received(dealer)).message for _ in range(4)]
    assert [message.request_id for message in refused if isinstance(message, Refused)] == ["r-1", "r-1", None, "r-1"]


async def test_a_peer_of_another_version_is_told_both_versions(context: zmq.asyncio.Context, router: Router) -> None:
    socket = raw_dealer(context, router.endpoint)
    frame = bytearray(pack(MESSAGE))
    frame[3] = PROTOCOL_MAJOR + 1
    await socket.send_multipart([bytes(frame)])
    await socket.send_multipart([pack(MESSAGE)])
    await received(router)
    async with asyncio.timeout(10):
        answer = await socket.recv()
    assert f"version {PROTOCOL_MAJOR + 1} and this process {PROTOCOL_MAJOR}".encode() in answer


async def test_a_dealer_drops_what_is_malformed_and_answers_nothing(router: Router, dealer: Dealer) -> None:
    before = malformed("test-dealer")
    peer = await connected(dealer, router, MESSAGE)
    router._socket.send_at_once([peer, b"garbage"])
    router._socket.send_at_once([peer, *[pack(MESSAGE)] * 10])
    router.send(peer, MESSAGE)
    assert (await received(dealer)).message == MESSAGE
    assert malformed("test-dealer") - before == 2
    dealer.send(hello())
    assert (await received(router)).message == hello()


async def test_sending_to_a_peer_that_left_raises_at_once(
    context: zmq.asyncio.Context, router: Router, dealer: Dealer
) -> None:
    peer = await connected(dealer, router)
    dealer.close()
    await eventually(lambda: not router.try_send(peer, MESSAGE))
    with pytest.raises(PeerUnreachable):
        router.send(peer, MESSAGE)
    with pytest.raises(PeerUnreachable):
        router.send(b"never seen", MESSAGE)
    with pytest.raises(PeerUnreachable):
        dealer.send(MESSAGE)


def accepts(endpoint: str) -> bool:
    """Whether somebody listens there."""
    kind, _, place = endpoint.partition("://")
    port = place.rpartition(":")[2]
    family, address = (socket.AF_UNIX, place) if kind == "ipc" else (socket.AF_INET, ("127.0.0.1", int(port)))
    with socket.socket(family) as client:
        return client.connect_ex(address) == 0


@pytest.mark.parametrize("address", ["ipc", "tcp"], indirect=True)
async def test_nothing_is_queued_for_a_service_that_is_not_there(context: zmq.asyncio.Context, address: str) -> None:
    """DIS-16: a socket that queues would swallow a thousand messages, and deliver them to whoever comes next."""
    first = Router(context, address, name="test")
    endpoint = first.endpoint
    first.close()
    await eventually(lambda: not accepts(endpoint))  # ZMQ closes in a thread of its own
    dealer = Dealer(context, endpoint, name="test-dealer")
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(PeerUnreachable):
            dealer.send(MESSAGE, bytes(1000))
    assert time.monotonic() - began < 3.0
    router = Router(context, endpoint, name="test")
    late = LoadReport(instance_id="late")
    await eventually(lambda: can_send(dealer, late))
    assert (await received(router)).message == late


async def test_a_connection_that_comes_about_or_breaks_is_told(router: Router, dealer: Dealer) -> None:
    async with asyncio.timeout(10):
        assert await dealer.wait_for_change()
        dealer.send(MESSAGE)
        assert (await received(router)).message == MESSAGE
        router.close()
        assert not await dealer.wait_for_change()
    await eventually(lambda: not can_send(dealer, MESSAGE))


async def test_a_flood_of_messages_leaves_other_tasks_their_turn(router: Router, dealer: Dealer) -> None:
    await connected(dealer, router)
    for _ in range(2000):
        dealer.send(MESSAGE)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await received(router)  # the rest waits in the socket now
    async with background(take_turns()):
        for _ in range(1999):
            await router.receive()
    assert turns >= 20


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:7101", "tcp://*:7101", "tcp://[::]:7101", "tcp://10.0.0.5:7101", "tcp://eth0:7101", "ws://*:7101"],
)
def test_an_endpoint_that_strangers_reach_needs_keys(context: zmq.asyncio.Context, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--curve-key-file.*127\.0\.0\.1.*--allow-insecure-bind"):
        Router(context, endpoint, name="test")
    check_bind(endpoint, CurveKeys(b"", b""), allow_insecure=False)
    check_bind(endpoint, None, allow_insecure=True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:7101",
        "tcp://127.0.0.1:*",
        "tcp://localhost:1",
        "tcp://[::1]:1",
        "tcp://[::ffff:127.0.0.1]:1",
        "ipc:///tmp/x",
    ],
)
def test_an_endpoint_of_this_machine_alone_needs_none(endpoint: str) -> None:
    check_bind(endpoint, None, allow_insecure=False)


async def test_an_address_in_use_is_named(context: zmq.asyncio.Context) -> None:
    router = Router(context, "tcp://127.0.0.1:*", name="control")
    with pytest.raises(ConfigError, match=r"cannot bind the control socket to tcp://.*: Address already in use"):
        Router(context, router.endpoint, name="control")


async def test_what_is_no_address_is_named(context: zmq.asyncio.Context) -> None:
    with pytest.raises(ConfigError, match="carrier-pigeon://x is not an address"):
        Dealer(context, "carrier-pigeon://x", name="test")


# Keys


def make_keys(folder: Path, name: str) -> CurveKeys:
    _, secret_file = zmq.auth.create_certificates(folder, name)
    return CurveKeys.load(Path(secret_file))


async def test_whoever_holds_the_fleet_s_key_is_served(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "fleet")
    Authenticator(context, keys).start()
    gc.collect()  # it lives as long as the context, whoever forgets it
    router = Router(context, "tcp://127.0.0.1:*", name="test", keys=keys)
    dealer = Dealer(context, router.endpoint, name="test-dealer", keys=keys)
    peer = await connected(dealer, router, MESSAGE)
    router.send(peer, MESSAGE)
    assert (await received(dealer)).message == MESSAGE


async def test_whoever_holds_another_key_or_none_is_not_heard(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    keys, other = make_keys(tmp_path, "fleet"), make_keys(tmp_path, "other")
    authenticator = Authenticator(context, keys)
    authenticator.start()
    router = Router(context, "tcp://127.0.0.1:*", name="test", keys=keys)
    strangers = [
        Dealer(context, router.endpoint, name="none"),
        Dealer(context, router.endpoint, name="other", keys=other),
        Dealer(context, router.endpoint, name="mixed", keys=CurveKeys(other.public, other.secret)),
    ]
    # Knows the server's public key, but has a pair of its own: only the authenticator tells it from a member.
    outsider = context.socket(zmq.DEALER)
    outsider.setsockopt(zmq.IMMEDIATE, 1)
    outsider.curve_serverkey = keys.public
    outsider.curve_secretkey, outsider.curve_publickey = other.secret, other.public
    outsider.connect(router.endpoint)
    friend = Dealer(context, router.endpoint, name="friend", keys=keys)
    heard: list[object] = []

    async def listen() -> None:
        while True:
            heard.append((await router.receive()).message)

    async def insist() -> None:
        while True:
            for stranger in strangers:
                can_send(stranger, Cancel(request_id="stranger"))
            outsider.send(pack(Cancel(request_id="outsider")), flags=zmq.NOBLOCK).exception()
            await asyncio.sleep(0.01)

    async with background(listen(), insist()):
        await eventually(lambda: can_send(friend, MESSAGE) and heard.count(MESSAGE) >= 50)
    assert set(map(str, heard)) == {str(MESSAGE)}
    authenticator.stop()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("", "cannot be read"),
        ('public-key = "abc"\nsecret-key = "abc"', "cannot be read"),
        ('public-key = "12345"\nsecret-key = "12345"', "not of 32 bytes"),
        ('public-key = "MVX1{[6!75<[pndv.$={)gSgwW3-9]njXDd4:a9i"', "no secret key"),
    ],
)
def test_a_key_file_that_is_none_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        CurveKeys.load(path)


# What must never be in the tree


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "yaml.load", "np.load"}
SOURCES = [
    path
    for folder in ("common", "encoder_svc", "decoder_svc", "gateway_svc", "deploy", "demo")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_module_can_run_code_that_it_was_sent(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN_MODULES & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
            assert not any(keyword.arg == "shell" for keyword in node.keywords)
