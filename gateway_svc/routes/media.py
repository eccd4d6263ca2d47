"""`/v1/media`: have pictures and videos encoded before anyone asks about them, see what is cached, and forget it.

Owns the route's shapes. Keys are made here from the bytes and never taken on trust: one that a client gives only names
what is to be forgotten. The shared cache alone is surveyed and purged; what encoders and decoders hold in memory goes
by their own limits. Runs in the request's task.
"""

import math
import time
from typing import Annotated, Any

from fastapi import Path
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFound, Overloaded
from common.vision_grid import num_vision_tokens
from gateway_svc.media.item import LoadedMedia, MediaReference
from gateway_svc.routes.api import ERROR_RESPONSES, Api, documented, json_response
from gateway_svc.routes.text_run import TextService
from gateway_svc.schemas.chat_request import ImagePart, VideoPart
from gateway_svc.schemas.sampling_fields import CacheSalt, ProcessorKwargs, Timeout
from gateway_svc.schemas.strict_model import RequestBody, check_count

MAX_ITEMS = 256
MediaPart = Annotated[ImagePart | VideoPart, Field(discriminator="type")]


class WarmRequest(RequestBody):
    """Media as parts of a message would have them, with the options that make other embeddings of them."""

    model: str
    media: Annotated[list[MediaPart], Field(min_length=1, max_length=MAX_ITEMS)]
    mm_processor_kwargs: ProcessorKwargs | None = None
    cache_salt: CacheSalt | None = None
    timeout: Timeout | None = None  # seconds, within the server's own limit

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """See the base."""
        check_count(body.get("media"), MAX_ITEMS, "media")


def add_media_routes(api: Api) -> None:
    """Warm, survey, forget."""
    service = api.service

    @api.app.post("/v1/media", tags=["media"], **documented(WarmRequest, "Key, tokens and outcome of each item."))
    async def warm_media(request: Request) -> Response:
        """Encode media that no cache has yet, so that later requests with them wait for nothing."""
        body, _ = await api.read(request, WarmRequest)
        service.check_model(body.model)
        return json_response({"object": "list", "data": await _warm(service, body)})

    @api.app.get("/v1/media", tags=["media"], response_model=None, responses=ERROR_RESPONSES)
    async def survey_media() -> Response:
        """How many embeddings of this model the shared cache has, and their bytes."""
        return json_response({"object": "media.cache", **await _survey(service, is_removed=False)})

    @api.app.delete("/v1/media", tags=["media"], response_model=None, responses=ERROR_RESPONSES)
    async def purge_media(model: str) -> Response:
        """Remove all embeddings of a model from the shared cache."""
        service.check_model(model)
        return json_response({"object": "media.deleted", **await _survey(service, is_removed=True)})

    @api.app.delete("/v1/media/{key}", tags=["media"], response_model=None, responses=ERROR_RESPONSES)
    async def forget_media(key: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
        """Remove one embedding from the shared cache."""
        is_removed = await service.backend.forget_media(key)
        if is_removed is None:
            raise _no_cache()
        if not is_removed:
            raise NotFound("the shared cache has nothing under this key", param="key")
        return json_response({"object": "media.deleted", "key": key})


async def _warm(service: TextService, body: WarmRequest) -> list[dict[str, Any]]:
    deadline = time.monotonic() + min(service.request_timeout_s, body.timeout or math.inf)
    references = [_reference(part, index) for index, part in enumerate(body.media)]
    service.media.check_counts(references)
    facts = await service.backend.fleet_facts()
    media = await service.load_media(
        references,
        body.mm_processor_kwargs,
        fingerprint=facts.fingerprint,
        cache_salt=body.cache_salt,
        deadline=deadline,
    )
    outcomes = await service.backend.warm(media, facts, deadline)
    return [_item(service, item, outcomes[item.key]) for item in media]


def _reference(part: ImagePart | VideoPart, index: int) -> MediaReference:
    if isinstance(part, ImagePart):
        return MediaReference(part.image_url.take(), "image", f"media[{index}]", part.image_url.detail == "low")
    return MediaReference(part.video_url.take(), "video", f"media[{index}]")


def _item(service: TextService, item: LoadedMedia, outcome: str) -> dict[str, Any]:
    num_tokens = num_vision_tokens(item.grid, service.prompts.merge_size)
    return {"object": "media", "key": item.key, "modality": item.modality, "tokens": num_tokens, "outcome": outcome}


async def _survey(service: TextService, *, is_removed: bool) -> dict[str, Any]:
    facts = await service.backend.fleet_facts()
    survey = await service.backend.survey_media(facts.fingerprint, is_removed=is_removed)
    if survey is None:
        raise _no_cache()
    return {"model": service.model_names[0], "items": survey.num_items, "bytes": survey.num_bytes}


def _no_cache() -> Overloaded:
    return Overloaded("there is no shared cache, or it does not answer: look at redis in /ready", retry_after_s=5.0)
