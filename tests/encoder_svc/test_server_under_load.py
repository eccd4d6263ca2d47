"""Whole encoders with many items at once: hundreds in one request, one picture through every door, fair batches."""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.embedding_cache import EmbeddingCache
from common.members import Member
from common.messages import EncodeReply, MediaOptions, Release
from encoder_svc.__main__ import _load, _Loaded
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem
from gateway_svc.media.item import LoadedMedia
from gateway_svc.media.store import MediaStore
from gateway_svc.routing.encoder_pool import EncoderPool
from gateway_svc.routing.media_resolver import MediaResolver
from gateway_svc.routing.placement import rendezvous_order
from tests.common.sockets import background, eventually, hello, zmq_context
from tests.encoder_svc.embeddings import key
from tests.encoder_svc.test_server import GRID, PICTURE, Bench, encoder, settings
from tests.media_samples import png
from tests.servable import save_servable
from tests.valkey import running_valkey

NUM_IMAGES = 500
BROKEN = 321


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> _Loaded:
    folder, _ = save_servable(tmp_path_factory.mktemp("model"))
    return _load(settings(folder))


def note_forwards(bench: Bench) -> list[list[str]]:
    """The keys of each forward from now on."""
    forwards: list[list[str]] = []
    run = bench.parts.runner.run

    async def noting(items: Sequence[TowerItem], on_computed: Callable[[], None]) -> list[HeldEmbedding]:
        forwards.append([item.key for item in items])
        return await run(items, on_computed)

    bench.parts.runner.run = noting  # type: ignore[method-assign]
    return forwards


async def test_five_hundred_images_of_one_request_with_one_broken(loaded: _Loaded, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_patches_per_batch": 1024, "max_items_per_batch": 64}
    async with encoder(loaded, tmp_path, **limits) as bench:
        forwards = note_forwards(bench)
        prepared, picture = 0, png(128, 128)
        for number in range(NUM_IMAGES):
            source = picture if number != BROKEN else picture[:400]
            bench.data.send(bench.request(number, expected_grid=(1, 8, 8)), source)

        def is_answered() -> bool:
            nonlocal prepared
            prepared = max(prepared, sum(gate.inside for gate in bench.parts.pipeline._gates.values()))
            return len(bench.arrived) >= NUM_IMAGES and len(replies()) == NUM_IMAGES

        def replies() -> list[EncodeReply]:
            return [one.message for one in bench.arrived if isinstance(one.message, EncodeReply)]

        await eventually(is_answered, timeout_s=120)
        failed = [reply for reply in replies() if reply.error is not None]
        assert [reply.key for reply in failed] == [key(BROKEN)]
        assert failed[0].error is not None
        assert failed[0].error.code == "unsupported_media"
        assert {reply.key for reply in replies()} == {key(number) for number in range(NUM_IMAGES)}
        assert prepared <= 2 * 1024  # pixels are not read in further ahead than the tower needs
        assert sorted(name for forward in forwards for name in forward) == sorted(
            key(number) for number in range(NUM_IMAGES) if number != BROKEN
        )
        assert bench.parts.store.num_leases == NUM_IMAGES - 1
        bench.control.send(Release(request_id="r1"))
        await eventually(lambda: bench.parts.store.num_leases == 0)
        await bench.assert_nothing_is_left()


async def test_pictures_that_arrive_together_run_in_full_batches(loaded: _Loaded, tmp_path: Path) -> None:
    """64 pictures of 224x224 need at most `64 * patches / max_patches_per_batch + 2` forwards."""
    patches, most = 14 * 14, 2048
    async with encoder(loaded, tmp_path, max_patches_per_batch=most) as bench:
        await bench.encode(1000)  # the rate is known
        forwards = note_forwards(bench)
        picture = png(224, 224)
        for number in range(64):
            request = bench.request(number, expected_grid=(1, 14, 14), options=MediaOptions(max_pixels=1 << 20))
            bench.data.send(request, picture)
        replies = [await bench.answer(EncodeReply) for _ in range(64)]
        assert all(reply.error is None for reply in replies)
        assert len(forwards) <= 64 * patches / most + 2


@contextlib.asynccontextmanager
async def gateway_to(benches: Sequence[Bench]) -> AsyncIterator[EncoderPool]:
    """A gateway's connections to some encoders."""
    with zmq_context() as context:
        pool = EncoderPool(
            context,
            lambda: hello("gateway", "g"),
            keys=None,
            on_change=lambda: None,
        )
        pool.set_members([Member((one.parts.control.endpoint, one.parts.data.endpoint)) for one in benches])
        async with background(pool.run()):
            await eventually(lambda: len(pool.ready()) == len(benches))
            yield pool


async def test_one_picture_for_64_requests_of_two_gateways_and_two_encoders_is_encoded_once(
    loaded: _Loaded, tmp_path: Path
) -> None:
    """Staggered over 50 ms, with the backlog of one encoder full, so that gateways choose differently."""
    owned_by_the_full_one = next(n for n in range(100) if rendezvous_order(key(n), ["a", "b"])[0] == "a")
    picture = LoadedMedia(
        key=key(owned_by_the_full_one),
        modality="image",
        options=MediaOptions(),
        grid=GRID,
        source=MediaStore().hold(PICTURE),
        param="messages[0].content[0]",
    )
    a, b = (dataclasses.replace(loaded, hello=msgspec.structs.replace(loaded.hello, instance_id=n)) for n in "ab")
    async with (
        running_valkey() as server,
        encoder(a, tmp_path, redis=server.url, cache_wait_s=1.0, max_queued_patches=100) as full,
        encoder(b, tmp_path, redis=server.url, cache_wait_s=1.0) as free,
        gateway_to([full, free]) as first,
        gateway_to([full, free]) as second,
    ):
        forwards = [note_forwards(bench) for bench in (full, free)]
        gate = asyncio.Event()
        hold(full, gate)
        full.data.send(full.request(1000), PICTURE)  # 80 of its 100 patches
        await eventually(lambda: full.parts.pipeline.queued_patches == 80)
        caches = [EmbeddingCache.connect(server.url, ttl_s=100, wait_s=1.0) for _ in range(2)]
        sources: list[str] = []

        async def ask(number: int) -> None:
            await asyncio.sleep(number * 0.05 / 64)
            resolver = MediaResolver(
                f"request-{number}",
                [picture],
                fingerprint=full.fingerprint,
                wire_dtype=loaded.hello.wire_dtype,
                encoders=(first, second)[number % 2],
                cache=caches[number % 2],
                deadline=time.monotonic() + 30,
                encoder_wait_s=5.0,
                on_found=lambda item, source, was_encoded: sources.append(source),
            )
            await resolver.resolve([picture.key], None)

        try:
            await asyncio.gather(*(ask(number) for number in range(64)))
        finally:
            gate.set()  # else the full encoder would never be done
        assert len(sources) == 64
        assert set(sources) <= {"b", "redis"}
        encoded = Counter(name for one in forwards for forward in one for name in forward)
        assert encoded[picture.key] == 1
        for cache in caches:
            await cache.close()


def hold(bench: Bench, gate: asyncio.Event) -> None:
    """Keep an encoder's forwards from beginning until the gate opens."""
    run = bench.parts.runner.run

    async def later(items: Sequence[TowerItem], on_computed: Callable[[], None]) -> list[HeldEmbedding]:
        await gate.wait()
        return await run(items, on_computed)

    bench.parts.runner.run = later  # type: ignore[method-assign]
