"""Which encoder owns a picture, and which decoder takes a request. Pure: lists in, choices out."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from common.messages import Hello

T = TypeVar("T")


def rendezvous_order(key: str, ids: Sequence[str]) -> list[str]:
    """The ids in the order in which they own a key: all gateways agree, and one that leaves moves its own keys only."""
    return sorted(ids, key=lambda peer: hashlib.sha256(f"{key}/{peer}".encode()).digest())


def owner_bounded_by_load(order: Sequence[str], queue_s: Mapping[str, float], *, slack_s: float = 2.0) -> list[str]:
    """The order with overloaded owners moved back: those whose queue exceeds the shortest one by `slack_s`."""
    if not order:
        return []
    bound = min(queue_s[peer] for peer in order) + slack_s
    return sorted(order, key=lambda peer: queue_s[peer] > bound)


def fingerprint_of(encoders: Sequence[Hello], decoder: Hello | None) -> str | None:
    """The fingerprint to use in a fleet that may hold several, as during an update: of most encoders that fit.

    An encoder fits when its embeddings have the width and the levels that the decoders expect. When none does, the
    choice is made among all, so that the decoder's refusal names the difference.
    """
    fitting = [e for e in encoders if decoder is not None and (e.width, e.levels) == (decoder.width, decoder.levels)]
    counts = Counter(hello.fingerprint for hello in fitting or encoders if hello.fingerprint is not None)
    return min(counts, key=lambda fingerprint: (-counts[fingerprint], fingerprint), default=None)


def least_loaded(peers: Sequence[T], load: Callable[[T], float]) -> T | None:
    """The peer with the smallest load, the first of equals; None when there is none."""
    return min(peers, key=load, default=None)
