"""The media of one request as values: what the client referred to, and what is known once it is loaded.

Pure data, shared by the loader (which makes them), the prompt builder (which needs grids) and the backend (which
needs keys and source bytes). Knows nothing of HTTP, prompts or sockets.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.errors import TandemError
from common.messages import Grid, MediaOptions, Modality, VideoFacts


@dataclass(frozen=True)
class MediaReference:
    """A media part of a request, in prompt order. `param` is its place, such as `messages[0].content[1]`."""

    url: str = field(repr=False)
    modality: Modality
    param: str


@dataclass(frozen=True)
class LoadedMedia:
    """A media item with its source bytes and everything that the prompt and the encoders need to know of it.

    An item that was known by its URL has no bytes until someone reads them. `holder` keeps the bytes counted.
    """

    key: str
    modality: Modality
    options: MediaOptions
    grid: Grid
    source: bytes = field(repr=False)
    param: str
    facts: VideoFacts | None = None
    fetch_source: Callable[[], Awaitable[bytes]] | None = field(default=None, repr=False, compare=False)
    holder: object = field(default=None, repr=False, compare=False)

    async def read_source(self) -> bytes:
        """The source bytes, fetched now if they were not needed before. Raises TandemError."""
        return self.source if self.fetch_source is None else await self.fetch_source()


def naming(error: TandemError, param: str) -> TandemError:
    """The same error, with its text and `param` naming the item."""
    message = error.message if param in error.message else f"{param}: {error.message}"
    return type(error)(message, param=param, retry_after_s=error.retry_after_s)
