"""Two ways to do the same work, timed in turns, and the table and verdict that every benchmark ends with.

Owns the fairness: sides alternate, so that drift of the machine hits both, and the median of the rounds is taken. Knows
nothing of what is timed.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    """Seconds of each round, of ours and of the peer's, which ran one after the other."""

    ours: list[float]
    peer: list[float]

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer we are: the median of the rounds.

        Each round is compared with itself, since a shared machine may be half as fast in the next one.
        """
        return statistics.median(peer / ours for ours, peer in zip(self.ours, self.peer, strict=True))

    def row(self, name: str) -> str:
        """One line of the table, with every raw time in milliseconds."""
        return f"{name}: {self.ratio:.2f}x\n    ours {_milliseconds(self.ours)}\n    peer {_milliseconds(self.peer)}"


Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts what this process used, so that other work on the machine takes nothing from either side."""


def alternate(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int, clock: Clock = time.perf_counter) -> Times:
    """Run both once to warm up, then in turns."""
    ours()
    peer()
    times = Times([], [])
    for _ in range(rounds):
        times.ours.append(seconds(ours, clock))
        times.peer.append(seconds(peer, clock))
    return times


def seconds(work: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Time of one call."""
    began = clock()
    work()
    return clock() - began


def affinity() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def verdict(ratios: dict[str, float], targets: dict[str, float]) -> int:
    """Print the ratios with their targets as one JSON object; 1 when one falls short. All are: at least so much."""
    rows = {
        name: {"value": round(value, 3), "target": targets[name], "met": value >= targets[name]}
        for name, value in ratios.items()
    }
    print(json.dumps(rows))
    return 0 if all(row["met"] for row in rows.values()) else 1


def _milliseconds(values: list[float]) -> str:
    raw = " ".join(f"{value * 1e3:.1f}" for value in values)
    return f"median {statistics.median(values) * 1e3:.1f} ms of [{raw}]"
