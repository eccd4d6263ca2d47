"""The thread that runs the engine: commands in, events out, asleep when nothing can run.

Owns the one queue between the event loop and the engine. A command is a function of the engine that returns events;
events are delivered in batches, one for each step. The owner starts it, and stops it before the process ends.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from decoder_svc.engine import Engine, Event

logger = structlog.get_logger(__name__)

Command = Callable[[Engine], Sequence[Event]]

# How long the engine sleeps when sequences wait for embeddings only: deadlines are checked as often.
IDLE_S = 0.05


class EngineThread:
    """Runs one engine. `deliver` is called in this thread."""

    def __init__(self, engine: Engine, deliver: Callable[[Sequence[Event]], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None

    @property
    def step_began(self) -> float | None:
        """`time.monotonic()` of the step that runs now, or None."""
        return self._step_began

    def check(self) -> None:
        """Raise when the thread has died of an error, which its traceback on stderr tells."""
        if self._thread.ident is not None and not self._thread.is_alive():
            raise RuntimeError("the engine thread has died")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run a command before the next step. Callable from any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread after the step that runs."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        can_run = False
        while True:
            command = self._next_command(can_run)
            if command is None:
                return
            self._deliver_all(command(self._engine))
            if self._commands.empty():
                self._step_began = time.monotonic()
                events, can_run = self._engine.step()
                self._step_began = None
                self._deliver_all(events)

    def _next_command(self, can_run: bool) -> Command | None:
        """The next command; one that does nothing when the engine has work of its own."""
        try:
            if can_run:
                return self._commands.get_nowait()
            return self._commands.get(timeout=IDLE_S if self._engine.has_sequences else None)
        except queue.Empty:
            return lambda engine: ()

    def _deliver_all(self, events: Sequence[Event]) -> None:
        if events:
            self._deliver(events)
