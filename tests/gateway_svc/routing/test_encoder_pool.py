"""Calls to encoders over real sockets: each is answered or fails, and none is taken for another."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from common.errors import EncoderUnavailable, ModelFailure, Overloaded, ProtocolError, UnsupportedMedia
from common.messages import Cancel, EncodeReply, EncodeRequest, ProbeReply, Refused, Release
from common.wire import error_detail
from gateway_svc.routing.ejection import MAX_FAILURES
from gateway_svc.routing.encoder_pool import DEFAULT_PATCHES_PER_S, EncoderPool, Outgoing
from tests.common.sockets import background, eventually, zmq_context
from tests.gateway_svc.fake_encoders import FINGERPRINT, FakeEncoder, fake_encoders, held, pool_of


@contextlib.asynccontextmanager
async def running(count: int = 1) -> AsyncIterator[tuple[EncoderPool, list[FakeEncoder]]]:
    with zmq_context() as context, tempfile.TemporaryDirectory(prefix="tdm") as folder:
        encoders = fake_encoders(context, folder, count)
        async with pool_of(context, encoders) as pool:
            yield pool, encoders


def request(key: int = 1, request_id: str = "r1") -> EncodeRequest:
    return EncodeRequest(
        request_id=request_id,
        key=f"{key:064x}",
        modality="image",
        expected_grid=(1, 4, 4),
        fingerprint=FINGERPRINT,
        time_left_s=30.0,
    )


def call(pool: EncoderPool, encoder: FakeEncoder, asked: EncodeRequest, timeout_s: float = 20.0) -> Any:
    peer = pool.ready()[encoder.hello.instance_id]
    return asyncio.create_task(pool.call(peer, asked, Outgoing(b"source"), timeout_s))


async def test_a_call_brings_the_source_and_gets_its_answer() -> None:
    async with running() as (pool, [encoder]):
        reply = await call(pool, encoder, request())
        assert isinstance(reply, EncodeReply)
        assert (encoder.requests, encoder.sources) == ([request()], [b"source"])
        assert encoder.controls == []


async def test_the_source_is_let_go_of_when_it_is_sent_and_not_when_it_is_answered() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        source = Outgoing(b"source")
        waiting = asyncio.create_task(pool.call(pool.ready()[encoder.hello.instance_id], request(), source, 20.0))
        await eventually(lambda: encoder.sources == [b"source"])
        assert not waiting.done()
        assert source.take() == b""
        encoder.reply(0)
        await waiting


async def test_the_encoder_s_error_is_raised_as_ours() -> None:
    async with running() as (pool, [encoder]):
        encoder.answer = lambda encoder, asked: UnsupportedMedia("not a picture")
        with pytest.raises(UnsupportedMedia, match="not a picture"):
            await call(pool, encoder, request())


async def test_answers_out_of_order_find_their_calls() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        calls = [call(pool, encoder, request(key)) for key in range(3)]
        await eventually(lambda: len(encoder.requests) == 3)
        for index in (2, 0, 1):
            encoder.reply(index, Overloaded(f"answer {encoder.requests[index].key}"))
        for key, one in enumerate(calls):
            with pytest.raises(Overloaded, match=f"answer {key:064x}"):
                await one


async def test_two_calls_for_the_same_item_are_both_answered() -> None:
    """A request that went to another decoder asks again while its first question is still open."""
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        calls = [call(pool, encoder, request()) for _ in range(2)]
        await eventually(lambda: len(encoder.requests) == 2)
        encoder.reply(0)
        await asyncio.gather(*calls)
        assert encoder.cancelled == []


async def test_a_late_answer_of_one_encoder_is_not_taken_for_another_s() -> None:
    async with running(2) as (pool, encoders):
        for encoder in encoders:
            encoder.is_deaf = True
        with pytest.raises(TimeoutError):
            await call(pool, encoders[0], request(), timeout_s=0.05)
        second = call(pool, encoders[1], request())
        await eventually(lambda: encoders[1].requests)
        encoders[0].reply(0, UnsupportedMedia("late"))
        encoders[0].report(queue_s=7.0)
        await eventually(lambda: pool.queue_s(pool.ready()["e0"]) == 7.0)
        assert not second.done()
        encoders[1].reply(0)
        assert (await second).error is None


async def test_an_encoder_that_goes_away_fails_its_calls_only() -> None:
    async with running(2) as (pool, encoders):
        for encoder in encoders:
            encoder.is_deaf = True
        lost, kept = call(pool, encoders[0], request(1)), call(pool, encoders[1], request(2))
        await eventually(lambda: encoders[0].requests and encoders[1].requests)
        encoders[0].hello = msgspec.structs.replace(encoders[0].hello, instance_id="e0 again")
        with pytest.raises(EncoderUnavailable, match="went away"):
            await lost
        encoders[1].reply(0)
        await kept
        await eventually(lambda: sorted(pool.ready()) == ["e0 again", "e1"])


async def test_a_request_that_ends_is_cancelled_at_the_encoder() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        one = call(pool, encoder, request())
        await eventually(lambda: encoder.requests)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        await eventually(lambda: encoder.controls == [Cancel(request_id="r1")])


async def test_a_call_that_ran_out_of_time_does_not_cancel_the_whole_request() -> None:
    """An encoder refuses all that comes of a cancelled request, and another try may yet be made there."""
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        with pytest.raises(TimeoutError):
            await call(pool, encoder, request(), timeout_s=0.05)
        pool.release("r1", list(pool.ready().values()))
        await eventually(lambda: encoder.controls == [Release(request_id="r1")])


@pytest.mark.parametrize("change", [{"is_ready": False}, {"is_draining": True}], ids=["still loading", "draining"])
async def test_an_encoder_that_takes_no_work_is_not_ready(change: dict[str, bool]) -> None:
    async with running(2) as (pool, encoders):
        encoders[0].hello = msgspec.structs.replace(encoders[0].hello, **change)
        await eventually(lambda: list(pool.ready()) == ["e1"])


async def test_an_encoder_that_reports_draining_gets_nothing_more() -> None:
    async with running() as (pool, [encoder]):
        encoder.report(is_draining=True)
        await eventually(lambda: not pool.ready())


async def test_only_encoders_of_the_fingerprint_are_named() -> None:
    async with running(2) as (pool, encoders):
        encoders[0].hello = msgspec.structs.replace(encoders[0].hello, fingerprint="0" * 64)
        await eventually(lambda: list(pool.ready(FINGERPRINT)) == ["e1"])
        assert list(pool.ready("0" * 64)) == ["e0"]
        assert len(pool.ready()) == 2


async def test_changes_wake_those_who_wait_for_them() -> None:
    async with running() as (pool, [encoder]):
        changed = pool.changes.next
        encoder.hello = msgspec.structs.replace(encoder.hello, is_draining=True)
        async with asyncio.timeout(10):
            await changed.wait()
        assert not pool.changes.next.is_set()


async def test_an_encoder_that_returns_is_used_again_without_a_restart_of_anything() -> None:
    """K8S-08: the process dies, and another one answers at the same address."""
    with zmq_context() as context, tempfile.TemporaryDirectory(prefix="tdm") as folder:
        [first] = fake_encoders(context, folder, 1)
        pool = EncoderPool(context, lambda: first.hello, keys=None, on_change=lambda: None)
        pool.set_members([first.member])
        async with background(pool.run()):
            async with background(first.run()):
                await eventually(pool.ready)
            first.close()
            await eventually(lambda: not pool.ready())
            [second] = fake_encoders(context, folder, 1)
            second.hello = msgspec.structs.replace(second.hello, instance_id="e9")
            async with background(second.run()):
                await eventually(lambda: list(pool.ready()) == ["e9"])
                await call(pool, second, request())


async def test_a_refused_message_fails_the_calls_of_its_request_at_once_and_no_other() -> None:
    async with running(2) as (pool, encoders):
        for encoder in encoders:
            encoder.is_deaf = True
        refused = call(pool, encoders[0], request(1, "r1"))
        others = [call(pool, encoders[0], request(1, "r2")), call(pool, encoders[1], request(1, "r1"))]
        await eventually(lambda: len(encoders[0].requests) == 2 and encoders[1].requests)
        peer = encoders[0].asked_by[0]
        error = error_detail(ProtocolError("an encoder does not accept this"))
        encoders[0].data.send(peer, Refused(error=error))
        encoders[0].data.send(peer, Refused(error=error, request_id="r1"))
        with pytest.raises(ProtocolError, match="does not accept this"):
            await refused
        assert not any(other.done() for other in others)
        for index in range(2):
            encoders[0].reply(index)
        encoders[1].reply(0)
        await asyncio.gather(*others)


async def test_leases_and_calls_that_end_while_an_encoder_is_away_end_there_when_it_is_back() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        peer = pool.ready()["e0"]
        cancelled = call(pool, encoder, request(1, "r2"))
        await eventually(lambda: encoder.requests)
        peer.control._go_down("silence, say")
        pool.release("r1", [peer])
        cancelled.cancel()
        await eventually(lambda: encoder.controls == [Release(request_id="r1"), Cancel(request_id="r2")])


async def test_an_encoder_that_left_is_told_of_the_end_of_the_requests_that_have_leases_there() -> None:
    async with running() as (pool, [encoder]):
        peer = pool.ready()["e0"]
        peer.users.add("r1")
        pool.set_members([])
        assert not pool.ready()
        await pool._members._close_those_that_left()
        assert pool.peers == [peer]
        pool.release("r1", [peer])
        await eventually(lambda: encoder.controls == [Release(request_id="r1")])
        await eventually(lambda: not pool.peers)


async def test_an_encoder_that_keeps_failing_is_left_alone_as_long_as_there_is_another() -> None:
    async with running(2) as (pool, encoders):
        encoders[0].answer = lambda encoder, asked: ModelFailure("not finite")
        for _ in range(MAX_FAILURES):
            with pytest.raises(ModelFailure):
                await call(pool, encoders[0], request())
        assert list(pool.ready()) == ["e1"]
        encoders[1].hello = msgspec.structs.replace(encoders[1].hello, is_draining=True)
        await eventually(lambda: list(pool.ready()) == ["e0"])
        encoders[0].answer = held
        await call(pool, encoders[0], request())
        encoders[1].hello = msgspec.structs.replace(encoders[1].hello, is_draining=False)
        await eventually(lambda: len(pool.ready()) == 2)


async def test_refused_media_and_a_full_queue_are_no_fault_of_the_encoder() -> None:
    async with running(2) as (pool, encoders):
        for error in (UnsupportedMedia("broken"), Overloaded("full")) * MAX_FAILURES:
            encoders[0].answer = lambda encoder, asked, error=error: error
            with pytest.raises(type(error)):
                await call(pool, encoders[0], request())
        assert len(pool.ready()) == 2


async def test_an_encoder_of_another_model_is_not_used() -> None:
    async with running(2) as (pool, encoders):
        encoders[0].hello = msgspec.structs.replace(encoders[0].hello, model="another")
        await eventually(lambda: list(pool.ready()) == ["e1"])


async def test_an_answer_of_another_kind_is_an_error_and_not_a_crash() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        asked = call(pool, encoder, request(1))
        await eventually(lambda: encoder.requests)
        names = {"request_id": encoder.requests[0].request_id, "key": encoder.requests[0].key}
        encoder.data.send(encoder.asked_by[0], ProbeReply(**names))
        with pytest.raises(ProtocolError, match="another kind"):
            await asked


async def test_patches_that_were_sent_count_as_queue_until_they_are_answered() -> None:
    async with running() as (pool, [encoder]):
        encoder.is_deaf = True
        peer = pool.ready()["e0"]
        assert pool.queue_s(peer) == 0
        asked = call(pool, encoder, msgspec.structs.replace(request(1), expected_grid=(1, 100, 60)))
        await eventually(lambda: encoder.requests)
        assert pool.queue_s(peer) == pytest.approx(6000 / DEFAULT_PATCHES_PER_S)
        encoder.report(patches_per_s=1000.0)
        await eventually(lambda: pool.queue_s(peer) == pytest.approx(6.0))
        encoder.report(queue_s=9.0, patches_per_s=1000.0)
        await eventually(lambda: pool.queue_s(peer) == pytest.approx(9.0))
        encoder.reply(0)
        await asked
        encoder.report()
        await eventually(lambda: pool.queue_s(peer) == 0)


async def test_an_encoder_that_has_not_measured_itself_is_taken_to_be_as_fast_as_the_others() -> None:
    async with running(2) as (pool, [slow, new]):
        assert pool.patches_per_s == DEFAULT_PATCHES_PER_S
        slow.report(patches_per_s=500.0)
        await eventually(lambda: pool.patches_per_s == 500.0)
        new.is_deaf = True
        asked = call(pool, new, msgspec.structs.replace(request(1), expected_grid=(1, 100, 60)))
        await eventually(lambda: new.requests)
        assert pool.queue_s(pool.ready()["e1"]) == pytest.approx(12.0)
        new.reply(0)
        await asked
