"""Requests and sequences for the decoder's tests, with sensible values for all that a test does not care about."""

from collections.abc import Sequence as Seq
from typing import Any

from common.messages import GenerateRequest, Grid, MediaItem, PromptSpan, SamplingParams
from decoder_svc.sequence import Prompt, Sequence

MERGE_SIZE = 2
PAD_ID = 290
FINGERPRINT = "f" * 64


def key_of(number: int) -> str:
    """The media key of picture number so-and-so."""
    return f"{number:064x}"


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(**{"seed": 0, "temperature": 0.0, "max_tokens": max_tokens, **fields})


def span_at(offset: int, grid: Grid) -> PromptSpan:
    """A span of one picture or frame group."""
    t, h, w = grid
    return PromptSpan(offset=offset, num_tokens=t * h * w // MERGE_SIZE**2, grid=grid)


def picture(number: int, offset: int, grid: Grid = (1, 4, 4)) -> MediaItem:
    """A picture with its placeholders at `offset`."""
    return MediaItem(key=key_of(number), modality="image", grid=grid, spans=[span_at(offset, grid)])


def generate_request(
    token_ids: Seq[int], *, request_id: str = "r", sampling: SamplingParams | None = None, **fields: Any
) -> GenerateRequest:
    """A request of these token ids."""
    return GenerateRequest(
        **{
            "request_id": request_id,
            "model": "tiny",
            "fingerprint": FINGERPRINT,
            "prompt_token_ids": list(token_ids),
            "sampling": sampling or greedy(),
            "time_left_s": 60.0,
            **fields,
        }
    )


def sequence_of(
    token_ids: Seq[int],
    *,
    media: Seq[MediaItem] = (),
    output: Seq[int] = (),
    choice: int = 0,
    sampling: SamplingParams | None = None,
    cache_salt: str | None = None,
    request_id: str = "r",
) -> Sequence:
    """A sequence as the engine makes them."""
    request = generate_request(
        token_ids, media=list(media), sampling=sampling, cache_salt=cache_salt, request_id=request_id
    )
    return Sequence(
        request_id=request_id,
        attempt=0,
        choice=choice,
        prompt=Prompt.of(request, MERGE_SIZE),
        sampling=request.sampling,
        deadline=60.0,
        arrived_at=0.0,
        output_token_ids=list(output),
    )
