"""A whole encoder over real sockets with a tiny real tower, as gateways and decoders see it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from common.embedding import check_payload
from common.errors import from_code
from common.messages import (
    AnyMessage,
    Cancel,
    EncodeReply,
    EncodeRequest,
    Fetch,
    FetchChunk,
    FetchCredit,
    FetchReply,
    Hello,
    LoadReport,
    MediaOptions,
    ProbeReply,
    ProbeRequest,
    Refused,
    Release,
)
from common.tensors import tensor_of
from common.transport import Dealer, Received, Router
from encoder_svc.__main__ import _assemble, _load, _Loaded
from encoder_svc.config import EncoderSettings
from encoder_svc.preprocess import read_image
from encoder_svc.server import EncoderParts, EncoderServer
from tests.common.sockets import background, can_send, eventually, hello, ipc_address, zmq_context
from tests.encoder_svc.embeddings import key
from tests.media_samples import flat_frames, png, video_file
from tests.servable import save_servable

PICTURE = png(160, 128)
GRID = (1, 8, 10)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> _Loaded:
    folder, _ = save_servable(tmp_path_factory.mktemp("model"))
    return _load(settings(folder))


def settings(folder: Path) -> EncoderSettings:
    return EncoderSettings(model=str(folder), served_model_name="tiny", threads=1, preprocess_threads=1, device="cpu")


@dataclass
class Bench:
    """A running encoder and one gateway's connections; messages are sorted by kind as they arrive."""

    parts: EncoderParts
    server: EncoderServer
    control: Dealer
    data: Dealer
    fingerprint: str
    arrived: list[Received]

    def request(self, number: int = 1, request_id: str = "r1", **fields: Any) -> EncodeRequest:
        base: dict[str, Any] = {
            "request_id": request_id,
            "key": key(number),
            "modality": "image",
            "expected_grid": GRID,
            "fingerprint": self.fingerprint,
            "time_left_s": 30.0,
        }
        return EncodeRequest(**{**base, **fields})

    async def answer(self, kind: type[Any]) -> Any:
        """The next message of a kind."""

        def find() -> Received | None:
            return next((one for one in self.arrived if isinstance(one.message, kind)), None)

        found: Received = await eventually(find)
        self.arrived.remove(found)
        return found.message

    def last_report(self) -> LoadReport:
        """What the encoder last said of its load."""
        reports = [one.message for one in self.arrived if isinstance(one.message, LoadReport)]
        return reports[-1] if reports else LoadReport(instance_id="none yet")

    async def encode(
        self, number: int = 1, request_id: str = "r1", source: bytes = PICTURE, **fields: Any
    ) -> EncodeReply:
        self.data.send(self.request(number, request_id, **fields), source)
        reply: EncodeReply = await self.answer(EncodeReply)
        assert (reply.request_id, reply.key) == (request_id, key(number))
        return reply

    async def fetch(self, number: int = 1) -> tuple[FetchReply, bytes]:
        """All of an embedding, with a credit of one chunk at a time."""
        self.data.send(Fetch(fetch_id="f", key=key(number), fingerprint=self.fingerprint, credit=1, time_left_s=30.0))
        reply: FetchReply = await self.answer(FetchReply)
        payload = b""
        for _ in range(reply.header.num_chunks if reply.header else 0):
            one = await eventually(lambda: next((a for a in self.arrived if isinstance(a.message, FetchChunk)), None))
            self.arrived.remove(one)
            payload += bytes(one.payload[0])
            self.data.send(FetchCredit(fetch_id="f", chunks=1))
        return reply, payload

    async def assert_nothing_is_left(self) -> None:
        """No work, no lease, no session, no task."""
        await eventually(lambda: not self.server._running)
        assert self.server._tasks == {}
        await eventually(lambda: self.parts.pipeline.queued_patches == 0)
        assert self.parts.pipeline.num_in_flight == 0
        assert self.parts.store.num_leases == 0
        assert self.parts.store.leased_bytes == 0
        assert self.parts.shipping.bytes_in_flight == 0


@contextlib.asynccontextmanager
async def encoder(loaded: _Loaded, tmp_path: Path, **changes: Any) -> AsyncIterator[Bench]:
    """An encoder, greeted."""
    with zmq_context() as context, ipc_address() as control_at, ipc_address() as data_at:
        control = Router(context, control_at, name="control")
        data = Router(context, data_at, name="data", max_payload_bytes=1 << 24)
        base: dict[str, Any] = {"model": str(tmp_path), "preprocess_threads": 1}
        parts = _assemble(EncoderSettings(**{**base, **changes}), loaded, control, data)
        server = EncoderServer(parts, loaded.hello)
        arrived: list[Received] = []

        async def listen(dealer: Dealer) -> None:
            while True:
                arrived.append(await dealer.receive())

        dealers = [Dealer(context, address, name="test-dealer") for address in (control_at, data_at)]
        fingerprint = loaded.hello.fingerprint
        assert fingerprint is not None
        bench = Bench(parts, server, dealers[0], dealers[1], fingerprint, arrived)
        async with background(server.run(), *(listen(dealer) for dealer in dealers)):
            for dealer in dealers:
                await eventually(lambda dealer=dealer: can_send(dealer, hello("gateway", "g")))
                assert (await bench.answer(Hello)).instance_id == loaded.hello.instance_id
            yield bench


async def test_an_encoded_picture_is_fetched_byte_for_byte(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        reply = await bench.encode()
        assert reply.error is None
        assert not reply.was_held
        assert (reply.times.preprocess_s > 0, reply.times.forward_s > 0) == (True, True)
        fetched, payload = await bench.fetch()
        header = fetched.header
        assert header is not None
        assert reply.num_bytes == header.num_bytes
        check_payload(header, payload)
        prepared = read_image(PICTURE, loaded.processor)
        with torch.inference_mode():
            expected = loaded.tower([torch.from_numpy(prepared.pixel_values)], [prepared.grid_thw])
        assert torch.equal(tensor_of(header, bytearray(payload)), expected)
        assert (await bench.encode(request_id="r2")).was_held
        for request_id in ("r1", "r2"):
            bench.control.send(Release(request_id=request_id))
        await eventually(lambda: bench.parts.store.num_leases == 0)
        await bench.assert_nothing_is_left()


async def test_a_hello_says_what_the_embeddings_are(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        bench.control.send(hello("gateway", "g"))
        answer = await bench.answer(Hello)
        assert (answer.role, answer.model, answer.levels) == ("encoder", "tiny", 3)
        assert (answer.width, answer.wire_dtype) == (48 * 4, "float32")
        assert (answer.is_ready, answer.is_draining) == (True, False)


async def test_a_peer_of_another_model_is_refused_and_gets_no_reports(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        for dealer in (bench.control, bench.data):
            dealer.send(hello("gateway", "g", model="other"))
            refused: Refused = await bench.answer(Refused)
            assert "serves 'tiny', not 'other'" in refused.error.message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"fingerprint": "0" * 64}, "protocol_error"),
        ({"expected_grid": (1, 8, 8)}, "invalid_request"),
        ({"source": PICTURE[:200]}, "unsupported_media"),
        ({"source": b""}, "unsupported_media"),
        ({"modality": "video"}, "unsupported_media"),
        ({"time_left_s": 0.0}, "deadline_exceeded"),
    ],
)
async def test_what_cannot_be_encoded_is_answered_and_leaves_nothing(
    loaded: _Loaded, tmp_path: Path, fields: dict[str, Any], code: str
) -> None:
    async with encoder(loaded, tmp_path) as bench:
        reply = await bench.encode(**fields)
        assert reply.error is not None
        assert reply.error.code == code
        assert type(from_code(code, "")).__name__ != "TandemError"
        await bench.assert_nothing_is_left()
        assert (await bench.encode(request_id="next")).error is None


async def test_a_fault_of_ours_is_answered_too(
    loaded: _Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with encoder(loaded, tmp_path) as bench:

        def fail(*args: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(bench.parts.pipeline, "_prepare", fail)
        with structlog.testing.capture_logs() as logs:
            reply = await bench.encode()
        assert reply.error is not None
        assert reply.error.code == "model_failure"
        assert "secret" not in reply.error.message
        assert [line["request_id"] for line in logs if line["log_level"] == "error"] == ["r1"]
        await bench.assert_nothing_is_left()


async def test_a_cancel_that_comes_before_its_request_is_remembered(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        bench.control.send(Cancel(request_id="r1"))
        await eventually(lambda: "r1" in bench.server._cancelled)
        reply = await bench.encode()
        assert reply.error is not None
        assert reply.error.code == "cancelled"
        await bench.assert_nothing_is_left()


async def test_a_cancel_stops_the_work_and_frees_what_was_held(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        await bench.encode(1)
        gate = hold_the_tower(bench)
        bench.data.send(bench.request(2), PICTURE)
        await eventually(lambda: bench.parts.pipeline.num_in_flight == 1)
        bench.control.send(Cancel(request_id="r1"))
        await eventually(lambda: bench.parts.pipeline.num_in_flight == 0)
        gate.set()
        await bench.assert_nothing_is_left()
        assert not [one for one in bench.arrived if isinstance(one.message, EncodeReply)]


async def test_a_deadline_that_passes_is_answered_and_leaves_nothing(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        gate = hold_the_tower(bench)
        reply = await bench.encode(time_left_s=0.1)
        assert reply.error is not None
        assert reply.error.code == "deadline_exceeded"
        gate.set()
        await bench.assert_nothing_is_left()


def hold_the_tower(bench: Bench) -> asyncio.Event:
    """Keep forwards from starting until the event is set."""
    gate = asyncio.Event()
    run = bench.parts.runner.run

    async def run_later(items: Any, on_computed: Any) -> Any:
        await gate.wait()
        return await run(items, on_computed)

    bench.parts.runner.run = run_later  # type: ignore[method-assign]
    return gate


async def test_leases_of_a_gateway_that_died_end_by_themselves(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path, lease_s=0.2) as bench:
        await bench.encode()
        await eventually(lambda: bench.parts.store.num_leases == 0)
        await bench.assert_nothing_is_left()


async def test_equal_pictures_at_once_run_once(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        gate = hold_the_tower(bench)
        for number in range(8):
            bench.data.send(bench.request(request_id=f"r{number}"), PICTURE)
        await eventually(lambda: len(bench.server._running) == 8)
        gate.set()
        replies = [await bench.answer(EncodeReply) for _ in range(8)]
        assert all(reply.error is None for reply in replies)
        assert bench.parts.store.num_leases == 8
        assert bench.parts.store.held_bytes == replies[0].num_bytes


async def test_a_video_is_probed_and_then_encoded_as_promised(loaded: _Loaded, tmp_path: Path) -> None:
    source = video_file(flat_frames(12, 64, 64), fps=6)
    async with encoder(loaded, tmp_path) as bench:
        bench.data.send(
            ProbeRequest(request_id="p", key=key(1), options=MediaOptions(num_frames=6), time_left_s=10.0), source
        )
        probed: ProbeReply = await bench.answer(ProbeReply)
        facts = probed.facts
        assert facts is not None
        assert len(facts.frame_indices) == 6
        assert len(facts.timestamps) == facts.grid[0] == 3
        reply = await bench.encode(
            modality="video", source=source, options=MediaOptions(num_frames=6), expected_grid=facts.grid
        )
        assert reply.error is None


async def test_what_is_no_video_is_answered(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        bench.data.send(ProbeRequest(request_id="p", key=key(1), time_left_s=10.0), b"no video")
        probed: ProbeReply = await bench.answer(ProbeReply)
        assert probed.facts is None
        assert probed.error is not None
        assert probed.error.code == "unsupported_media"


async def test_messages_that_are_out_of_place_are_refused(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        wrong: list[tuple[Dealer, AnyMessage, list[bytes]]] = [
            (bench.control, bench.request(), [PICTURE]),
            (bench.control, LoadReport(instance_id="x"), []),
            (bench.data, Cancel(request_id="x"), []),
            (bench.data, bench.request(), []),
            (bench.data, bench.request(), [PICTURE, PICTURE]),
            (bench.data, ProbeRequest(request_id="p", key=key(1), time_left_s=1.0), []),
        ]
        for dealer, message, payload in wrong:
            dealer.send(message, *payload)
            refused: Refused = await bench.answer(Refused)
            assert type(message).__name__ in refused.error.message
        await bench.assert_nothing_is_left()
        assert (await bench.encode()).error is None


async def test_gateways_are_told_the_load_and_a_gateway_that_left_is_forgotten(loaded: _Loaded, tmp_path: Path) -> None:
    async with encoder(loaded, tmp_path) as bench:
        report: LoadReport = await bench.answer(LoadReport)
        assert report.instance_id == loaded.hello.instance_id
        assert len(bench.server._gateways) == 1
        bench.control.close()
        await eventually(lambda: not bench.server._gateways)


async def test_a_drain_refuses_new_work_finishes_the_old_and_waits_for_the_fetches(
    loaded: _Loaded, tmp_path: Path
) -> None:
    async with encoder(loaded, tmp_path) as bench:
        gate = hold_the_tower(bench)
        bench.data.send(bench.request(1), PICTURE)
        await eventually(lambda: bench.parts.pipeline.num_in_flight == 1)
        draining = asyncio.create_task(bench.server.drain())
        await eventually(lambda: bench.server.is_draining)
        refused = await bench.encode(2, "r2")
        assert refused.error is not None
        assert refused.error.code == "overloaded"
        await eventually(lambda: bench.last_report().is_draining)
        gate.set()
        assert (await bench.answer(EncodeReply)).error is None
        assert not draining.done()
        _, payload = await bench.fetch(1)
        assert payload
        bench.control.send(Release(request_id="r1"))
        async with asyncio.timeout(3):
            await draining
        await bench.assert_nothing_is_left()


async def test_a_drain_keeps_what_only_this_encoder_has_until_its_request_ends_or_redis_has_it(
    loaded: _Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.server.HAND_OVER_S", 0.05)
    async with encoder(loaded, tmp_path) as bench:
        for number in (1, 2, 3):
            assert (await bench.encode(number, f"r{number}")).error is None
        draining = asyncio.create_task(bench.server.drain())
        bench.control.send(Release(request_id="r1"))
        bench.parts.store.note_in_redis(key(2))
        await asyncio.sleep(0.2)
        assert not draining.done()
        assert (await bench.fetch(3))[1]
        bench.control.send(Release(request_id="r3"))
        async with asyncio.timeout(3):
            await draining
        assert bench.parts.store.num_leases == 1  # of r2, for which Redis is asked


async def test_a_drain_keeps_nothing_for_gateways_that_are_gone(
    loaded: _Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_svc.server.HAND_OVER_S", 0.05)
    async with encoder(loaded, tmp_path) as bench:
        assert (await bench.encode()).error is None
        bench.control.close()
        async with asyncio.timeout(5):
            await bench.server.drain()
