"""Source bytes that are counted, moved to files without names when memory is short, and gone with their last holder."""

import asyncio
import base64
import gc
import os
from pathlib import Path

import pytest

from common.errors import Overloaded
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.media.store import MIN_SPOOLED_BYTES, MediaStore
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text.conversation import conversation_of
from tests.gateway_svc.fake_backend import FakeBackend, harness
from tests.media_samples import png

DATA = os.urandom(MIN_SPOOLED_BYTES)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def store_in(folder: Path, max_memory_bytes: int = len(DATA)) -> MediaStore:
    return MediaStore(max_bytes=4 * len(DATA), max_memory_bytes=max_memory_bytes, folder=folder)


async def test_what_memory_has_no_room_for_lies_in_a_file_until_nobody_holds_it(tmp_path: Path) -> None:
    store, before = store_in(tmp_path), open_files()
    first, second = store.hold(DATA), store.hold(DATA[::-1])
    await store.settle(second)
    await store.settle(first)
    assert (first.is_on_disk, second.is_on_disk) == (False, True)
    assert await first.read() == DATA
    assert await second.read() == await second.read() == DATA[::-1]
    assert (store.budget.num_bytes, store.budget.num_memory_bytes) == (2 * len(DATA), len(DATA))
    assert open_files() == before + 1
    assert os.listdir(tmp_path) == [], "a file with a name would outlive a process that is killed"
    del second
    assert open_files() == before
    assert (store.budget.num_bytes, store.budget.num_memory_bytes) == (len(DATA), len(DATA))


async def test_small_items_stay_in_memory(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_memory_bytes=0)
    source = store.hold(DATA[1:])
    await store.settle(source)
    assert not source.is_on_disk


async def test_memory_and_files_together_are_bounded(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_memory_bytes=0)
    held = [store.hold(DATA) for _ in range(4)]
    for source in held:
        await store.settle(source)
    with pytest.raises(Overloaded, match="media of all requests"):
        store.hold(DATA)
    del source
    held.pop()
    gc.collect()
    store.hold(DATA)


async def test_two_requests_that_share_an_item_share_its_file(tmp_path: Path) -> None:
    store, before = store_in(tmp_path, max_memory_bytes=0), open_files()
    source = store.hold(DATA)
    await asyncio.gather(*(source.move_to_disk(tmp_path) for _ in range(8)))
    assert open_files() == before + 1
    assert store.budget.num_memory_bytes == 0


async def test_a_disk_that_takes_nothing_is_an_overload_and_keeps_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path / "absent", max_memory_bytes=0)
    source = store.hold(DATA)
    with pytest.raises(Overloaded, match="no room"):
        await store.settle(source)
    assert await source.read() == DATA


async def test_a_full_disk_leaves_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    store, before = store_in(tmp_path, max_memory_bytes=0), open_files()
    source = store.hold(DATA)
    with monkeypatch.context() as patch:
        patch.setattr("gateway_svc.media.store.os.write", full)
        with pytest.raises(Overloaded):
            await store.settle(source)
    assert open_files() == before


async def test_a_request_that_leaves_while_its_file_is_written_leaves_no_file(tmp_path: Path) -> None:
    store, before = store_in(tmp_path, max_memory_bytes=0), open_files()
    for _ in range(20):
        moving = asyncio.create_task(store.settle(store.hold(DATA)))
        await asyncio.sleep(0)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
    await asyncio.get_running_loop().shutdown_default_executor()
    del moving
    assert open_files() == before
    assert store.budget.num_bytes == 0


def test_the_text_of_a_data_uri_is_not_held_beside_its_bytes() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": [part, {**part, "image_url": "https://x/y"}]}]}
    )
    _, references = conversation_of(request, ())
    assert [reference.url for reference in references] == ["data:image/png;base64,AAAA", "https://x/y"]
    assert "AAAA" not in str(request)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_request_is_answered_from_files_and_leaves_nothing_behind(tmp_path: Path, is_refused: bool) -> None:
    picture = png(64, 64) + bytes(MIN_SPOOLED_BYTES)
    store, before = store_in(tmp_path, max_memory_bytes=0), open_files()
    setup = harness(FakeBackend(), fetcher=MediaFetcher(FetchLimits(), store=store))
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}] * 2
    if is_refused:
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    response = await setup.chat(messages=[{"role": "user", "content": parts}])
    assert response.status_code == (400 if is_refused else 200)
    if not is_refused:
        (media,) = setup.backend.media
        assert [await item.source.read() for item in media] == [picture, picture]
        assert store.budget.num_memory_bytes == 0
        assert open_files() == before + 2
        del media
    setup.backend.media.clear()
    await asyncio.sleep(0)
    assert open_files() == before
    assert store.budget.num_bytes == 0
