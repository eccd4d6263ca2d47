"""The pool of decoders: who gets the next request, and which messages reach whom."""

import asyncio

import msgspec
import pytest

from common.errors import PeerUnreachable, ProtocolError
from common.messages import Cancel, GenerateRequest, LoadReport, MediaNeeded, Refused, SamplingParams, SequenceTokens
from common.wire import error_detail
from gateway_svc.routing.decoder_pool import DecoderEvent, DecoderLost
from gateway_svc.routing.ejection import MAX_FAILURES
from tests.gateway_svc.fake_services import FakeFleet, fake_fleet


def request_of(request_id: str, attempt: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        model="tiny",
        prompt_token_ids=[1],
        sampling=SamplingParams(seed=0, max_tokens=4),
        time_left_s=10,
    )


async def loads(world: FakeFleet, *running: int) -> None:
    """Have each decoder report so many running requests."""
    for decoder, count in zip(world.decoders, running, strict=True):
        decoder.say(LoadReport(instance_id=decoder.name, running=count))
    links = world.fleet.decoders.links
    await world.until(lambda: [link.load and link.load.running for link in links] == list(running))


async def test_the_least_loaded_decoder_is_picked_and_own_requests_count_at_once() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        await loads(world, 2, 1)
        assert pool.pick([]) is pool.links[1]
        for number in range(3):
            pool.begin(pool.links[1], request_of(f"r{number}"), lambda event: None)
        assert pool.pick([]) is pool.links[0]


async def test_a_decoder_to_avoid_is_picked_only_when_there_is_no_other() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        assert pool.pick([pool.links[0]]) is pool.links[1]
        assert pool.pick(pool.links) in pool.links


async def test_only_the_running_attempt_hears_its_decoder() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        told: list[DecoderEvent] = []
        old = pool.begin(pool.links[0], request_of("r"), told.append)
        first = await world.decoders[0].request()
        pool.end(old, is_finished=False)
        pool.begin(pool.links[1], request_of("r", attempt=1), told.append)
        second = await world.decoders[1].request()
        world.decoders[0].give(first, 0, [1])
        world.decoders[0].give(second, 0, [2])
        world.decoders[1].give(first, 0, [3])
        world.decoders[1].give(request_of("unknown"), 0, [4])
        await world.decoders[0].mailbox.wait(Cancel)
        world.decoders[1].need(second)
        world.decoders[1].give(second, 0, [5])
        await world.until(lambda: len(told) == 2)
        assert isinstance(told[0], MediaNeeded)
        assert isinstance(told[1], SequenceTokens)
        assert told[1].tokens == [5]


async def test_the_loss_of_a_decoder_is_told_to_its_runs_alone() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        told: list[list[DecoderEvent]] = [[], []]
        for index in range(2):
            pool.begin(pool.links[index], request_of(f"r{index}", attempt=index), told[index].append)
        await world.decoders[0].request()
        world.decoders[0].die()
        await world.until(lambda: told[0])
        assert told == [[DecoderLost(0)], []]
        with pytest.raises(PeerUnreachable):
            pool.begin(pool.links[0], request_of("late"), lambda event: None)
        assert len(pool.ready) == 1


async def test_a_finished_run_is_not_cancelled() -> None:
    async with fake_fleet() as world:
        pool = world.fleet.decoders
        pool.end(pool.begin(pool.links[0], request_of("done"), lambda event: None), is_finished=True)
        pool.end(pool.begin(pool.links[0], request_of("left"), lambda event: None), is_finished=False)
        assert (await world.decoders[0].mailbox.wait(Cancel)).request_id == "left"


async def test_a_change_of_a_decoder_wakes_those_who_wait_for_one() -> None:
    async with fake_fleet() as world:
        decoder, changed = world.decoders[0], world.fleet.decoders.changes.next
        decoder.is_draining = True
        decoder.say_hello()
        async with asyncio.timeout(5):
            await changed.wait()
        assert world.fleet.decoders.ready == []


async def test_a_refused_message_fails_its_run_at_once_and_no_other() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        told: list[list[DecoderEvent]] = [[], []]
        for index in range(2):
            pool.begin(pool.links[0], request_of(f"r{index}", attempt=index), told[index].append)
        await world.decoders[0].request(2)
        error = error_detail(ProtocolError("a field is out of bounds"))
        world.decoders[1].say(Refused(error=error, request_id="r0"))
        world.decoders[0].say(Refused(error=error))
        world.decoders[0].say(Refused(error=error, request_id="unknown"))
        world.decoders[0].say(Refused(error=error, request_id="r1"))
        await world.until(lambda: told[1])
        [end] = told[1]
        assert isinstance(end, SequenceTokens)
        assert (end.attempt, end.finish_reason, end.error) == (1, "error", error)
        assert told[0] == []


async def test_a_run_that_ends_while_its_decoder_is_away_is_cancelled_when_it_is_back() -> None:
    async with fake_fleet() as world:
        pool = world.fleet.decoders
        run = pool.begin(pool.links[0], request_of("r"), lambda event: None)
        await world.decoders[0].request()
        pool.links[0]._go_down("silence, say")
        pool.end(run, is_finished=False)
        await world.until(lambda: pool.ready)
        pool.begin(pool.links[0], request_of("r", attempt=1), lambda event: None)
        await world.decoders[0].request(2)
        assert [type(message) for message in world.decoders[0].mailbox.messages] == [
            GenerateRequest,
            Cancel,
            GenerateRequest,
        ]


def conversation(request_id: str, num_tokens: int) -> GenerateRequest:
    return msgspec.structs.replace(request_of(request_id), prompt_token_ids=list(range(num_tokens)))


async def test_the_next_turn_of_a_conversation_goes_where_the_first_was_unless_that_decoder_is_busy() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        first = pool.pick([pool.links[0]], conversation("turn-1", 1000))
        assert first is pool.links[1]
        run = pool.begin(first, conversation("turn-1", 1000), lambda event: None)
        await loads(world, 0, 2)
        assert pool.pick([], conversation("turn-2", 1500)) is pool.links[1]
        assert pool.pick([], request_of("another")) is pool.links[0]
        await loads(world, 0, 6)
        assert pool.pick([], conversation("turn-2", 1500)) is pool.links[0]
        pool.end(run, is_finished=True)


async def test_a_decoder_that_restarts_has_forgotten_all_prefixes() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        pool.end(pool.begin(pool.links[1], conversation("turn-1", 1000), lambda event: None), is_finished=True)
        world.decoders[1].name = "decoder-1-again"
        await world.decoders[1].request()
        world.decoders[1].say_hello()
        await world.until(lambda: pool.links[1].peer and pool.links[1].peer.instance_id == "decoder-1-again")
        assert pool.pick([], conversation("turn-2", 1500)) is pool.links[0]


async def test_a_decoder_of_another_model_is_not_used() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        pool.begin(pool.links[0], request_of("r"), lambda event: None)
        await world.decoders[0].request()
        world.decoders[0].model = "another"
        world.decoders[0].say_hello()
        await world.until(lambda: pool.ready == [pool.links[1]])
        assert pool.pick([pool.links[1]]) is pool.links[1]
        assert pool.last_hello is not None
        assert pool.last_hello.model == "tiny"


async def test_a_decoder_that_keeps_failing_is_left_alone_as_long_as_there_is_another() -> None:
    async with fake_fleet(num_decoders=2) as world:
        pool = world.fleet.decoders
        bad = pool.links[0]
        for number in range(MAX_FAILURES):
            run = pool.begin(bad, request_of(f"r{number}"), lambda event: None)
            pool.blame(run)
            pool.end(run, is_finished=True)
        assert pool.ready == [pool.links[1]]
        world.decoders[1].is_draining = True
        await world.decoders[0].request()
        pool.begin(pool.links[1], request_of("other"), lambda event: None)
        await world.decoders[1].request()
        world.decoders[1].say_hello()
        await world.until(lambda: pool.ready == [bad])
        run = pool.begin(bad, request_of("trial"), lambda event: None)
        world.decoders[0].give(await world.decoders[0].request(MAX_FAILURES + 1), 0, [1])
        world.decoders[1].is_draining = False
        world.decoders[1].say_hello()
        await world.until(lambda: len(pool.ready) == 2)
        pool.end(run, is_finished=True)
