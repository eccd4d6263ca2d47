"""How much may be prepared ahead of the tower: room for patches, given in the order in which it was asked for.

Owns no memory itself: whoever enters may hold so many patches until it leaves. Something larger than all the room
enters when nothing else is inside. Runs on the event loop.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class PatchGate:
    """A semaphore that counts patches."""

    def __init__(self, max_patches: int) -> None:
        self._max_patches = max_patches
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.inside = 0
        """Patches that are held now."""

    @contextlib.asynccontextmanager
    async def room_for(self, patches: int) -> AsyncIterator[None]:
        """Wait for room, and hold it until the end of the block."""
        await self._enter(patches)
        try:
            yield
        finally:
            self.inside -= patches
            self._admit()

    async def _enter(self, patches: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((patches, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.inside -= patches  # it was let in and cancelled in the same moment
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            patches, turn = self._waiting[0]
            if not turn.cancelled():
                if self.inside and self.inside + patches > self._max_patches:
                    return
                self.inside += patches
                turn.set_result(None)
            self._waiting.popleft()
