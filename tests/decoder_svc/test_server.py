"""The decoder's server over real sockets, with a tiny model and the test as the gateway."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
import zmq.asyncio
from prometheus_client import REGISTRY

from common.embedding import ExpectedEmbedding, checksum
from common.errors import EncoderUnavailable, ProtocolError, TandemError
from common.messages import (
    AnyMessage,
    Cancel,
    EmbeddingHeader,
    EncodeReply,
    FetchCredit,
    GenerateRequest,
    Hello,
    LoadReport,
    MediaAt,
    MediaFailed,
    MediaNeeded,
    Refused,
    SequenceTokens,
    TokenBatch,
)
from common.tensors import payload_of
from common.transport import Dealer, Router
from decoder_svc import server
from decoder_svc.embedding_inbox import EmbeddingInbox
from decoder_svc.server import DecoderServer
from tests.decoder_svc.engines import World, make_engine
from tests.decoder_svc.grammars import compiler, text_of
from tests.decoder_svc.requests import FINGERPRINT, generate_request, greedy, key_of

TEXT = [5, 17, 200, 33, 7, 90, 121]
GATEWAY = Hello(role="gateway", instance_id="gateway-1", model="tiny", version="0", is_ready=True)
DECODER = Hello(role="decoder", instance_id="decoder-1", model="tiny", version="0")


class FakeEncoders:
    """The fetcher's place: `enc` holds everything, `broken` nothing, `other` something else."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def fetch(
        self, encoder_id: str, expected: ExpectedEmbedding, timeout_s: float
    ) -> tuple[EmbeddingHeader, bytearray]:
        if encoder_id == "broken":
            raise EncoderUnavailable("gone")
        if encoder_id == "other":
            raise ProtocolError("the embedding's width is 12, expected 192")
        payload = bytearray(payload_of(self._world.embeddings[expected.key]))
        header = EmbeddingHeader(
            key=expected.key,
            grid=expected.grid,
            dtype="float32",
            rows=expected.rows or 0,
            width=expected.width or 0,
            levels=expected.levels or 0,
            fingerprint=FINGERPRINT,
            checksum=checksum(payload),
            chunk_bytes=1 << 20,
        )
        return header, payload


@dataclass
class Gateway:
    """A gateway's connection, and what it was told."""

    dealer: Dealer
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def send(self, message: AnyMessage) -> None:
        self.dealer.send(message)

    async def greet(self) -> Hello:
        while True:
            try:
                self.send(GATEWAY)
                return await self.next(Hello)
            except TandemError:  # not connected yet
                await asyncio.sleep(0.005)

    async def next(self, kind: type[Any]) -> Any:
        """The next message of a kind; tokens on the way are kept, load reports dropped."""
        async with asyncio.timeout(10):
            while True:
                message = (await self.dealer.receive()).message
                if isinstance(message, TokenBatch):
                    for tokens in message.sequences:
                        self.outputs.setdefault((tokens.request_id, tokens.choice), []).extend(tokens.tokens)
                if isinstance(message, kind):
                    return message

    async def end_of(self, request_id: str) -> SequenceTokens:
        while True:
            batch: TokenBatch = await self.next(TokenBatch)
            for tokens in batch.sequences:
                if tokens.request_id == request_id and tokens.finish_reason is not None:
                    return tokens


@dataclass
class Served:
    """A running server and ways to connect to it."""

    server: DecoderServer
    context: zmq.asyncio.Context
    endpoint: str

    def connect(self) -> Gateway:
        return Gateway(Dealer(self.context, self.endpoint, name="decoder"))

    async def gateway(self) -> Gateway:
        gateway = self.connect()
        await gateway.greet()
        return gateway

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (the engine's state has no event)
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Nothing of any request is left in the engine, the inbox or the server."""
        engine = self.server._engine
        await self.until(lambda: not engine.has_sequences and engine.blocks.num_used == 0)
        await self.until(lambda: not self.server._requests and self.server.inbox.bytes_in_use == 0)
        assert self.server.inbox.num_waiting == 0
        assert engine.pool.needed_bytes == 0


@asynccontextmanager
async def serving(world: World, *, finish_within_s: float | None = None, **limits: int) -> AsyncIterator[Served]:
    context = zmq.asyncio.Context()
    router = Router(context, "tcp://127.0.0.1:0", name="control")
    encoders = FakeEncoders(world)
    engine = make_engine(world.pair.model, **limits)
    decoder = DecoderServer(
        router,
        encoders,  # type: ignore[arg-type]
        engine,
        DECODER,
        grammars=compiler(),
        finish_within_s=finish_within_s,
    )
    decoder.inbox = EmbeddingInbox(
        encoders,
        None,
        decoder,
        width=192,
        levels=3,
        dtype=torch.float32,
        max_bytes=1 << 20,
        is_held=engine.pool.__contains__,
    )
    task = asyncio.create_task(decoder.run())
    try:
        yield Served(decoder, context, router.endpoint)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        router.close()
        context.destroy(linger=0)


def picture_request(world: World, request_id: str = "r", **fields: Any) -> GenerateRequest:
    ids, media = world.prompt(TEXT, 0, [1, 2], 1, [3])
    return generate_request(ids, media=media, request_id=request_id, **fields)


async def test_a_request_asks_for_its_media_gets_them_and_streams_its_tokens(world: World) -> None:
    request = picture_request(world)
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(request)
        needed = await gateway.next(MediaNeeded)
        assert (needed.request_id, needed.attempt, needed.failed_source) == ("r", 0, None)
        assert needed.keys == [key_of(0), key_of(1)]
        for key in reversed(needed.keys):
            gateway.send(MediaAt(request_id="r", key=key, source="enc"))
        end = await gateway.end_of("r")
        assert end.finish_reason == "length"
        assert gateway.outputs["r", 0] == world.reference(request.prompt_token_ids, request.media, 8)
        await served.until_idle()


async def test_a_request_without_missing_media_is_answered_with_an_empty_need(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT))
        assert (await gateway.next(MediaNeeded)).keys == []
        await gateway.end_of("r")


async def test_a_source_that_fails_is_named_and_another_one_serves(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world))
        for key in (await gateway.next(MediaNeeded)).keys:
            gateway.send(MediaAt(request_id="r", key=key, source="broken"))
        for _ in range(2):
            again = await gateway.next(MediaNeeded)
            assert again.failed_source == "broken"
            gateway.send(MediaAt(request_id="r", key=again.keys[0], source="enc"))
        assert (await gateway.end_of("r")).finish_reason == "length"


async def test_an_embedding_of_another_model_ends_that_request_by_name_and_text_goes_on(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world))
        await gateway.next(MediaNeeded)
        gateway.send(MediaAt(request_id="r", key=key_of(0), source="other"))
        error = (await gateway.end_of("r")).error
        assert error is not None
        assert "width is 12" in error.message
        gateway.send(generate_request(TEXT, request_id="text"))
        assert (await gateway.end_of("text")).finish_reason == "length"
        await served.until_idle()


async def test_a_cancelled_request_leaves_nothing_and_says_nothing_more(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, sampling=greedy(180)))
        await gateway.next(TokenBatch)
        gateway.send(Cancel(request_id="r"))
        gateway.send(Cancel(request_id="never heard of"))
        await served.until_idle()


async def test_media_that_failed_end_the_request(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world))
        await gateway.next(MediaNeeded)
        error = msgspec.convert(
            {"code": "unsupported_media", "message": "no"}, type=MediaFailed.__annotations__["error"]
        )
        gateway.send(MediaFailed(request_id="r", key=key_of(0), error=error))
        await served.until_idle()


async def test_a_gateway_that_vanishes_takes_its_requests_with_it(world: World) -> None:
    async with serving(world) as served:
        gone, stays = await served.gateway(), await served.gateway()
        gone.send(picture_request(world, "waits"))
        gone.send(generate_request(TEXT, request_id="runs", sampling=greedy(180)))
        stays.send(generate_request(TEXT, request_id="mine"))
        await gone.next(TokenBatch)
        gone.dealer.close()
        assert (await stays.end_of("mine")).finish_reason == "length"
        await served.until_idle()


async def test_all_choices_are_answered_and_an_error_ends_them_together(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, sampling=greedy(5, n=3)))
        ends: set[int] = set()
        while len(ends) < 3:
            batch = await gateway.next(TokenBatch)
            ends |= {tokens.choice for tokens in batch.sequences if tokens.finish_reason == "length"}
        gateway.send(picture_request(world, "late", time_left_s=0.05, sampling=greedy(5, n=3)))
        error = (await gateway.end_of("late")).error
        assert error is not None
        assert error.code == "deadline_exceeded"
        await served.until_idle()


async def test_a_new_attempt_takes_over_and_the_old_one_is_silent(world: World) -> None:
    async with serving(world) as served:
        first, second = await served.gateway(), await served.gateway()
        first.send(generate_request(TEXT, sampling=greedy(180)))
        await first.next(TokenBatch)
        second.send(generate_request(TEXT, sampling=greedy(6), attempt=1))
        end = await second.end_of("r")
        assert (end.attempt, end.finish_reason) == (1, "length")
        await served.until_idle()


async def test_garbage_and_messages_out_of_place_are_refused_and_the_next_request_works(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        for frames in ([b""], [b"garbage"], [b"TDM\x02\x00"], [b"TDM\x01\x00\xc1"], [b"x"] * 9):
            gateway.dealer._socket.send_at_once(frames)
            assert (await gateway.next(Refused)).error.code == "protocol_error"
        gateway.send(EncodeReply(request_id="r", key=key_of(1)))
        assert "does not accept EncodeReply" in (await gateway.next(Refused)).error.message
        gateway.send(generate_request(TEXT))
        assert (await gateway.end_of("r")).finish_reason == "length"


async def test_another_model_is_refused_at_the_greeting_and_at_a_request(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(msgspec.structs.replace(GATEWAY, model="huge"))
        assert "serves 'tiny', not 'huge'" in (await gateway.next(Refused)).error.message
        gateway.send(generate_request(TEXT, model="huge"))
        error = (await gateway.end_of("r")).error
        assert error is not None
        assert "not 'huge'" in error.message


async def test_media_without_a_fingerprint_are_refused(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world, fingerprint=None))
        error = (await gateway.end_of("r")).error
        assert error is not None
        assert "fingerprint" in error.message


async def test_a_decoder_that_drains_refuses_new_work_retryably_and_finishes_what_runs(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, request_id="runs", sampling=greedy(60)))
        await gateway.next(TokenBatch)
        drained = asyncio.create_task(served.server.drain())
        await served.until(lambda: served.server.is_draining)
        gateway.send(generate_request(TEXT, request_id="new"))
        ends: dict[str, SequenceTokens] = {}
        while len(ends) < 2:
            for tokens in (await gateway.next(TokenBatch)).sequences:
                if tokens.finish_reason is not None:
                    ends[tokens.request_id] = tokens
        assert ends["new"].error is not None
        assert ends["new"].error.code == "overloaded"
        assert ends["runs"].finish_reason == "length"
        async with asyncio.timeout(5):
            await drained
        assert (await gateway.greet()).is_draining


async def test_what_does_not_finish_in_time_is_handed_over_and_leaves_nothing(world: World) -> None:
    async with serving(world, finish_within_s=0.05) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world, "waits", attempt=2))
        await gateway.next(MediaNeeded)
        async with asyncio.timeout(5):
            await served.server.drain()
        end = await gateway.end_of("waits")
        assert (end.finish_reason, end.attempt, end.error) == ("hand_over", 2, None)
        await served.until_idle()


async def test_a_choice_that_is_cancelled_ends_alone_and_with_the_last_one_the_request(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, sampling=greedy(150, n=3)))
        await gateway.next(TokenBatch)
        gateway.send(Cancel(request_id="r", choice=1))
        gateway.send(Cancel(request_id="r", choice=1))
        gateway.send(Cancel(request_id="r", choice=99))
        await served.until(lambda: len(served.server._engine.scheduler.sequences) == 2)
        assert {sequence.choice for sequence in served.server._engine.scheduler.sequences} == {0, 2}
        gateway.send(Cancel(request_id="r", choice=0))
        ends = [await gateway.end_of("r")]
        assert [(end.choice, end.finish_reason) for end in ends] == [(2, "length")]
        await served.until_idle()
        gateway.send(generate_request(TEXT, sampling=greedy(180)))
        await gateway.next(TokenBatch)
        gateway.send(Cancel(request_id="r", choice=0))
        await served.until_idle()


async def test_choices_that_are_finished_are_not_run(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, sampling=greedy(6, n=3), outputs=[[1], [2, 3], []], finished=[0, 1]))
        end = await gateway.end_of("r")
        assert (end.choice, end.finish_reason) == (2, "length")
        assert list(gateway.outputs) == [("r", 2)]
        await served.until_idle()


async def test_a_grammar_is_compiled_and_followed_and_a_wrong_one_is_refused_alone(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, request_id="free", sampling=greedy(20)))
        wrong = greedy(grammar_kind="json_schema", grammar='{"properties": {"foo": "bar"}}')
        gateway.send(generate_request(TEXT, request_id="wrong", sampling=wrong))
        error = (await gateway.end_of("wrong")).error
        assert error is not None
        assert error.code == "invalid_request"
        assert "$.properties.foo" in error.message
        gateway.send(generate_request(TEXT, sampling=greedy(20, n=2, grammar_kind="regex", grammar="[0-9]{5}")))
        assert (await gateway.end_of("r")).finish_reason == "stop"
        assert [len(text_of(gateway.outputs["r", choice])) for choice in range(2)] == [5, 5]
        assert text_of(gateway.outputs["r", 0]).isdigit()
        await served.until(lambda: not served.server._requests)
        assert gateway.outputs["free", 0]


async def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_is_never_run(world: World) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    class SlowCompiler:
        def compile(self, kind: str, text: str | None) -> object:
            compiling.set()
            go_on.wait(5)
            return compiler().compile("regex", text)

    async with serving(world) as served:
        served.server._grammars = SlowCompiler()  # type: ignore[assignment]
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT, sampling=greedy(20, grammar_kind="regex", grammar="a{9}")))
        await served.until(compiling.is_set)
        gateway.send(generate_request(TEXT, request_id="free", sampling=greedy(4)))
        assert (await gateway.end_of("free")).finish_reason == "length"
        gateway.send(Cancel(request_id="r"))
        await served.until(lambda: not served.server._requests)
        go_on.set()
        await served.until(lambda: not served.server._compiling)
        await served.until_idle()
        assert ("r", 0) not in gateway.outputs


async def test_an_idle_decoder_says_that_it_holds_nothing_and_a_leak_shows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REPORT_EVERY_S", 0.02)

    def leaked() -> float | None:
        return REGISTRY.get_sample_value("tandem_decoder_leaked", {"kind": "kv_blocks"})

    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT))
        await gateway.end_of("r")
        await served.until(lambda: leaked() == 0)
        served.server._thread.submit(lambda engine: engine.blocks.try_take(3) and ())  # type: ignore[arg-type,return-value]
        await served.until(lambda: leaked() == 3)


async def test_gateways_are_told_of_the_load(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        report = await gateway.next(LoadReport)
        assert (report.instance_id, report.kv_total_tokens) == ("decoder-1", 256)


async def test_gateways_are_told_how_long_queued_prompts_take(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REPORT_EVERY_S", 0.02)
    async with serving(world) as served:
        engine = served.server._engine
        for _ in range(2):
            engine._metrics._prefill.add(100, 1.0)
        monkeypatch.setattr(engine.scheduler, "schedule", list)  # nothing runs
        gateway = await served.gateway()
        gateway.send(generate_request(TEXT))
        while not (report := await gateway.next(LoadReport)).queue_s:
            assert report.waiting in (0, 1)
        assert report.queue_s == pytest.approx(len(TEXT) / 100)
        assert REGISTRY.get_sample_value("tandem_decoder_backlog_seconds") == pytest.approx(len(TEXT) / 100)
        gateway.send(Cancel(request_id="r"))
        while (await gateway.next(LoadReport)).queue_s:
            pass


async def test_a_gateway_that_was_silent_over_an_unbroken_connection_is_told_what_was_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GATEWAY_LIVENESS_S", 0.3)
    monkeypatch.setattr(server, "REPORT_EVERY_S", 0.05)
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world, sampling=greedy(4, n=2), attempt=3))
        end = await gateway.end_of("r")
        assert (end.finish_reason, end.attempt, end.error) == ("cancelled", 3, None)
        await served.until_idle()
        gateway.send(generate_request(TEXT, attempt=4))
        assert (await gateway.end_of("r")).finish_reason == "length"


async def test_what_a_gateway_could_not_be_told_it_hears_with_its_next_hello(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world))
        await gateway.next(MediaNeeded)
        [peer] = served.server._gateways
        with monkeypatch.context() as full:
            full.setattr(served.server._control, "try_send", lambda peer, message: False)
            served.server._lose_gateway(peer, "it does not read what it is sent")
        gateway.send(GATEWAY)
        assert (await gateway.end_of("r")).finish_reason == "cancelled"
        assert not served.server._untold


async def test_a_decoder_that_stood_still_itself_drops_no_gateway(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GATEWAY_LIVENESS_S", 0.4)
    monkeypatch.setattr(server, "REPORT_EVERY_S", 0.05)
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(picture_request(world))
        needed = await gateway.next(MediaNeeded)
        threading.Event().wait(1.0)  # the loop of both
        await gateway.next(LoadReport)
        for key in needed.keys:
            gateway.send(MediaAt(request_id="r", key=key, source="enc"))
        assert (await gateway.end_of("r")).finish_reason == "length"


async def test_a_refusal_names_the_request_of_the_refused_message(world: World) -> None:
    async with serving(world) as served:
        gateway = await served.gateway()
        gateway.send(EncodeReply(request_id="r7", key=key_of(1)))
        assert (await gateway.next(Refused)).request_id == "r7"
        gateway.send(FetchCredit(fetch_id="f", chunks=1))
        assert (await gateway.next(Refused)).request_id is None
