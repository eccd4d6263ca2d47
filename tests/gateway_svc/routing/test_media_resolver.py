"""Where a decoder's media come from: Redis, then the owner, then another encoder; and what each failure means."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.embedding import ExpectedEmbedding
from common.embedding_cache import Located
from common.errors import (
    DeadlineExceeded,
    EncoderUnavailable,
    ModelFailure,
    Overloaded,
    ProtocolError,
    TandemError,
    UnsupportedMedia,
    error_info,
)
from common.messages import Cancel, MediaOptions, Release
from gateway_svc.media.item import LoadedMedia
from gateway_svc.media.store import MediaStore
from gateway_svc.routing import media_resolver
from gateway_svc.routing.media_resolver import MAX_LOST, MAX_TRIES, MediaResolver
from gateway_svc.routing.placement import rendezvous_order
from tests.common.sockets import background, eventually, zmq_context
from tests.gateway_svc.fake_encoders import FINGERPRINT, FakeEncoder, fake_encoders, pool_of


@dataclass
class FakeCache:
    """Holds the keys that it is told to hold."""

    keys: set[str] = field(default_factory=set)
    in_work: dict[str, str] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)

    async def locate(self, expected: Sequence[ExpectedEmbedding]) -> Located:
        assert all(
            (item.fingerprint, item.dtype, item.grid) == (FINGERPRINT, "bfloat16", (1, 4, 4)) for item in expected
        )
        self.asked.append([item.key for item in expected])
        asked = set(self.asked[-1])
        return Located(self.keys & asked, {key: owner for key, owner in self.in_work.items() if key in asked})


@dataclass
class Bench:
    """A resolver of three items, its encoders in the order in which they own the first item, and what it found."""

    resolver: MediaResolver
    encoders: list[FakeEncoder]
    cache: FakeCache
    items: list[LoadedMedia]
    found: list[tuple[str, str, bool]]

    def fail(self, error: TandemError, *, times: int = 10**6) -> None:
        """Every encoder answers so, for the first tries."""
        tries = iter(range(times))
        for encoder in self.encoders:
            encoder.answer = lambda encoder, asked: error if next(tries, None) is not None else None

    @property
    def num_asked(self) -> int:
        return sum(len(encoder.requests) for encoder in self.encoders)


def item(number: int) -> LoadedMedia:
    return LoadedMedia(
        key=f"{number:064x}",
        modality="image",
        options=MediaOptions(),
        grid=(1, 4, 4),
        source=MediaStore().hold(f"source {number}".encode()),
        param=f"messages[0].content[{number}]",
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before an encoder is asked again."""
    real = asyncio.sleep
    monkeypatch.setattr(media_resolver.asyncio, "sleep", lambda seconds: real(min(seconds, 0.005)))


@contextlib.asynccontextmanager
async def bench(
    count: int = 2, *, deadline_s: float = 30.0, has_cache: bool = True, **options: Any
) -> AsyncIterator[Bench]:
    with zmq_context() as context, tempfile.TemporaryDirectory(prefix="tdm") as folder:
        encoders = fake_encoders(context, folder, count)
        async with pool_of(context, encoders) as pool:
            cache, items, found = FakeCache(), [item(number) for number in range(3)], []
            resolver = MediaResolver(
                "r1",
                items,
                fingerprint=FINGERPRINT,
                wire_dtype="bfloat16",
                encoders=pool,
                cache=cache if has_cache else None,  # type: ignore[arg-type]
                deadline=time.monotonic() + deadline_s,
                on_found=lambda item, source, was_encoded: found.append((item.key, source, was_encoded)),
                **{"encoder_wait_s": 30.0, **options},
            )
            order = rendezvous_order(items[0].key, [encoder.hello.instance_id for encoder in encoders])
            encoders.sort(key=lambda encoder: order.index(encoder.hello.instance_id))
            yield Bench(resolver, encoders, cache, items, found)


async def resolved(b: Bench, numbers: Sequence[int] = (0,), failed_source: str | None = None) -> None:
    async with asyncio.timeout(10):
        await b.resolver.resolve([b.items[number].key for number in numbers], failed_source)


async def error_of(b: Bench, numbers: Sequence[int] = (0,)) -> TandemError:
    with pytest.raises(ExceptionGroup) as caught:
        await resolved(b, numbers)
    (error,) = caught.value.exceptions
    assert isinstance(error, TandemError)
    return error


async def test_what_redis_holds_is_neither_encoded_nor_sent() -> None:
    async with bench() as b:
        b.cache.keys = {one.key for one in b.items}
        await resolved(b, (0, 1, 2))
        assert b.found == [(one.key, "redis", False) for one in b.items]
        assert len(b.cache.asked) == 1
        assert b.num_asked == 0


async def test_the_owner_of_the_key_encodes_what_redis_does_not_hold() -> None:
    async with bench(3) as b:
        b.cache.keys = {b.items[1].key}
        await resolved(b, (0, 1))
        owner = b.encoders[0]
        assert sorted(b.found) == [(b.items[0].key, owner.hello.instance_id, True), (b.items[1].key, "redis", False)]
        assert owner.sources == [b"source 0"]
        assert b.num_asked == 1


async def test_a_redis_that_failed_is_not_named_again() -> None:
    async with bench() as b:
        b.cache.keys = {b.items[0].key}
        await resolved(b, failed_source="redis")
        assert [source for _, source, _ in b.found] == [b.encoders[0].hello.instance_id]


async def test_an_encoder_that_a_decoder_could_not_fetch_from_is_passed_over() -> None:
    async with bench() as b:
        await resolved(b, failed_source=b.encoders[0].hello.instance_id)
        assert [source for _, source, _ in b.found] == [b.encoders[1].hello.instance_id]


async def test_the_only_encoder_is_asked_again_although_it_failed() -> None:
    async with bench(1) as b:
        await resolved(b, failed_source="e0")
        assert [source for _, source, _ in b.found] == ["e0"]


@pytest.mark.parametrize("error", [Overloaded("full"), ProtocolError("what?"), EncoderUnavailable("gone")])
async def test_another_encoder_takes_over_from_one_that_failed(error: TandemError) -> None:
    async with bench() as b:
        b.encoders[0].answer = lambda encoder, asked: error
        await resolved(b)
        assert [source for _, source, _ in b.found] == [b.encoders[1].hello.instance_id]
        assert [len(encoder.requests) for encoder in b.encoders] == [1, 1]


async def test_the_encoder_at_work_on_an_item_is_asked_instead_of_its_owner() -> None:
    async with bench(3) as b:
        b.cache.in_work = {b.items[0].key: b.encoders[2].hello.instance_id}
        await resolved(b)
        assert [source for _, source, _ in b.found] == [b.encoders[2].hello.instance_id]
        assert [len(encoder.requests) for encoder in b.encoders] == [0, 0, 1]


async def test_an_encoder_that_names_another_is_followed_there() -> None:
    async with bench(3) as b:
        b.encoders[0].elsewhere = b.encoders[2].hello.instance_id
        await resolved(b)
        assert b.found == [(b.items[0].key, b.encoders[2].hello.instance_id, True)]
        assert [len(encoder.requests) for encoder in b.encoders] == [1, 0, 1]


async def test_an_encoder_that_names_redis_is_believed_and_nothing_is_encoded() -> None:
    async with bench() as b:
        b.encoders[0].elsewhere = "redis"
        await resolved(b)
        assert b.found == [(b.items[0].key, "redis", False)]
        assert b.num_asked == 1


async def test_a_place_that_cannot_be_asked_is_taken_over() -> None:
    async with bench() as b:
        b.encoders[0].elsewhere = "an encoder of another network"
        await resolved(b)
        assert b.found == [(b.items[0].key, b.encoders[0].hello.instance_id, True)]
        assert [encoder.take_over for encoder in b.encoders[0].requests] == [False, True]  # type: ignore[union-attr]


async def test_what_redis_could_not_give_is_encoded_whatever_it_says() -> None:
    async with bench() as b:
        b.encoders[0].elsewhere = "redis"
        await resolved(b, failed_source="redis")
        assert b.found == [(b.items[0].key, b.encoders[0].hello.instance_id, True)]


async def test_the_encoder_at_work_that_dies_is_taken_over_and_a_full_one_is_not() -> None:
    async with bench(3) as b:
        b.cache.in_work = {b.items[0].key: b.encoders[2].hello.instance_id}
        b.encoders[2].answer = lambda encoder, asked: EncoderUnavailable("gone")
        b.encoders[0].answer = lambda encoder, asked: Overloaded("full")
        await resolved(b)
        assert [source for _, source, _ in b.found] == [b.encoders[1].hello.instance_id]
        assert [encoder.requests[0].take_over for encoder in b.encoders] == [True, True, False]  # type: ignore[union-attr]
    async with bench(2) as b:
        b.encoders[0].answer = lambda encoder, asked: Overloaded("full")
        await resolved(b)
        assert not b.encoders[1].requests[0].take_over  # type: ignore[union-attr]


async def test_an_encoder_that_dies_at_work_is_replaced() -> None:
    async with bench() as b:
        b.encoders[0].is_deaf = True
        async with background(resolved(b)):
            await eventually(lambda: b.encoders[0].requests)
            b.encoders[0].close()
            await eventually(lambda: b.found)
        assert b.found == [(b.items[0].key, b.encoders[1].hello.instance_id, True)]
        b.encoders[0].is_deaf = False


async def test_media_that_cannot_be_encoded_is_the_client_s_error_at_once_and_names_the_item() -> None:
    async with bench() as b:
        b.fail(UnsupportedMedia("truncated"))
        error = await error_of(b, (2,))
        assert (type(error), error.param) == (UnsupportedMedia, "messages[0].content[2]")
        assert b.num_asked == 1


async def test_a_failure_of_the_model_is_not_tried_elsewhere() -> None:
    async with bench() as b:
        b.fail(ModelFailure("not finite"))
        assert type(await error_of(b)) is ModelFailure
        assert b.num_asked == 1


async def test_encoders_that_stay_overloaded_end_as_503_and_never_as_500() -> None:
    """DIS-18: each request is served or told to come again."""
    async with bench() as b:
        b.fail(Overloaded("full"))
        error = await error_of(b)
        assert error_info(error).http_status == 503
        assert error.param == "messages[0].content[0]"
        assert b.num_asked == MAX_TRIES


async def test_an_item_that_costs_encoder_after_encoder_is_given_up() -> None:
    async with bench() as b:
        b.fail(EncoderUnavailable("the encoder went away while it worked on an item"))
        assert type(await error_of(b)) is EncoderUnavailable
        assert b.num_asked == MAX_LOST


async def test_an_encoder_that_is_overloaded_for_a_moment_is_asked_again() -> None:
    async with bench(1) as b:
        b.fail(Overloaded("full"), times=MAX_TRIES - 1)
        await resolved(b)
        assert [source for _, source, _ in b.found] == ["e0"]


async def test_an_item_that_no_decoder_can_fetch_ends() -> None:
    async with bench(1) as b:
        for _ in range(MAX_TRIES):
            await resolved(b, failed_source="e0")
        assert type(await error_of(b)) is EncoderUnavailable


async def test_a_deadline_that_has_passed_is_not_tried_elsewhere() -> None:
    async with bench(deadline_s=0.0) as b:
        b.fail(DeadlineExceeded("no time left"))
        assert type(await error_of(b)) is DeadlineExceeded
        assert b.num_asked == 1


async def test_without_encoders_an_item_waits_and_is_then_refused_with_a_time_to_come_again() -> None:
    async with bench(0, deadline_s=0.1) as b:
        error = await error_of(b)
        assert type(error) is EncoderUnavailable
        assert error.retry_after_s is not None
        assert error.param == "messages[0].content[0]"


async def test_the_wait_for_an_encoder_is_limited() -> None:
    async with bench(0, encoder_wait_s=0.1) as b:
        assert type(await error_of(b)) is EncoderUnavailable


async def test_without_encoders_cached_items_still_come() -> None:
    async with bench(0) as b:
        b.cache.keys = {one.key for one in b.items}
        await resolved(b, (0, 1, 2))
        assert len(b.found) == 3


async def test_an_item_that_is_asked_for_twice_in_one_message_is_encoded_once() -> None:
    async with bench(1, has_cache=False) as b:
        await resolved(b, (0, 0))
        assert b.found == [(b.items[0].key, "e0", True)]
        assert b.num_asked == 1


async def test_unknown_keys_are_ignored() -> None:
    async with bench(1) as b:
        await b.resolver.resolve(["9" * 64], None)
        assert b.found == []


async def test_leases_are_released_where_they_were_taken() -> None:
    async with bench() as b:
        await resolved(b)
        users = {name: peer.users for name, peer in b.resolver._encoders.ready().items() if peer.users}
        assert users == {"e0": {"r1"}}
        b.resolver.release()
        b.resolver.release()
        assert users == {"e0": set()}
        await eventually(lambda: b.encoders[0].controls)
        assert b.encoders[0].controls == [Release(request_id="r1")]
        assert b.encoders[1].controls == []


async def test_a_request_that_ends_cancels_what_is_at_work() -> None:
    async with bench() as b:
        b.encoders[0].is_deaf = True
        async with background(resolved(b)):
            await eventually(lambda: b.encoders[0].requests)
        await eventually(lambda: b.encoders[0].controls == [Cancel(request_id="r1")])


async def test_an_item_that_was_held_already_counts_as_cached() -> None:
    async with bench(1) as b:
        b.encoders[0].is_deaf = True
        async with background(resolved(b)):
            await eventually(lambda: b.encoders[0].requests)
            b.encoders[0].reply(0, was_held=True)
            await eventually(lambda: b.found)
        assert b.found == [(b.items[0].key, "e0", False)]
