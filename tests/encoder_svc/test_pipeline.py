"""The pipeline around a fake tower: single flight, cancelling, bad items, overload, and a cache that delays no one."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from common.embedding import ExpectedEmbedding
from common.errors import InvalidRequest, ModelFailure, Overloaded, UnsupportedMedia
from common.messages import EmbeddingHeader, EncodeRequest
from encoder_svc.batch_loop import BatchLimits
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.fleet_share import FleetShare
from encoder_svc.media_reader import MediaReader
from encoder_svc.pipeline import MAX_PROBES, VIDEO_NICENESS, Encoded, EncodePipeline, QueueLimits
from encoder_svc.preprocess import PreparedMedia
from encoder_svc.runner import TowerItem
from encoder_svc.video_source import VideoLimits
from tests.common.sockets import background, eventually
from tests.encoder_svc.embeddings import FINGERPRINT, held, key
from tests.media_samples import DEMO_PROCESSOR, flat_frames, png, video_file

GRID = (1, 8, 8)
PATCHES = 64
PICTURE = png(128, 128)


@dataclass
class FakeRunner:
    """Waits until it is let go, then answers each item with random bytes, or fails as it is told."""

    batches: list[list[str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fails_on: Callable[[Sequence[TowerItem]], Exception | None] = lambda items: None
    patches_per_s: float = 100.0
    max_in_flight: int = 1
    is_broken: bool = False
    num_bytes: int = 1024
    is_closed: bool = False

    async def run(self, items: Sequence[TowerItem], on_computed: Callable[[], None]) -> list[HeldEmbedding]:
        self.batches.append([item.key for item in items])
        await self.gate.wait()
        if (error := self.fails_on(items)) is not None:
            raise error
        return [held(int(item.key, 16), self.num_bytes, grid=item.grid) for item in items]

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeCache:
    """Keeps what it is given, when it is let to, and the claims. `place` is where it says that items are."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    stored: list[str] = field(default_factory=list)
    claims: set[str] = field(default_factory=set)
    place: str | None = None
    claim_gate: asyncio.Event | None = None

    async def claim(self, expected: ExpectedEmbedding, owner: str, *, take_over: bool) -> str | None:
        if self.claim_gate is not None:
            await self.claim_gate.wait()
        if self.place is not None and not take_over:
            return self.place
        self.claims.add(expected.key)
        return None

    async def renew_claims(self, keys: Sequence[str], owner: str) -> None:
        assert set(keys) <= self.claims

    async def end_claim(self, key: str) -> None:
        self.claims.discard(key)

    async def put(self, header: EmbeddingHeader, payload: memoryview) -> bool:
        await self.gate.wait()
        self.stored.append(header.key)
        return True


@dataclass
class Bench:
    """A running pipeline and its parts."""

    pipeline: EncodePipeline
    runner: FakeRunner
    store: EmbeddingStore
    cache: FakeCache

    def start(self, number: int, request_id: str = "", **fields: Any) -> "asyncio.Task[Any]":
        """An encode in a task of its own."""
        source = fields.pop("source", PICTURE)
        return asyncio.create_task(
            self.pipeline.encode(request(number, request_id or f"r{number}", **fields), memoryview(source))
        )

    def assert_idle(self) -> None:
        """Nothing is in work, and nothing is counted as if it were."""
        assert self.pipeline.num_in_flight == 0
        assert self.pipeline.queued_patches == 0


def request(number: int, request_id: str, **fields: Any) -> EncodeRequest:
    base: dict[str, Any] = {
        "request_id": request_id,
        "key": key(number),
        "modality": "image",
        "expected_grid": GRID,
        "fingerprint": FINGERPRINT,
        "time_left_s": 30.0,
    }
    return EncodeRequest(**{**base, **fields})


@contextlib.asynccontextmanager
async def running(
    *, budget_bytes: int = 1 << 20, cache_queue_items: int = 64, is_open: bool = True, **changes: Any
) -> AsyncIterator[Bench]:
    runner, store, cache = FakeRunner(), EmbeddingStore(budget_bytes, 60.0), FakeCache()
    if is_open:
        runner.gate.set()
        cache.gate.set()
    limits: dict[str, Any] = {"max_patches": 4096, "max_items": 8, "max_slice_patches": 4096, "max_wait_s": 0.0}
    limits.update({name: changes.pop(name) for name in limits if name in changes})
    queue_limits = QueueLimits(changes.pop("max_queued_patches", 1 << 20), changes.pop("max_queued_bytes", 1 << 24))
    pipeline = EncodePipeline(
        prepare=MediaReader(DEMO_PROCESSOR, max_canvas_pixels=1 << 24, video_limits=VideoLimits()).prepare,
        runner=runner,  # type: ignore[arg-type]
        store=store,
        share=FleetShare(cache, store, "e1", max_queued_items=cache_queue_items),  # type: ignore[arg-type]
        expected_of=lambda name, grid: ExpectedEmbedding(name, grid, FINGERPRINT),
        bytes_of=lambda grid: runner.num_bytes,
        batch_limits=BatchLimits(**limits),
        queue_limits=queue_limits,
        preprocess_threads=2,
        **changes,
    )
    async with background(pipeline.run()):
        yield Bench(pipeline, runner, store, cache)
    pipeline.close()
    assert runner.is_closed


async def test_an_item_is_held_and_leased_and_offered_to_the_cache() -> None:
    async with running() as bench:
        encoded = await bench.start(1)
        assert not encoded.was_held
        assert encoded.times.preprocess_s > 0
        assert bench.store.num_leases == 1
        assert await bench.start(1, "again") == Encoded(was_held=True)
        assert bench.runner.batches == [[key(1)]]
        await eventually(lambda: bench.cache.stored == [key(1)])
        bench.assert_idle()


async def test_sixteen_requests_for_one_item_run_it_once() -> None:
    async with running(is_open=False) as bench:
        tasks = [bench.start(1, f"r{index}") for index in range(16)]
        await eventually(lambda: bench.runner.batches)
        bench.runner.gate.set()
        await asyncio.gather(*tasks)
        assert bench.runner.batches == [[key(1)]]
        assert bench.store.num_leases == 16
        bench.cache.gate.set()
        await bench.pipeline.drained()
        for index in range(16):
            bench.store.release(f"r{index}")
        assert bench.store.leased_bytes == 0
        bench.assert_idle()


async def test_cancelling_the_first_leaves_the_other_fifteen() -> None:
    async with running(is_open=False) as bench:
        tasks = [bench.start(1, f"r{index}") for index in range(16)]
        await eventually(lambda: bench.runner.batches)
        tasks[0].cancel()
        bench.runner.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(not isinstance(result, BaseException) for result in results[1:])
        assert bench.store.num_leases == 15
        assert bench.runner.batches == [[key(1)]]


async def test_work_that_nobody_waits_for_stops_and_is_forgotten() -> None:
    async with running(is_open=False) as bench:
        first = bench.start(0)  # keeps the tower busy
        await eventually(lambda: bench.runner.batches)
        tasks = [bench.start(1, f"r{index}") for index in range(3)]
        await eventually(lambda: bench.pipeline.queued_patches == 2 * PATCHES)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await eventually(lambda: bench.pipeline.queued_patches == PATCHES)
        bench.runner.gate.set()
        await first
        last = bench.start(2)
        await last
        assert bench.runner.batches == [[key(0)], [key(2)]]
        bench.assert_idle()


async def test_a_request_that_comes_as_the_last_one_leaves_is_served() -> None:
    async with running(is_open=False) as bench:
        leaving = bench.start(1, "leaves")
        await eventually(lambda: bench.runner.batches)
        leaving.cancel()
        await asyncio.sleep(0)  # the cancellation is on its way
        coming = bench.start(1, "comes")
        bench.runner.gate.set()
        assert not (await coming).was_held
        assert bench.store.num_leases == 1
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await eventually(lambda: bench.pipeline.queued_patches == 0)


async def test_a_deadline_that_passes_stops_the_work() -> None:
    async with running(is_open=False) as bench:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bench.start(1)
        await eventually(lambda: bench.pipeline.num_in_flight == 0)
        bench.runner.gate.set()
        await bench.start(2)
        assert bench.store.get(key(1)) is None
        bench.assert_idle()


async def test_one_request_that_asks_twice_and_leaves_once_still_waits() -> None:
    async with running(is_open=False) as bench:
        first, second = bench.start(1, "r"), bench.start(1, "r")
        await eventually(lambda: bench.runner.batches)
        first.cancel()
        await asyncio.wait({first})
        bench.runner.gate.set()
        assert not (await second).was_held
        assert bench.store.num_leases == 1


async def test_items_that_arrive_while_the_tower_works_share_the_next_batch() -> None:
    async with running(is_open=False, max_items=3) as bench:
        first = bench.start(0)
        await eventually(lambda: bench.runner.batches)
        tasks = [bench.start(number) for number in range(1, 6)]
        await eventually(lambda: bench.pipeline.batches.num_waiting == 5)
        bench.runner.gate.set()
        await asyncio.gather(first, *tasks)
        assert [len(batch) for batch in bench.runner.batches] == [1, 3, 2]


async def test_a_bad_item_fails_alone() -> None:
    """DIS-19: one truncated picture among good ones."""
    async with running() as bench:
        tasks = [bench.start(number) for number in range(7)]
        bad = bench.start(7, source=PICTURE[: len(PICTURE) // 2])
        results = await asyncio.gather(*tasks, bad, return_exceptions=True)
        assert isinstance(results[-1], UnsupportedMedia)
        assert all(not isinstance(result, BaseException) for result in results[:-1])
        bench.assert_idle()


@pytest.mark.parametrize("error", [ModelFailure("not finite"), RuntimeError("a kernel failed")])
async def test_an_item_that_makes_the_forward_fail_fails_alone(error: Exception) -> None:
    async with running(is_open=False) as bench:
        bench.runner.fails_on = lambda items: error if any(item.key == key(3) for item in items) else None
        first = bench.start(0)
        await eventually(lambda: bench.runner.batches)
        tasks = [bench.start(number) for number in range(1, 8)]
        await eventually(lambda: bench.pipeline.batches.num_waiting == 7)
        bench.runner.gate.set()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        failed = [index for index, result in enumerate(results) if isinstance(result, BaseException)]
        assert failed == [3]
        assert isinstance(results[3], ModelFailure)
        assert bench.store.num_leases == 7
        await bench.start(9)
        bench.assert_idle()


async def test_a_grid_that_the_header_did_not_promise_is_refused() -> None:
    async with running() as bench:
        with pytest.raises(InvalidRequest, match=r"grid \(1, 8, 8\), its header promised \(1, 8, 10\)"):
            await bench.start(1, expected_grid=(1, 8, 10))
        bench.assert_idle()


async def test_a_video_is_encoded_like_a_picture() -> None:
    async with running() as bench:
        source = video_file(flat_frames(8, 64, 64))
        assert not (await bench.start(1, modality="video", expected_grid=(2, 4, 4), source=source)).was_held


async def test_more_patches_than_the_queue_takes_are_refused_as_overload() -> None:
    async with running(is_open=False, max_queued_patches=2 * PATCHES) as bench:
        tasks = [bench.start(number) for number in range(2)]
        await eventually(lambda: bench.runner.batches)
        with pytest.raises(Overloaded, match=r"128 patches wait .* the limit is 128") as caught:
            await bench.start(2)
        assert caught.value.retry_after_s == 128 / 100
        joined = bench.start(1, "joins what is in work already")
        bench.runner.gate.set()
        await asyncio.gather(*tasks, joined)
        await bench.start(2)
        bench.assert_idle()


async def test_an_item_larger_than_the_whole_queue_is_taken_when_it_is_alone() -> None:
    async with running(max_queued_patches=1) as bench:
        assert not (await bench.start(1)).was_held


async def test_a_store_full_of_leases_refuses_and_recovers() -> None:
    async with running(budget_bytes=1024) as bench:
        await bench.start(1)
        with pytest.raises(Overloaded, match="requests still need"):
            await bench.start(2)
        bench.store.release("r1")
        await bench.start(2)
        bench.assert_idle()


async def test_a_store_full_of_what_is_coming_says_when_it_will_have_come() -> None:
    async with running(is_open=False, budget_bytes=2048) as bench:
        tasks = [bench.start(number) for number in range(2)]
        await eventually(lambda: bench.runner.batches)
        with pytest.raises(Overloaded, match="requests still need") as caught:
            await bench.start(2)
        assert caught.value.retry_after_s == 2 * PATCHES / 100
        bench.runner.gate.set()
        await asyncio.gather(*tasks)


async def test_items_of_one_batch_do_not_evict_each_other_before_they_are_leased() -> None:
    async with running(is_open=False, budget_bytes=3072) as bench:
        first = bench.start(0)
        await eventually(lambda: bench.runner.batches)
        tasks = [bench.start(number) for number in (1, 2)]
        await eventually(lambda: bench.pipeline.batches.num_waiting == 2)
        bench.runner.gate.set()
        await first
        bench.store.release("r0")
        await asyncio.gather(*tasks)
        bench.cache.gate.set()
        await bench.pipeline.drained()
        await bench.start(3)
        assert all(bench.store.get(key(number)) is not None for number in (1, 2, 3))
        assert bench.store.num_leases == 3


async def test_a_slow_cache_delays_no_answer_and_a_full_queue_drops_the_write() -> None:
    async with running(cache_queue_items=2) as bench:
        bench.cache.gate.clear()
        for number in range(5):
            await bench.start(number)
        assert bench.cache.stored == []
        bench.cache.gate.set()
        await bench.pipeline.drained()
        assert bench.cache.stored == [key(0), key(1), key(2)]


async def test_draining_waits_for_the_work_and_the_cache() -> None:
    async with running(is_open=False) as bench:
        task = bench.start(1)
        await eventually(lambda: bench.runner.batches)
        drained = asyncio.create_task(bench.pipeline.drained())
        bench.runner.gate.set()
        await task
        assert not drained.done()
        bench.cache.gate.set()
        await drained
        assert bench.cache.stored == [key(1)]


async def test_videos_that_take_long_hold_up_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    async with running() as bench:
        prepare = bench.pipeline._prepare

        def slow_for_videos(
            request: EncodeRequest, source: memoryview, is_unwanted: Callable[[], bool]
        ) -> PreparedMedia:
            if request.modality == "video":
                is_over.wait(30)
            return prepare(msgspec.structs.replace(request, modality="image"), source, is_unwanted)

        monkeypatch.setattr(bench.pipeline, "_prepare", slow_for_videos)
        videos = [bench.start(number, modality="video") for number in range(3)]
        async with asyncio.timeout(10):
            await bench.start(9)
        assert not any(video.done() for video in videos)
        is_over.set()
        await asyncio.gather(*videos)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
async def test_reading_videos_gives_way_to_forwards_and_images() -> None:
    async with running() as bench:
        niceness = {
            name: pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
            for name, pool in bench.pipeline._pools.items()
        }
        assert niceness["video"] - niceness["image"] == VIDEO_NICENESS


async def test_too_many_waiting_probes_are_refused_and_count_no_more_afterwards() -> None:
    is_over = threading.Event()
    async with running() as bench:
        probes = [asyncio.create_task(bench.pipeline.probe(lambda _: is_over.wait(30))) for _ in range(MAX_PROBES)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.pipeline.probe(lambda _: True)
        is_over.set()
        assert await asyncio.gather(*probes) == [True] * MAX_PROBES
        assert await bench.pipeline.probe(lambda _: "read") == "read"
