"""Loads the media of one request: bytes, key, grid, and for a video what an encoder's probe tells.

Owns the limits on number and size of items, the bound on fetches that run together, and what is remembered of URLs: a
file that its host still vouches for is downloaded only when an encoder needs it. Hashing and header reading of large
items leave the event loop. No pixel is decoded here, and nothing is known of prompts or HTTP responses.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from common.errors import InvalidRequest, MediaTooLarge, Overloaded, TandemError
from common.image_header import DEFAULT_MAX_CANVAS_PIXELS, read_image_header
from common.media_key import media_key
from common.messages import Grid, MediaOptions, Modality, VideoFacts
from common.metrics import Counter
from common.processor_config import ProcessorConfig
from common.vision_grid import image_grid
from gateway_svc.backend import Backend
from gateway_svc.media.data_uri import decode_data_uri
from gateway_svc.media.fetch import MediaFetcher
from gateway_svc.media.folder import MediaFolder
from gateway_svc.media.item import LoadedMedia, MediaReference, naming
from gateway_svc.media.store import HeldSource
from gateway_svc.media.url_cache import KnownMedia, UrlCache

URL_LOOKUPS = Counter("tandem_gateway_media_urls_total", "Media URLs by whether the file was known", ["outcome"])
# Below this, hashing (about 1 GB/s) takes less time than a thread's start.
LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's `detail: low` is a picture of that size
_INLINE_BYTES = 64 << 10


@dataclass(frozen=True)
class MediaLimits:
    """Bounds of one request's media. `max_items` is `--limit-mm-per-prompt`; an absent modality has no limit."""

    max_items: Mapping[Modality, int] = field(default_factory=dict)
    max_item_bytes: int = 100 << 20
    max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS
    max_request_bytes: int = 512 << 20
    max_request_pixels: int = 1 << 30
    max_concurrent_fetches: int = 16
    max_known_urls: int = 10_000


class _Totals:
    """Bytes and pixels of one request's media, as they become known."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._num_bytes = 0
        self._num_pixels = 0

    def add(self, num_bytes: int, num_pixels: int) -> None:
        """Count an item in. Raises MediaTooLarge when the request has too much of either."""
        limits = self._limits
        self._num_bytes += num_bytes
        self._num_pixels += num_pixels
        if self._num_bytes > limits.max_request_bytes:
            raise MediaTooLarge(
                f"the request's media have more than the limit of {limits.max_request_bytes} bytes in all: send fewer"
            )
        if self._num_pixels > limits.max_request_pixels:
            raise MediaTooLarge(
                f"the request's images have more than the limit of {limits.max_request_pixels} pixels in all: send "
                "fewer, or smaller ones"
            )


@dataclass(frozen=True)
class _Context:
    """What a media key depends on besides the bytes, the time there is, and what the request has already."""

    options: MediaOptions
    fingerprint: str
    cache_salt: str | None
    deadline: float
    totals: _Totals


class _LateSource:
    """Bytes of an item that was known by its URL: downloaded, once, if an encoder needs them."""

    def __init__(self, download: Callable[[], Awaitable[HeldSource]]) -> None:
        self._download = download
        self._held: HeldSource | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._held is None else self._held.num_bytes

    async def load(self) -> None:
        if self._held is None:
            self._held = await self._download()

    async def read(self) -> bytes:
        await self.load()
        assert self._held is not None
        return await self._held.read()


class MediaLoader:
    """Turns references into loaded media. One instance for the gateway."""

    def __init__(
        self,
        backend: Backend,
        config: ProcessorConfig,
        fetcher: MediaFetcher,
        limits: MediaLimits,
        folder: MediaFolder | None = None,
    ) -> None:
        """`folder` is where `file:` URLs may lead; without it they are refused."""
        self._backend = backend
        self._config = config
        self._fetcher = fetcher
        self._limits = limits
        self._folder = folder
        self._store = fetcher.store
        self._known = UrlCache(limits.max_known_urls)

    def check_counts(self, references: Sequence[MediaReference]) -> None:
        """Refuse a request with more items of a modality than the limit, before anything is loaded."""
        for modality, limit in self._limits.max_items.items():
            items = [reference for reference in references if reference.modality == modality]
            if len(items) > limit:
                raise InvalidRequest(
                    f"the request has {len(items)} {modality} items, above the limit of {limit}: send fewer",
                    param=items[limit].param,
                )

    async def load(
        self,
        references: Sequence[MediaReference],
        options: Mapping[Modality, MediaOptions],
        *,
        fingerprint: str,
        cache_salt: str | None,
        deadline: float,
    ) -> list[LoadedMedia]:
        """All items, in order; the first failure cancels the others and is raised with its `param`."""
        slots = asyncio.Semaphore(self._limits.max_concurrent_fetches)
        totals = _Totals(self._limits)

        async def load_one(reference: MediaReference) -> LoadedMedia:
            own = _options_of(reference, options[reference.modality])
            context = _Context(own, fingerprint, cache_salt, deadline, totals)
            async with slots:
                return await self._load_one(reference, context)

        tasks = [asyncio.create_task(load_one(reference)) for reference in references]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_one(self, reference: MediaReference, context: _Context) -> LoadedMedia:
        scheme, _, _ = reference.url[:5].lower().partition(":")
        limit = self._limits.max_item_bytes
        if scheme == "file" and self._folder is not None:
            data = await asyncio.to_thread(self._folder.read, reference.url, limit, reference.param)
        elif scheme != "data":
            return await self._load_url(reference, context)
        elif len(reference.url) < _INLINE_BYTES:
            data = decode_data_uri(reference.url, limit, reference.param)
        else:
            data = await asyncio.to_thread(decode_data_uri, reference.url, limit, reference.param)
        source = self._store.hold(data)
        key, grid, facts = await self._identify(reference, data, context)
        del data  # it may be moved to a file
        await self._store.settle(source)
        return LoadedMedia(key, reference.modality, context.options, grid, source, reference.param, facts)

    async def _load_url(self, reference: MediaReference, context: _Context) -> LoadedMedia:
        """A file by its URL: known and fresh, known and confirmed by its host, or downloaded."""
        entry = _entry(reference, context)
        known = self._known.get(entry)
        if known is not None and known.is_fresh(time.monotonic()):
            self._fetcher.check_url(reference.url, reference.param)
            URL_LOOKUPS.labels("fresh").inc()
            return self._known_media(reference, context, known)
        etag = None if known is None else known.etag
        fetched = await self._fetcher.fetch(reference.url, self._limits.max_item_bytes, reference.param, etag=etag)
        if fetched.source is None:
            assert known is not None
            URL_LOOKUPS.labels("confirmed").inc()
            self._known.put(
                entry, known.key, known.grid, known.facts, fetched.freshness.or_etag(etag), time.monotonic()
            )
            return self._known_media(reference, context, known)
        URL_LOOKUPS.labels("downloaded").inc()
        key, grid, facts = await self._identify(reference, await fetched.source.read(), context)
        self._known.put(entry, key, grid, facts, fetched.freshness, time.monotonic())
        await self._store.settle(fetched.source)
        return LoadedMedia(key, reference.modality, context.options, grid, fetched.source, reference.param, facts)

    def _known_media(self, reference: MediaReference, context: _Context, known: KnownMedia) -> LoadedMedia:
        source = _LateSource(lambda: self._download_again(reference, context, known))
        return LoadedMedia(
            known.key, reference.modality, context.options, known.grid, source, reference.param, known.facts
        )

    async def _download_again(self, reference: MediaReference, context: _Context, known: KnownMedia) -> HeldSource:
        """The bytes of a file that was known. Raises Overloaded when its host now has another."""
        fetched = await self._fetcher.fetch(reference.url, self._limits.max_item_bytes, reference.param)
        assert fetched.source is not None
        key, _, _ = await self._identify(reference, await fetched.source.read(), context, known.facts)
        if key != known.key:
            self._known.forget(_entry(reference, context))
            raise Overloaded(
                f"{reference.param}: the file at this URL has changed while the request ran: send it again",
                param=reference.param,
                retry_after_s=1.0,
            )
        await self._store.settle(fetched.source)
        return fetched.source

    async def _identify(
        self, reference: MediaReference, source: bytes, context: _Context, facts: VideoFacts | None = None
    ) -> tuple[str, Grid, VideoFacts | None]:
        """Key, grid and, for a video whose `facts` are not known, what an encoder's probe tells."""

        def key_and_grid() -> tuple[str, Grid | None, int]:
            key = media_key(
                source,
                modality=reference.modality,
                options=context.options,
                fingerprint=context.fingerprint,
                cache_salt=context.cache_salt,
            )
            if reference.modality == "video":
                return key, None, 0
            header = read_image_header(source, max_canvas_pixels=self._limits.max_canvas_pixels)
            grid = image_grid(header.width, header.height, self._config.with_options(context.options).image)
            return key, grid, header.width * header.height

        try:
            is_small = len(source) < _INLINE_BYTES
            key, grid, num_pixels = key_and_grid() if is_small else await asyncio.to_thread(key_and_grid)
            context.totals.add(len(source), num_pixels)
            if grid is None:
                facts = facts or await self._backend.probe_video(key, context.options, source, context.deadline)
                grid = facts.grid
        except TandemError as error:
            raise naming(error, reference.param) from error
        return key, grid, facts


def _options_of(reference: MediaReference, options: MediaOptions) -> MediaOptions:
    """The request's options for its media, narrowed by the item's own wish."""
    if not reference.is_low_detail:
        return options
    largest = min(LOW_DETAIL_PIXELS, options.max_pixels or LOW_DETAIL_PIXELS)
    smallest = None if options.min_pixels is None else min(options.min_pixels, largest)
    return msgspec.structs.replace(options, min_pixels=smallest, max_pixels=largest)


def _entry(reference: MediaReference, context: _Context) -> Hashable:
    """What a file is remembered by: its URL, which may hold credentials and so is hashed, and all that its media key
    depends on besides the bytes."""
    url = hashlib.sha256(reference.url.encode("utf-8", "surrogatepass")).digest()
    return url, reference.modality, context.options, context.fingerprint, context.cache_salt
