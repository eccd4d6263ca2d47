"""The other ranks as processes of rank 0: started before it loads, watched as long as it lives, ended with it.

Owns the rule that all ranks live and die together: when one ends by itself, the decoder cannot finish any step and ends
at once with code 1, for its supervisor to start anew and for gateways to go on at other decoders. Runs on the event
loop of rank 0.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog

from common.processes import Child, Command
from decoder_svc.model.parallel import Shard
from decoder_svc.rank import CANNOT_LOAD_CODE
from decoder_svc.server import DecoderServer
from decoder_svc.tensor_parallel import Channel, ProcessRanks, RankSetup, while_loading

logger = structlog.get_logger(__name__)

OWN_ERROR_S = 10.0  # rank 0 meets what is wrong with a checkpoint itself, and says it better
STOP_GRACE_S = 10.0


class RankProcesses:
    """All ranks but this one. The owner awaits `start`, and `stop` at the end."""

    def __init__(self, setups: Sequence[RankSetup], meeting_dir: "tempfile.TemporaryDirectory[str]") -> None:
        pairs = [socket.socketpair() for _ in setups]
        self._setups = setups
        self._theirs = [theirs for _, theirs in pairs]
        self._meeting_dir = meeting_dir
        self._watching: asyncio.Task[None] | None = None
        self._children = [
            Child(
                Command(
                    f"rank-{setup.rank}",
                    [sys.executable, "-m", "decoder_svc.rank", str(theirs.fileno())],
                    {},
                    inherited=(theirs.fileno(),),
                    on_orphaned=signal.SIGKILL,  # it ignores SIGTERM, and may wait for this process on a device
                )
            )
            for setup, theirs in zip(setups, self._theirs, strict=True)
        ]
        self.channels = [Channel(ours) for ours, _ in pairs]
        self.ranks = ProcessRanks(Shard(0, 1 + len(setups)), self.channels)

    @property
    def meeting_file(self) -> Path:
        """Where all ranks meet."""
        return Path(self._setups[0].meeting_file)

    async def start(self) -> None:
        """Start the processes and tell each what it is. Raises ModelFailure when one is gone at once."""
        for child, theirs, channel, setup in zip(
            self._children, self._theirs, self.channels, self._setups, strict=True
        ):
            await child.start()
            theirs.close()
            with while_loading():
                channel.send_setup(setup)
        self._watching = asyncio.create_task(self._watch(), name="watch-ranks")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End all of them, which run no step now; what does not end in time is killed."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for channel in self.channels:
            channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(child.wait() for child in self._children))
        for child in self._children:
            child.kill()
            await child.wait()
        self._meeting_dir.cleanup()

    async def _watch(self) -> None:
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            codes = {child.command.name: end.result() for end, child in ends.items() if end.done()}
            if CANNOT_LOAD_CODE in codes.values():
                await asyncio.sleep(OWN_ERROR_S)
            logger.critical("a rank of this decoder has ended, and so does the decoder", exit_codes=codes)
            sys.stderr.flush()
            self._meeting_dir.cleanup()
            # The engine thread may wait for that rank, where nothing but the end of the process reaches it.
            os._exit(1)
        finally:
            for end in ends:
                end.cancel()


class ParallelServer:
    """A decoder's server, which takes the other ranks with it when it ends. A `Server` of `common.service`."""

    def __init__(self, server: DecoderServer, processes: RankProcesses) -> None:
        self._server = server
        self._processes = processes

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._server.is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether one step takes longer than any should, at whichever rank."""
        return self._server.is_stalled

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self._server.run()
        finally:
            await self._processes.stop()

    async def drain(self) -> None:
        """Finish what runs, with all ranks."""
        await self._server.drain()
