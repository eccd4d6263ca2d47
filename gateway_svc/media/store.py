"""Source bytes of media for as long as a request may need them: in memory up to a budget, in files beyond it.

A file has no name from the moment that it is made, so nothing is left of it however its request ends, or the process.
It is closed, and its bytes are given back, when nobody keeps the source any more. Knows nothing of requests or of what
the bytes are. Runs on the event loop, files in threads.
"""

import asyncio
import os
import tempfile
import weakref
from pathlib import Path

import structlog

from common.errors import Overloaded
from common.metrics import Counter
from gateway_svc.media.byte_budget import RETRY_AFTER_S, ByteBudget, Holder

logger = structlog.get_logger(__name__)

SPOOLED = Counter("tandem_gateway_media_spooled_total", "Items whose bytes were written to a file")
# A smaller item saves less memory than its file costs.
MIN_SPOOLED_BYTES = 64 << 10


class _File:
    """A file without a name, written at once. Used in threads, where a request may have left by the time it is made."""

    def __init__(self, data: bytes, folder: Path | None) -> None:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (its end is this object's)
        weakref.finalize(self, file.close).atexit = False
        self._number = file.fileno()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._number, view) :]
        except OSError:
            file.close()  # now: whoever handles the error may keep this object with it
            raise

    def read(self, num_bytes: int) -> bytes:
        """Its beginning."""
        return os.pread(self._number, num_bytes, 0)


class HeldSource:
    """The bytes of one item. Made by `MediaStore.hold`; several requests may share it."""

    def __init__(self, data: bytes, holder: Holder) -> None:
        self.num_bytes = len(data)
        self._data: bytes | None = data
        self._holder = holder
        self._file: _File | None = None
        self._moving = asyncio.Lock()

    @property
    def is_on_disk(self) -> bool:
        """Whether they lie in a file."""
        return self._file is not None

    async def load(self) -> None:
        """They are here."""

    async def read(self) -> bytes:
        """All of them."""
        if self._data is not None:
            return self._data
        assert self._file is not None
        return await asyncio.to_thread(self._file.read, self.num_bytes)

    async def move_to_disk(self, folder: Path | None) -> None:
        """Keep them in a file from now on. Raises OSError."""
        async with self._moving:
            if self._data is None:
                return
            self._file = await asyncio.to_thread(_File, self._data, folder)
            self._data = None
            self._holder.move_to_disk()


class MediaStore:
    """All source bytes of one gateway."""

    def __init__(
        self, *, max_bytes: int = 1 << 30, max_memory_bytes: int = 256 << 20, folder: Path | None = None
    ) -> None:
        """`max_bytes` bounds memory and files together; `folder` is that of the files, by default the system's."""
        self.budget = ByteBudget(max_bytes)
        self._max_memory_bytes = max_memory_bytes
        self._folder = folder

    def hold(self, data: bytes, holder: Holder | None = None) -> HeldSource:
        """A source; `holder` where its bytes are counted already. Raises Overloaded when there is no room."""
        if holder is None:
            holder = self.budget.hold()
            holder.take(len(data))
        return HeldSource(data, holder)

    async def settle(self, source: HeldSource) -> None:
        """The bytes were looked at, and may be needed again: move them to a file when memory is short.

        Raises Overloaded when they cannot be written.
        """
        if source.num_bytes < MIN_SPOOLED_BYTES or self.budget.num_memory_bytes <= self._max_memory_bytes:
            return
        try:
            await source.move_to_disk(self._folder)
        except OSError as exc:
            logger.error("media cannot be written to a file", reason=exc.strerror, num_bytes=source.num_bytes)
            raise Overloaded(
                "there is no room for more media: try again later, or send less", retry_after_s=RETRY_AFTER_S
            ) from exc
        SPOOLED.inc()
