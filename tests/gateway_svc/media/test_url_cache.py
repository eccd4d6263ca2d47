"""What is remembered of URLs: HTTP's rules, the bound, and a loader that downloads only what is needed."""

import asyncio
import gc
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.errors import ConfigError, InvalidRequest, MediaFetchFailed, MediaTooLarge, Overloaded
from common.messages import MediaOptions
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.media.folder import MediaFolder
from gateway_svc.media.item import LoadedMedia, MediaReference
from gateway_svc.media.loader import MediaLimits, MediaLoader
from gateway_svc.media.url_cache import Freshness, UrlCache, freshness_of
from tests.gateway_svc.fake_backend import CONFIG, FakeBackend
from tests.gateway_svc.media_host import MediaHost, media_host


@pytest.mark.parametrize(
    ("headers", "fresh_s", "etag"),
    [
        ({}, 0, None),
        ({"cache-control": "max-age=60"}, 60, None),
        ({"cache-control": "public, Max-Age=60 , immutable", "age": "20"}, 40, None),
        ({"cache-control": "max-age=60, s-maxage=5"}, 5, None),
        ({"cache-control": "max-age=60", "age": "100"}, 0, None),
        ({"cache-control": 'max-age="60"', "etag": '"a"'}, 60, '"a"'),
        ({"cache-control": "no-cache, max-age=60", "etag": 'W/"a"'}, 0, 'W/"a"'),
        ({"cache-control": "no-store, max-age=60", "etag": '"a"'}, 0, None),
        ({"cache-control": "private", "etag": '"a"'}, 0, None),
        ({"cache-control": "max-age=60", "vary": "*"}, 0, None),
        ({"cache-control": "max-age=-5"}, 0, None),
        ({"cache-control": "max-age=99999999999"}, 86_400, None),
        ({"cache-control": "max-age=" + "9" * 40}, 0, None),
        ({"etag": "x" * 1000}, 0, None),
        ({"etag": "a\r\nb"}, 0, None),
    ],
)
def test_an_answer_holds_as_long_as_its_headers_say(headers: dict[str, str], fresh_s: float, etag: str | None) -> None:
    freshness = freshness_of(headers)
    assert freshness == Freshness(fresh_s, etag)
    assert freshness.is_storable is bool(fresh_s or etag)


def test_the_number_of_urls_is_bounded_and_the_least_used_goes_first() -> None:
    cache = UrlCache(2)
    for name in "ab":
        cache.put(name, "k" + name, (1, 2, 2), None, Freshness(10.0), 0.0)
    assert cache.get("a") is not None
    cache.put("c", "kc", (1, 2, 2), None, Freshness(10.0), 0.0)
    assert (cache.get("b"), len(cache)) == (None, 2)
    known = cache.get("a")
    assert known is not None
    assert known.is_fresh(9.9)
    assert not known.is_fresh(10.0)
    cache.put("a", "ka", (1, 2, 2), None, Freshness(), 1.0)
    assert cache.get("a") is None, "its host does not allow it any more"


def picture(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(buffer, "PNG")
    return buffer.getvalue()


class Loading:
    """A loader and the host that it loads from."""

    def __init__(self, host: MediaHost) -> None:
        self.host = host
        host.file = picture("red")
        self.fetcher = MediaFetcher(FetchLimits(private_hosts=frozenset({"*"})))
        self.loader = MediaLoader(FakeBackend(), CONFIG, self.fetcher, MediaLimits())

    async def load(self, path: str, cache_salt: str | None = None) -> LoadedMedia:
        return (await self.loads([path], cache_salt))[0]

    async def loads(self, paths: list[str], cache_salt: str | None = None) -> Any:
        references = [MediaReference(self.host.url(path), "image", f"p{n}") for n, path in enumerate(paths)]
        options: Any = {"image": MediaOptions(), "video": MediaOptions()}
        return await self.loader.load(
            references, options, fingerprint="f" * 64, cache_salt=cache_salt, deadline=float("inf")
        )


async def test_a_fresh_url_is_known_without_a_request_and_its_bytes_come_when_they_are_needed() -> None:
    async with media_host() as host:
        loading = Loading(host)
        first = await loading.load("/fresh")
        again = await loading.load("/fresh")
        assert (again.key, again.grid, again.source.num_bytes) == (first.key, first.grid, 0)
        assert len(host.requests) == 1
        assert await again.source.read() == await again.source.read() == host.file
        assert len(host.requests) == 2
        salted = await loading.load("/fresh", cache_salt="tenant")
        assert salted.key != first.key, "what is known holds for what the key was made of"
        assert len(host.requests) == 3


async def test_a_tagged_url_is_confirmed_by_its_host_and_downloaded_anew_when_it_has_changed() -> None:
    async with media_host() as host:
        loading = Loading(host)
        red = await loading.load("/tagged")
        assert (await loading.load("/tagged")).key == red.key
        assert "if-none-match" in host.requests[1].lower()
        assert (await loading.load("/tagged")).source.num_bytes == 0, "the confirmation is remembered too"
        host.file = picture("blue")
        blue = await loading.load("/tagged")
        assert blue.key != red.key
        assert await blue.source.read() == host.file


async def test_a_file_that_changes_while_it_is_believed_fresh_is_an_error_that_another_try_mends() -> None:
    async with media_host() as host:
        loading = Loading(host)
        await loading.load("/fresh")
        stale = await loading.load("/fresh")
        host.file = picture("blue")
        with pytest.raises(Overloaded, match="has changed"):
            await stale.source.read()
        assert await (await loading.load("/fresh")).source.read() == host.file


async def test_a_url_without_a_promise_of_its_own_is_fetched_each_time() -> None:
    async with media_host() as host:
        loading = Loading(host)
        for count in (2, 4):
            assert await (await loading.load("/fresh-elsewhere")).source.read() == host.file
            assert len(host.requests) == count


async def test_one_picture_many_times_in_a_request_is_fetched_once_and_held_once() -> None:
    async with media_host() as host:
        loading = Loading(host)
        items = await loading.loads(["/tagged"] * 8)
        assert len(host.requests) == 1
        assert loading.fetcher.store.budget.num_bytes == len(host.file)
        del items
        await asyncio.sleep(0)  # until then the loop itself holds what it woke us with
        gc.collect()
        assert loading.fetcher.store.budget.num_bytes == 0


# The folder


def folder_of(tmp_path: Path) -> MediaFolder:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "good-link").symlink_to(folder / "sub" / "a b.png")
    return MediaFolder(folder)


def test_files_in_the_folder_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for url in ("sub/a%20b.png", "sub/../sub/a b.png", "good-link"):
        assert folder.read(f"file://{tmp_path}/media/{url}", 100, "p") == b"inside"
    assert folder.read(f"file://localhost{tmp_path}/media/good-link", 6, "p") == b"inside"


@pytest.mark.parametrize(
    "url",
    [
        "file://{0}/secret",
        "file://{0}/media/../secret",
        "file://{0}/media/%2e%2e/secret",
        "file://{0}/media/link",
        "file://{0}/media2/x",
        "file:///etc/passwd",
        "file://host{0}/media/good-link",
        "file:{0}/media/good-link?x",
        "file://{0}/media/a%00b",
        "file://{0}/media/%ff",
        "file:",
        "file://[",
    ],
)
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidRequest, match="p") as caught:
        folder_of(tmp_path).read(url.format(tmp_path), 100, "p")
    assert str(tmp_path) not in caught.value.message


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    os.mkfifo(tmp_path / "media" / "pipe")
    (tmp_path / "media" / "empty").write_bytes(b"")
    for name in ("none", "sub", "pipe", "empty"):
        with pytest.raises(MediaFetchFailed):
            folder.read(f"file://{tmp_path}/media/{name}", 100, "p")
    with pytest.raises(MediaTooLarge, match="limit of 5"):
        folder.read(f"file://{tmp_path}/media/good-link", 5, "p")
    with pytest.raises(ConfigError):
        MediaFolder(tmp_path / "none")


async def test_file_urls_need_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / "media" / "red.png").write_bytes(picture("red"))
    reference = MediaReference(f"file://{tmp_path}/media/red.png", "image", "p")
    options: Any = {"image": MediaOptions()}
    for given in (folder, None):
        loader = MediaLoader(FakeBackend(), CONFIG, MediaFetcher(FetchLimits()), MediaLimits(), given)
        loading = loader.load([reference], options, fingerprint="f" * 64, cache_salt=None, deadline=1e9)
        if given is None:
            with pytest.raises(InvalidRequest, match="neither a data URI"):
                await loading
        else:
            assert await (await loading)[0].source.read() == picture("red")
