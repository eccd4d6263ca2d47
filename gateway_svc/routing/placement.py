"""Which encoder owns a picture, and which decoder takes a request. Pure: lists in, choices out."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.embedding import FleetFacts
from common.messages import Hello

T = TypeVar("T")
KV_WEIGHT = 4.0  # requests that a full KV cache weighs
QUEUE_WEIGHT = 4.0  # requests that a second of queued prompts weighs: a new one computes after them
TOKENS_PER_REQUEST = 128  # of a known prefix, that are worth one request more in the queue
MAX_IMBALANCE = 4.0  # requests


def rendezvous_order(key: str, ids: Sequence[str]) -> list[str]:
    """The ids in the order in which they own a key: all gateways agree, and one that leaves moves its own keys only."""
    return sorted(ids, key=lambda peer: hashlib.sha256(f"{key}/{peer}".encode()).digest())


def owner_bounded_by_load(order: Sequence[str], queue_s: Mapping[str, float], *, slack_s: float = 2.0) -> list[str]:
    """The order with overloaded owners moved back: those whose queue exceeds the shortest one by `slack_s`."""
    if not order:
        return []
    bound = min(queue_s[peer] for peer in order) + slack_s
    return sorted(order, key=lambda peer: queue_s[peer] > bound)


@dataclass(frozen=True)
class DecoderLoad:
    """How much one decoder has to do. `num_own` are this gateway's requests there, which count at once."""

    num_own: int = 0
    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    """The part of the KV cache that is in use."""
    queue_s: float = 0.0
    """How long its queued prompts take to compute."""

    @property
    def cost(self) -> float:
        """In requests: those there, those that wait once more, a cache that fills up, and prompts to be computed."""
        there = max(self.num_own, self.waiting + self.running) + self.waiting
        return there + KV_WEIGHT * self.kv_used + QUEUE_WEIGHT * self.queue_s


def choose_decoder(
    peers: Sequence[T], load: Callable[[T], DecoderLoad], known_tokens: Callable[[T], int], rng: random.Random
) -> T | None:
    """The better of two at random, or the peer that knows most of the prompt, unless that one has too much to do.

    Two at random spread the load as well as a full comparison does, and gateways with equally old reports do not all
    run to the same peer. A known prefix outweighs `TOKENS_PER_REQUEST` tokens for each request more, and no more than
    `MAX_IMBALANCE` requests, however long it is.
    """
    if not peers:
        return None
    candidates = list(peers) if len(peers) <= 2 else rng.sample(list(peers), 2)
    most = max(peers, key=known_tokens)
    if known_tokens(most) and most not in candidates:
        candidates.append(most)

    def cost(peer: T) -> float:
        return load(peer).cost - min(known_tokens(peer) / TOKENS_PER_REQUEST, MAX_IMBALANCE)

    return min(candidates, key=cost)


def fleet_facts_of(encoders: Sequence[Hello], decoder: Hello | None) -> FleetFacts | None:
    """The facts to use in a fleet that may hold several, as during an update: of most encoders that fit.

    An encoder fits when its embeddings have the width and the levels that the decoders expect. When none does, the
    choice is made among all, so that the decoder's refusal names the difference.
    """
    fitting = [e for e in encoders if decoder is not None and (e.width, e.levels) == (decoder.width, decoder.levels)]
    counts = Counter(
        FleetFacts(hello.fingerprint, hello.wire_dtype)
        for hello in fitting or encoders
        if hello.fingerprint is not None and hello.wire_dtype is not None
    )
    return min(counts, key=lambda facts: (-counts[facts], facts.fingerprint, facts.wire_dtype), default=None)
