"""ZMQ sockets that carry `common.messages`: a `Router` for services, a `Dealer` for those who connect to them.

Owns socket options, authentication and the refusal of malformed frames. Sending never blocks and never awaits: a
message is handed to ZMQ's own thread or the peer is reported unreachable. Large payload frames are sent without a
copy; their buffers stay referenced until ZMQ is done. Runs on the event loop of its process; knows nothing of
what messages mean.
"""

import hmac
import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import zmq
import zmq.asyncio
import zmq.auth
import zmq.utils.z85
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, PeerUnreachable, ProtocolError
from common.loop_socket import LoopSocket
from common.messages import AnyMessage, Refused
from common.metrics import Counter
from common.wire import MAX_HEADER_BYTES, error_detail, pack, request_id_of, unpack

logger = structlog.get_logger(__name__)

MAX_FRAMES = 4
CURVE_KEY_BYTES = 32
SEND_HIGH_WATER_MARK = 10_000
MALFORMED_FRAMES = Counter(
    "tandem_malformed_frames_total", "Frames refused because they were not valid messages", ["socket"]
)

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True)
class CurveKeys:
    """One key pair shared by all processes of a fleet: whoever holds the secret key belongs to it."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: Path) -> "CurveKeys":
        """Read a key file as written by `zmq.auth.create_certificates`; raises ConfigError."""
        try:
            public, secret = zmq.auth.load_certificate(path)
            binary = [zmq.utils.z85.decode(key) for key in (public, secret) if key is not None]
        except (OSError, ValueError, struct.error, KeyError) as exc:
            raise ConfigError(f"the CURVE key file {path} cannot be read: {exc}") from exc
        if secret is None:
            raise ConfigError(f"the CURVE key file {path} holds no secret key: give the file that ends in .key_secret")
        if any(len(key) != CURVE_KEY_BYTES for key in binary):
            raise ConfigError(f"the CURVE key file {path} holds a key that is not of {CURVE_KEY_BYTES} bytes")
        return cls(public, secret)


@dataclass(frozen=True)
class Received:
    """One message from one peer. `payload` holds the raw frames behind the header, not copied."""

    peer: bytes
    message: AnyMessage
    payload: Sequence[memoryview]


class Authenticator:
    """Admits only peers that hold the fleet's key, on every CURVE socket of one context."""

    def __init__(self, context: zmq.asyncio.Context, keys: CurveKeys) -> None:
        self._zap = AsyncioAuthenticator(context)
        self._public = keys.public

    def start(self) -> None:
        """Begin answering authentication requests; must run before a socket binds."""
        self._zap.start()
        self._zap.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called for each connection with the peer's public key, in the same text form as the fleet's."""
        return hmac.compare_digest(key, self._public)

    def stop(self) -> None:
        """Stop answering."""
        self._zap.stop()


def check_bind(endpoint: str, keys: CurveKeys | None, allow_insecure: bool) -> None:
    """Refuse an endpoint that strangers could reach without a key; raises ConfigError."""
    if keys is not None or allow_insecure or endpoint.startswith(("ipc://", "inproc://")):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        # An IPv4 address bound by a socket that also speaks IPv6 shows as ::ffff:127.0.0.1.
        is_loopback = (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"binding to {endpoint} without CURVE keys would let anyone who reaches the port use this service: "
            "set --curve-key-file, bind to 127.0.0.1, or say --allow-insecure-bind"
        )


def _configure(socket: LoopSocket, max_payload_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max(max_payload_bytes, MAX_HEADER_BYTES))
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
    socket.setsockopt(zmq.IPV6, 1)


def _send(socket: LoopSocket, frames: list[Any]) -> None:
    try:
        socket.send_at_once(frames)
    except zmq.Again as exc:
        raise PeerUnreachable("the peer has no connection or does not read") from exc
    except zmq.ZMQError as exc:
        if exc.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
            raise PeerUnreachable("the peer is not connected") from exc
        raise


class Router:
    """The bound socket of a service: receives from any peer, answers to the peer that is named."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        name: str,
        max_payload_bytes: int = 0,
        keys: CurveKeys | None = None,
        allow_insecure_bind: bool = False,
    ) -> None:
        check_bind(endpoint, keys, allow_insecure_bind)
        self._name = name
        self._socket = LoopSocket.of(context, zmq.ROUTER)
        _configure(self._socket, max_payload_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret, keys.public
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as exc:
            self._socket.close()
            raise ConfigError(f"cannot bind the {name} socket to {endpoint}: {exc.strerror}") from exc
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def receive(self) -> Received:
        """The next valid message. Malformed ones are counted, answered with `Refused`, and skipped."""
        while True:
            frames = await self._socket.receive()
            peer = frames[0].bytes
            try:
                if not 2 <= len(frames) <= MAX_FRAMES:
                    raise ProtocolError(f"a message has 1 to {MAX_FRAMES - 1} frames, not {len(frames) - 1}")
                return Received(peer, unpack(frames[1].buffer), [frame.buffer for frame in frames[2:]])
            except ProtocolError as error:
                MALFORMED_FRAMES.labels(self._name).inc()
                logger.warning("refused a malformed message", socket=self._name, reason=error.message)
                request_id = request_id_of(frames[1].buffer) if len(frames) > 1 else None
                self.try_send(peer, Refused(error=error_detail(error), request_id=request_id))

    def send(self, peer: bytes, message: AnyMessage, *payload: Payload) -> None:
        """Hand a message to ZMQ at once, or raise PeerUnreachable."""
        _send(self._socket, [peer, pack(message), *payload])

    def try_send(self, peer: bytes, message: AnyMessage) -> bool:
        """Like `send`, but a peer that is gone is only reported: for answers that nobody may wait for any more."""
        try:
            self.send(peer, message)
        except PeerUnreachable:
            return False
        return True

    def refuse(self, received: Received, error: ProtocolError) -> None:
        """Tell a peer that its message is not accepted, by the id of the request that it belongs to."""
        request_id: str | None = getattr(received.message, "request_id", None)
        self.try_send(received.peer, Refused(error=error_detail(error), request_id=request_id))

    def close(self) -> None:
        """Close the socket; unsent messages are dropped."""
        self._socket.close(linger=0)


class Dealer:
    """A connection to one service. While the service is away nothing is queued for it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        name: str,
        max_payload_bytes: int = 0,
        keys: CurveKeys | None = None,
    ) -> None:
        self._name = name
        self.endpoint = endpoint
        self.num_malformed = 0
        """Messages of the service that could not be read."""
        self._socket = LoopSocket.of(context, zmq.DEALER)
        _configure(self._socket, max_payload_bytes)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)
        if keys is not None:
            self._socket.curve_serverkey = keys.public
            self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret, keys.public
        changes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor: object = self._socket.get_monitor_socket(changes)  # of its context's class, not ours
        self._monitor = cast("zmq.asyncio.Socket", monitor)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"{endpoint} is not an address to connect to: {exc.strerror}") from exc

    async def receive(self) -> Received:
        """The next valid message. Malformed ones are counted and skipped."""
        while True:
            frames = await self._socket.receive()
            try:
                if len(frames) >= MAX_FRAMES:
                    raise ProtocolError(f"a message has 1 to {MAX_FRAMES - 1} frames, not {len(frames)}")
                return Received(b"", unpack(frames[0].buffer), [frame.buffer for frame in frames[1:]])
            except ProtocolError as error:
                self.num_malformed += 1
                MALFORMED_FRAMES.labels(self._name).inc()
                logger.warning("dropped a malformed message", socket=self._name, reason=error.message)

    def send(self, message: AnyMessage, *payload: Payload) -> None:
        """Hand a message to ZMQ at once, or raise PeerUnreachable."""
        _send(self._socket, [pack(message), *payload])

    async def wait_for_change(self) -> bool:
        """Whether there is a connection, when one has come about or broken (also when the network stack notices it)."""
        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        """Close the socket; unsent messages are dropped."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
