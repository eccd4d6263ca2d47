"""Loads the media of one request: bytes, key, grid, and for a video what an encoder's probe tells.

Owns the limits on number and size of items and the bound on fetches that run together. Hashing and header reading of
large items leave the event loop. No pixel is decoded here, and nothing is known of prompts or HTTP responses.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequest, TandemError
from common.image_header import DEFAULT_MAX_CANVAS_PIXELS, read_image_header
from common.media_key import media_key
from common.messages import Grid, MediaOptions, Modality
from common.processor_config import ProcessorConfig
from common.vision_grid import image_grid
from gateway_svc.backend import Backend
from gateway_svc.data_uri import decode_data_uri
from gateway_svc.media import LoadedMedia, MediaReference, naming
from gateway_svc.media_fetch import MediaFetcher

# Below this, hashing (about 1 GB/s) takes less time than a thread's start.
_INLINE_BYTES = 64 << 10


@dataclass(frozen=True)
class MediaLimits:
    """Bounds of one request's media. `max_items` is `--limit-mm-per-prompt`; an absent modality has no limit."""

    max_items: Mapping[Modality, int] = field(default_factory=dict)
    max_item_bytes: int = 100 << 20
    max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS
    max_concurrent_fetches: int = 16


class MediaLoader:
    """Turns references into loaded media. One instance for the gateway."""

    def __init__(self, backend: Backend, config: ProcessorConfig, fetcher: MediaFetcher, limits: MediaLimits) -> None:
        self._backend = backend
        self._config = config
        self._fetcher = fetcher
        self._limits = limits

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

        async def load_one(reference: MediaReference) -> LoadedMedia:
            async with slots:
                source = await self._source(reference)
                return await self._loaded(
                    reference, source, options[reference.modality], fingerprint, cache_salt, deadline
                )

        tasks = [asyncio.create_task(load_one(reference)) for reference in references]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _source(self, reference: MediaReference) -> bytes:
        limit = self._limits.max_item_bytes
        if reference.url[:5].lower() != "data:":
            return await self._fetcher.fetch(reference.url, limit, reference.param)
        if len(reference.url) < _INLINE_BYTES:
            return decode_data_uri(reference.url, limit, reference.param)
        return await asyncio.to_thread(decode_data_uri, reference.url, limit, reference.param)

    async def _loaded(
        self,
        reference: MediaReference,
        source: bytes,
        options: MediaOptions,
        fingerprint: str,
        cache_salt: str | None,
        deadline: float,
    ) -> LoadedMedia:
        def key_and_grid() -> tuple[str, Grid | None]:
            key = media_key(
                source,
                modality=reference.modality,
                options=options,
                fingerprint=fingerprint,
                cache_salt=cache_salt,
            )
            return key, self._image_grid(source, options) if reference.modality == "image" else None

        try:
            key, grid = key_and_grid() if len(source) < _INLINE_BYTES else await asyncio.to_thread(key_and_grid)
            facts = None
            if grid is None:
                facts = await self._backend.probe_video(key, options, source, deadline)
                grid = facts.grid
        except TandemError as error:
            raise naming(error, reference.param) from error
        return LoadedMedia(key, reference.modality, options, grid, source, reference.param, facts)

    def _image_grid(self, source: bytes, options: MediaOptions) -> Grid:
        header = read_image_header(source, max_canvas_pixels=self._limits.max_canvas_pixels)
        return image_grid(header.width, header.height, self._config.with_options(options).image)
