"""The seam between the HTTP half of the gateway and the half that talks to encoders and decoders.

The HTTP half asks for a stream of generation events and knows nothing of sockets, attempts or peers; whoever
implements `Backend` knows nothing of HTTP or text. Everything here runs on the gateway's event loop.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from common.embedding import FleetFacts
from common.embedding_cache import Survey
from common.messages import GenerateRequest, MediaOptions, SequenceTokens, VideoFacts
from gateway_svc.media.item import LoadedMedia

MediaOutcome = Literal["decoder", "cache", "encoded"]


@dataclass(frozen=True)
class MediaReport:
    """Where an item came from: the decoder had it (in KV or memory), a cache had it, or an encoder ran."""

    key: str
    outcome: MediaOutcome
    num_tokens: int


GenerationEvent = SequenceTokens | MediaReport


class Backend(Protocol):
    """What the HTTP half needs. Deadlines are values of `time.monotonic()`."""

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that one sequence may have together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids from 0 up to this are valid in stop lists and biases."""
        ...

    async def wait_for_decoder(self, deadline: float) -> None:
        """Return once the decoders' limits are known. Raises DecoderUnavailable."""
        ...

    async def fleet_facts(self) -> FleetFacts:
        """The fingerprint and the wire dtype of the encoders. Raises EncoderUnavailable when they were never known."""
        ...

    async def probe_video(self, key: str, options: MediaOptions, source: bytes, deadline: float) -> VideoFacts:
        """Grid and timestamps of a video. Raises TandemError."""
        ...

    def generate(
        self, request: GenerateRequest, media: Sequence[LoadedMedia], deadline: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one request until each choice has a finish reason, "stop" or "length". Raises TandemError.

        Closing the iterator (`aclose`) cancels the request everywhere. Duplicates and older attempts never appear,
        nor does a `SequenceTokens` with `error`: that is raised.
        """
        ...

    def end_choice(self, request_id: str, choice: int) -> None:
        """One choice of a request that runs is long enough: no more of it is generated. Others go on."""
        ...

    async def warm(
        self, media: Sequence[LoadedMedia], facts: FleetFacts, deadline: float
    ) -> Mapping[str, MediaOutcome]:
        """Have every item encoded that no cache has; where each key was. Raises TandemError."""
        ...

    async def forget_media(self, key: str) -> bool | None:
        """Remove an embedding from the shared cache; whether it was there, None without such a cache."""
        ...

    async def survey_media(self, fingerprint: str, *, is_removed: bool) -> Survey | None:
        """What the shared cache has of a fingerprint, removed if so wished; None without such a cache."""
        ...

    def is_ready(self) -> bool:
        """Whether a request could be served now: a decoder is ready."""
        ...

    def status(self) -> dict[str, object]:
        """The body of `/ready`: decoders, encoders, Redis."""
        ...
