"""The story of a request among decoders and encoders that fail, die, repeat themselves, or come too late."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest

from common.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DecoderUnavailable,
    EncoderUnavailable,
    ModelFailure,
    Overloaded,
    ProtocolError,
    TandemError,
    UnsupportedMedia,
)
from common.messages import (
    Cancel,
    EncodeRequest,
    GenerateRequest,
    MediaAt,
    MediaItem,
    MediaOptions,
    PromptSpan,
    Refused,
    Release,
    SamplingParams,
    SequenceTokens,
    TokenLogprobs,
)
from common.wire import error_detail
from gateway_svc.backend import MediaReport
from gateway_svc.media.item import LoadedMedia
from gateway_svc.media.store import MediaStore
from tests.gateway_svc.fake_services import FINGERPRINT, FakeFleet, fake_fleet

KEYS = [f"{number:064x}" for number in range(4)]


def request_of(num_media: Iterable[int] = (), *, n: int = 1, max_tokens: int = 8) -> GenerateRequest:
    media = [
        MediaItem(
            key=KEYS[number],
            modality="image",
            grid=(1, 4, 4),
            spans=[PromptSpan(offset=5 * index, num_tokens=4, grid=(1, 4, 4))],
        )
        for index, number in enumerate(num_media)
    ]
    return GenerateRequest(
        request_id="r",
        model="tiny",
        fingerprint=FINGERPRINT,
        prompt_token_ids=list(range(40)),
        media=media,
        sampling=SamplingParams(seed=1, max_tokens=max_tokens, n=n),
        time_left_s=30,
    )


def loaded(request: GenerateRequest) -> list[LoadedMedia]:
    return [
        LoadedMedia(
            item.key, "image", MediaOptions(), item.grid, MediaStore().hold(b"source"), f"messages[0].content[{index}]"
        )
        for index, item in enumerate(request.media)
    ]


class Story:
    """A generation that runs in a task, and all that it said."""

    def __init__(self, world: FakeFleet, request: GenerateRequest, time_s: float = 20.0) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: list[float] = []
        self.reasons: dict[int, str] = {}
        self.reports: list[tuple[str, str]] = []
        self._events = world.fleet.generate(request, loaded(request), time.monotonic() + time_s)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._events:
                if isinstance(event, MediaReport):
                    self.reports.append((event.key, event.outcome))
                else:
                    self._note(event)
        finally:
            await self._events.aclose()

    def _note(self, event: SequenceTokens) -> None:
        tokens = self.tokens.setdefault(event.choice, [])
        assert event.offset == len(tokens), "a token twice or missing"
        tokens += event.tokens
        self.logprobs += [entry.logprob for entry in event.logprobs or []]
        if event.finish_reason is not None:
            assert event.choice not in self.reasons
            self.reasons[event.choice] = event.finish_reason

    async def ended(self) -> "Story":
        async with asyncio.timeout(15):
            await self.task
        return self

    async def error(self) -> Any:
        async with asyncio.timeout(15):
            with pytest.raises(TandemError) as raised:
                await self.task
        return raised.value

    async def has(self, count: int, choice: int = 0) -> None:
        async with asyncio.timeout(10):
            while len(self.tokens.get(choice, [])) < count:  # noqa: ASYNC110 (the reader has no event)
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_tokens_are_told_until_every_choice_has_finished() -> None:
    async with fake_fleet() as world:
        story = Story(world, request_of(n=2))
        decoder, request = await world.asked()
        decoder.need(request)
        decoder.give(request, 0, [1, 2])
        decoder.give(request, 0, [7], choice=1, finish_reason="length")
        decoder.give(request, 2, [], finish_reason="stop", stop_token_id=9)
        await story.ended()
        assert story.tokens == {0: [1, 2], 1: [7]}
        assert story.reasons == {0: "stop", 1: "length"}
        assert decoder.mailbox.of(Cancel) == []


async def test_a_decoder_that_dies_in_mid_stream_is_followed_by_another_without_a_token_twice_or_missing() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of())
        first, request = await world.asked()
        first.give(request, 0, [1, 2, 3])
        await story.has(3)
        first.die()
        second, resumed = await world.asked(2)
        assert second is not first
        assert (resumed.attempt, resumed.outputs) == (1, [[1, 2, 3]])
        second.give(resumed, 3, [4], logprobs=[TokenLogprobs(logprob=-4.0, top=[])])
        second.give(resumed, 2, [3, 4, 5], logprobs=[TokenLogprobs(logprob=-float(t), top=[]) for t in (3, 4, 5)])
        second.give(resumed, 5, [6], finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2, 3, 4, 5, 6]}
        assert story.logprobs == [-4.0, -5.0]


async def test_late_tokens_of_an_older_attempt_are_dropped_and_it_is_cancelled() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of())
        first, request = await world.asked()
        first.give(request, 0, [1])
        first.give(request, 1, [], finish_reason="hand_over")
        second, resumed = await world.asked(2)
        assert second is not first
        await first.mailbox.wait(Cancel)
        first.give(request, 1, [99, 99])
        second.give(resumed, 1, [2], finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2]}


async def test_a_request_that_its_only_decoder_has_dropped_goes_on_there() -> None:
    async with fake_fleet() as world:
        story = Story(world, request_of())
        decoder, request = await world.asked()
        decoder.give(request, 0, [1, 2])
        await story.has(2)
        decoder.give(request, 0, [], finish_reason="cancelled")
        again = await decoder.request(2)
        assert (again.attempt, again.outputs) == (request.attempt + 1, [[1, 2]])
        decoder.give(again, 2, [3], finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2, 3]}


async def test_a_request_that_a_decoder_refuses_as_malformed_fails_at_once() -> None:
    async with fake_fleet() as world:
        story = Story(world, request_of())
        decoder, request = await world.asked()
        error = ProtocolError("the header is not a valid message")
        decoder.say(Refused(error=error_detail(error), request_id=request.request_id))
        assert str(await story.error()) == error.message


async def test_a_choice_that_is_long_enough_is_cancelled_alone_and_not_run_again_elsewhere() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of(n=2))
        first, request = await world.asked()
        first.give(request, 0, [1, 2])
        await story.has(2)
        world.fleet.end_choice("r", 0)
        world.fleet.end_choice("r", 0)
        world.fleet.end_choice("unknown", 0)
        cancelled = await first.mailbox.wait(Cancel)
        assert (cancelled.request_id, cancelled.choice) == ("r", 0)
        first.give(request, 2, [3])
        first.give(request, 0, [5], choice=1)
        await story.has(1, choice=1)
        first.die()
        second, resumed = await world.asked(2)
        assert (resumed.outputs, resumed.finished) == ([[1, 2], [5]], [0])
        second.give(resumed, 1, [6], choice=1, finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2], 1: [5, 6]}
        assert len(first.mailbox.of(Cancel)) == 1


async def test_choices_that_had_ended_before_a_decoder_was_lost_stay_as_they_are() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of(n=2))
        first, request = await world.asked()
        first.give(request, 0, [1, 2], finish_reason="stop")
        first.give(request, 0, [5], choice=1)
        await story.has(1, choice=1)
        first.die()
        second, resumed = await world.asked(2)
        assert (resumed.outputs, resumed.finished) == ([[1, 2], [5]], [0])
        second.give(resumed, 2, [77])
        second.give(resumed, 3, [], finish_reason="stop")
        second.give(resumed, 1, [6], choice=1, finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2], 1: [5, 6]}
        await second.mailbox.wait(Cancel)


@pytest.mark.parametrize("error", [ContextTooLong("too long"), ModelFailure("not finite"), DeadlineExceeded("late")])
async def test_an_error_that_another_try_cannot_mend_is_raised(error: TandemError) -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of(n=3))
        decoder, request = await world.asked()
        decoder.fail(request, error)
        raised = await story.error()
        assert (type(raised), raised.message) == (type(error), error.message)


async def test_a_full_decoder_is_followed_by_each_other_one_once_and_then_the_error_is_told() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of())
        for count in (1, 2):
            decoder, request = await world.asked(count)
            decoder.fail(request, Overloaded(f"full {count}"))
        assert (await story.error()).message == "full 2"
        assert {len(decoder.mailbox.of(GenerateRequest)) for decoder in world.decoders} == {1}


async def test_a_refusal_by_a_draining_decoder_moves_on_also_when_it_is_no_longer_counted_as_ready() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of())
        first, request = await world.asked()
        first.is_draining = True
        first.say_hello()
        await world.until(lambda: len(world.fleet.decoders.ready) == 1)
        first.fail(request, Overloaded("shutting down"))
        second, resumed = await world.asked(2)
        second.give(resumed, 0, [1], finish_reason="length")
        await story.ended()


@pytest.mark.parametrize("event", [{"offset": 3, "tokens": [1]}, {"offset": 0, "tokens": [1], "choice": 5}])
async def test_skipped_tokens_and_unknown_choices_are_an_error(event: dict[str, Any]) -> None:
    async with fake_fleet() as world:
        story = Story(world, request_of())
        decoder, request = await world.asked()
        decoder.give(request, **event)
        assert isinstance(await story.error(), ProtocolError)


async def test_a_request_under_which_three_decoders_die_is_not_sent_to_a_fourth() -> None:
    async with fake_fleet(num_decoders=4) as world:
        story = Story(world, request_of())
        for count in (1, 2, 3):
            decoder, request = await world.asked(count)
            if count == 1:
                decoder.give(request, 0, [1])
                await story.has(1)
            decoder.die()
        decoder, _ = await world.asked(4)  # the first had given a token, so it does not count
        decoder.die()
        error = await story.error()
        assert isinstance(error, ModelFailure)
        assert "3 decoders in a row" in error.message


async def test_decoders_that_said_that_they_leave_do_not_count_as_lost() -> None:
    async with fake_fleet(num_decoders=5) as world:
        story = Story(world, request_of())
        for count in range(1, 5):
            decoder, request = await world.asked(count)
            decoder.is_draining = True
            decoder.say_hello()
            link = next(link for link in world.fleet.decoders.links if link.endpoint == decoder.router.endpoint)
            await world.until(lambda link=link: link.peer and link.peer.is_draining)
            decoder.die()
        decoder, request = await world.asked(5)
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()


async def test_a_decoder_that_skips_tokens_is_followed_by_another() -> None:
    async with fake_fleet(num_decoders=2) as world:
        story = Story(world, request_of())
        first, request = await world.asked()
        first.give(request, 0, [1])
        first.give(request, 5, [9])
        second, resumed = await world.asked(2)
        assert second is not first
        second.give(resumed, 1, [2], finish_reason="length")
        await story.ended()
        assert story.tokens == {0: [1, 2]}


async def test_without_a_decoder_the_request_waits_until_its_deadline() -> None:
    async with fake_fleet(num_decoders=0) as world:
        error = await Story(world, request_of(), time_s=0.1).error()
        assert isinstance(error, DecoderUnavailable)
        assert error.retry_after_s


async def test_the_deadline_ends_a_request_everywhere() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.encoders[0].answer = lambda key: None
        story = Story(world, request_of([0]), time_s=0.3)
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        assert isinstance(await story.error(), DeadlineExceeded | EncoderUnavailable)
        await decoder.mailbox.wait(Cancel)


async def test_media_in_redis_are_named_and_no_encoder_is_asked() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.cache.held.add(KEYS[0])
        story = Story(world, request_of([0, 1]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        await decoder.mailbox.wait(MediaAt)
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()
        assert decoder.media_at() == [(KEYS[0], "redis")]
        assert world.encoders[0].mailbox.of(EncodeRequest) == []
        assert sorted(story.reports) == [(KEYS[0], "cache"), (KEYS[1], "decoder")]


async def test_an_encoder_that_fails_or_dies_is_followed_by_the_next_owner() -> None:
    async with fake_fleet(num_encoders=3) as world:
        story = Story(world, request_of([0]))
        tried: list[str] = []

        def fail_twice(name: str) -> Any:
            def answer(key: str) -> TandemError | bool | None:
                tried.append(name)
                return Overloaded("busy") if len(tried) == 1 else None if len(tried) == 2 else True

            return answer

        for encoder in world.encoders:
            encoder.answer = fail_twice(encoder.name)
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        await world.until(lambda: len(tried) == 2)
        next(encoder for encoder in world.encoders if encoder.name == tried[1]).die()
        await decoder.mailbox.wait(MediaAt)
        assert len(set(tried)) == 3
        assert decoder.media_at() == [(KEYS[0], tried[2])]
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()
        assert story.reports == [(KEYS[0], "encoded")]


async def test_bad_media_are_told_with_their_place_and_the_rest_is_stopped() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.encoders[0].answer = lambda key: UnsupportedMedia("damaged") if key == KEYS[1] else None
        story = Story(world, request_of([0, 1]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:2])
        error = await story.error()
        assert isinstance(error, UnsupportedMedia)
        assert error.param == "messages[0].content[1]"
        await decoder.mailbox.wait(Cancel)
        await world.encoders[0].is_cancelled()


async def test_with_all_encoders_gone_uncached_media_fail_in_time_with_a_time_to_come_back() -> None:
    async with fake_fleet(encoder_wait_s=0.1) as world:
        story = Story(world, request_of([0]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        error = await story.error()
        assert isinstance(error, EncoderUnavailable)
        assert error.retry_after_s
        assert error.param == "messages[0].content[0]"


async def test_a_source_that_failed_is_not_named_again() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.cache.held.add(KEYS[0])
        story = Story(world, request_of([0]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        await decoder.mailbox.wait(MediaAt)
        decoder.need(request, KEYS[:1], failed_source="redis")
        await decoder.mailbox.wait(MediaAt, 2)
        assert decoder.media_at() == [(KEYS[0], "redis"), (KEYS[0], "encoder-0")]
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()
        assert story.reports == [(KEYS[0], "cache")]


async def test_media_that_are_asked_for_twice_are_looked_for_once_and_reported_once() -> None:
    async with fake_fleet(num_encoders=1) as world:
        world.encoders[0].answer = lambda key: None
        story = Story(world, request_of([0, 1]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:2])
        await world.encoders[0].mailbox.wait(EncodeRequest, 2)
        decoder.need(request, KEYS[:1])
        decoder.need(request, [])
        decoder.give(request, 0, [1])
        await story.has(1)
        assert story.reports == [], "what is still being encoded was not in the decoder"
        world.encoders[0].finish_waiting()
        await decoder.mailbox.wait(MediaAt, 2)
        assert len(world.encoders[0].mailbox.of(EncodeRequest)) == 2
        decoder.give(request, 1, [2], finish_reason="length")
        await story.ended()
        assert sorted(story.reports) == [(KEYS[0], "encoded"), (KEYS[1], "encoded")]


async def test_a_preempted_request_may_ask_again_for_what_it_had() -> None:
    async with fake_fleet(num_encoders=1) as world:
        story = Story(world, request_of([0]))
        decoder, request = await world.asked()
        for count in (1, 2):
            decoder.need(request, KEYS[:1])
            await decoder.mailbox.wait(MediaAt, count)
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()
        assert story.reports == [(KEYS[0], "encoded")]


async def test_an_item_that_is_encoded_while_the_decoder_is_lost_is_told_to_the_next_one() -> None:
    async with fake_fleet(num_decoders=2, num_encoders=1) as world:
        encoder = world.encoders[0]
        encoder.answer = lambda key: None
        story = Story(world, request_of([0]))
        first, request = await world.asked()
        first.need(request, KEYS[:1])
        await encoder.mailbox.wait(EncodeRequest)
        first.die()
        second, resumed = await world.asked(2)
        second.need(resumed, KEYS[:1])
        second.need(resumed, [])
        second.give(resumed, 0, [1])
        await story.has(1)
        encoder.finish_waiting()
        await second.mailbox.wait(MediaAt)
        assert len(encoder.mailbox.of(EncodeRequest)) == 1
        second.give(resumed, 1, [2], finish_reason="length")
        await story.ended()


async def test_the_same_picture_twice_is_encoded_once() -> None:
    async with fake_fleet(num_encoders=1) as world:
        story = Story(world, request_of([0, 0]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        await decoder.mailbox.wait(MediaAt)
        decoder.give(request, 0, [1], finish_reason="length")
        await story.ended()
        assert len(world.encoders[0].mailbox.of(EncodeRequest)) == 1
        assert story.reports == [(KEYS[0], "encoded")]


async def test_closing_the_iterator_cancels_at_the_decoder_and_at_encoders_and_ends_leases() -> None:
    async with fake_fleet(num_encoders=1) as world:
        encoder = world.encoders[0]
        encoder.answer = lambda key: True if key == KEYS[0] else None
        story = Story(world, request_of([0, 1]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:2])
        await decoder.mailbox.wait(MediaAt)
        await encoder.mailbox.wait(EncodeRequest, 2)
        await story.close()
        await decoder.mailbox.wait(Cancel)
        await encoder.is_cancelled()
        await encoder.is_free()


async def test_leases_end_with_the_first_token() -> None:
    async with fake_fleet(num_encoders=1) as world:
        story = Story(world, request_of([0]))
        decoder, request = await world.asked()
        decoder.need(request, KEYS[:1])
        await decoder.mailbox.wait(MediaAt)
        assert world.encoders[0].mailbox.of(Release) == []
        decoder.give(request, 0, [1])
        await world.encoders[0].is_free()
        await story.close()
        await decoder.mailbox.wait(Cancel)
