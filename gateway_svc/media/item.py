"""The media of one request as values: what the client referred to, and what is known once it is loaded.

Pure data, shared by the loader (which makes them), the prompt builder (which needs grids) and the backend (which
needs keys and source bytes). Knows nothing of HTTP, prompts or sockets.
"""

from dataclasses import dataclass, field
from typing import Protocol

from common.errors import TandemError
from common.messages import Grid, MediaOptions, Modality, VideoFacts


@dataclass(frozen=True)
class MediaReference:
    """A media part of a request, in prompt order. `param` is its place, such as `messages[0].content[1]`.

    `is_low_detail` says that few pixels of it are enough.
    """

    url: str = field(repr=False)
    modality: Modality
    param: str
    is_low_detail: bool = False


class MediaSource(Protocol):
    """The source bytes of an item, wherever they are."""

    @property
    def num_bytes(self) -> int:
        """How many were loaded; 0 for a file that was recognized without a download."""
        ...

    async def load(self) -> None:
        """Have them here, which may take a download. Raises TandemError."""
        ...

    async def read(self) -> bytes:
        """All of them. Raises TandemError."""
        ...


@dataclass(frozen=True)
class LoadedMedia:
    """A media item with its source and everything that the prompt and the encoders need to know of it."""

    key: str
    modality: Modality
    options: MediaOptions
    grid: Grid
    source: MediaSource = field(repr=False, compare=False)
    param: str
    facts: VideoFacts | None = None


def naming(error: TandemError, param: str) -> TandemError:
    """The same error, with its text and `param` naming the item."""
    message = error.message if param in error.message else f"{param}: {error.message}"
    return type(error)(message, param=param, retry_after_s=error.retry_after_s)
