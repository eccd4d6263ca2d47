"""Which encoder owns a picture, and which decoder takes a request. Pure: lists in, choices out."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

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


def least_loaded(peers: Sequence[T], load: Callable[[T], float]) -> T | None:
    """The peer with the smallest load, the first of equals; None when there is none."""
    return min(peers, key=load, default=None)
