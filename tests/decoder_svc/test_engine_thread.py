"""The engine's thread: asleep when nothing can run, awake for each command, and gone when it is stopped."""

import threading
from collections.abc import Sequence

import pytest

from decoder_svc.engine import Event
from decoder_svc.engine_thread import EngineThread
from decoder_svc.media_needs import MediaBudget


class FakeEngine:
    """Counts steps; runs `work` of them, then has sequences that cannot run."""

    def __init__(self, work: int = 0, *, has_sequences: bool = True) -> None:
        self.work = work
        self.has_sequences = has_sequences
        self.num_steps = 0
        self.threads: set[str] = set()

    def step(self) -> tuple[list[Event], bool]:
        self.num_steps += 1
        self.threads.add(threading.current_thread().name)
        self.work -= 1
        return [MediaBudget(self.num_steps, None)], self.work >= 0


class Delivered:
    """Events that came, and a way to wait for some."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, timeout=5)


def started(engine: FakeEngine) -> tuple[EngineThread, Delivered]:
    delivered = Delivered()
    thread = EngineThread(engine, delivered)  # type: ignore[arg-type]
    thread.start()
    return thread, delivered


def test_steps_follow_each_other_while_there_is_work() -> None:
    engine = FakeEngine(work=500)
    thread, delivered = started(engine)
    thread.submit(lambda engine: ())
    delivered.wait_for(500)
    thread.stop()
    assert engine.threads == {"engine"}


def test_it_does_not_spin_when_all_sequences_wait_for_embeddings() -> None:
    engine = FakeEngine()
    thread, delivered = started(engine)
    thread.submit(lambda engine: ())
    delivered.wait_for(1)
    before = engine.num_steps
    threading.Event().wait(0.3)
    assert engine.num_steps - before <= 10
    thread.stop()


def test_it_sleeps_for_good_without_sequences_until_a_command_comes() -> None:
    engine = FakeEngine(has_sequences=False)
    thread, delivered = started(engine)
    threading.Event().wait(0.15)
    assert engine.num_steps == 0
    thread.submit(lambda engine: [MediaBudget(77, "r")])
    delivered.wait_for(2)
    assert delivered.events[0] == MediaBudget(77, "r")
    thread.stop()


def test_commands_run_in_order_before_the_next_step() -> None:
    engine = FakeEngine(has_sequences=False)
    order: list[int] = []
    thread = EngineThread(engine, Delivered())  # type: ignore[arg-type]
    for number in range(5):
        thread.submit(lambda engine, number=number: order.append(number) or ())  # type: ignore[misc, func-returns-value]
    thread.start()
    thread.stop()
    assert order == [0, 1, 2, 3, 4]
    assert engine.num_steps <= 1


def test_stopping_ends_the_thread_also_in_the_midst_of_work() -> None:
    engine = FakeEngine(work=10**9)
    thread, delivered = started(engine)
    thread.submit(lambda engine: ())
    delivered.wait_for(10)
    thread.stop()
    steps = engine.num_steps
    threading.Event().wait(0.05)
    assert engine.num_steps == steps
    assert thread.step_began is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_noticed() -> None:
    engine = FakeEngine()
    thread = EngineThread(engine, Delivered())  # type: ignore[arg-type]
    thread.check()
    thread.start()
    thread.check()

    def fail(engine: object) -> Sequence[Event]:
        raise RuntimeError("a bug of ours")

    thread.submit(fail)
    thread.stop()
    with pytest.raises(RuntimeError, match="has died"):
        thread.check()
