"""Peers that fail again and again are left alone for a while, then tried with one request before they get more.

Owns the counts of one tier. A peer is ejected after some failures in a row, for a time that doubles with each ejection
and has jitter, so that gateways do not return together; a success ends it all. Whether a failure is the peer's fault is
for the caller to say. Pure: `now` is an argument.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from common.metrics import Counter

EJECTIONS = Counter("tandem_gateway_ejections_total", "Times that a peer was left alone after failures", ["role"])
MAX_FAILURES = 3
FIRST_S = 1.0
LONGEST_S = 30.0
TRIAL_S = 60.0  # after which a trial that nobody ended is over
MAX_PEERS = 1024


@dataclass
class _Record:
    num_failures: int = 0
    ejected_until: float = 0.0
    pause_s: float = FIRST_S
    trial_until: float = 0.0


class Ejection:
    """The peers of one tier, by instance id: one that restarts begins anew."""

    def __init__(self, role: str, *, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` gives numbers from 0 to 1."""
        self._role = role
        self._jitter = jitter
        self._records: dict[str, _Record] = {}

    def allows(self, peer: str, now: float) -> bool:
        """Whether work may be sent: not ejected, and not on trial with a request already."""
        record = self._records.get(peer)
        if record is None or record.num_failures < MAX_FAILURES:
            return True
        return now >= max(record.ejected_until, record.trial_until)

    def begin(self, peer: str, now: float) -> None:
        """Work is sent. To a peer that was ejected it is a trial: no other work until it has ended."""
        record = self._records.get(peer)
        if record is not None and record.num_failures >= MAX_FAILURES:
            record.trial_until = now + TRIAL_S

    def record_success(self, peer: str) -> None:
        """The peer did what it was asked."""
        self._records.pop(peer, None)

    def record_failure(self, peer: str, now: float) -> bool:
        """The peer failed by its own fault; whether it is ejected now."""
        if peer not in self._records and len(self._records) >= MAX_PEERS:
            self._records.pop(next(iter(self._records)))
        record = self._records.setdefault(peer, _Record())
        record.num_failures += 1
        record.trial_until = 0.0
        if record.num_failures < MAX_FAILURES or now < record.ejected_until:
            return False
        # From half to all of the pause.
        record.ejected_until = now + record.pause_s * (0.5 + 0.5 * self._jitter())
        record.pause_s = min(record.pause_s * 2, LONGEST_S)
        EJECTIONS.labels(self._role).inc()
        return True

    def end_trial(self, peer: str) -> None:
        """The work ended and says nothing of the peer, such as when the client left."""
        record = self._records.get(peer)
        if record is not None:
            record.trial_until = 0.0
