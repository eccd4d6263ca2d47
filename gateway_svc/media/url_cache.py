"""What is known of media by their URL, so that a picture that comes again need not be downloaded to be recognized.

Owns HTTP's rules for how long an answer may be trusted (RFC 9111, as a shared cache), and a bounded LRU of results:
key, grid and facts, never bytes. An entry that is no longer fresh is worth a question to the host with its ETag.
Pure: `now` is an argument.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from common.messages import Grid, VideoFacts

MAX_AGE_S = 86_400.0
MAX_ETAG_CHARACTERS = 256


@dataclass(frozen=True)
class Freshness:
    """How long an answer holds, by its headers, and the tag to ask with afterwards."""

    fresh_s: float = 0.0
    etag: str | None = None

    @property
    def is_storable(self) -> bool:
        """Whether it is of any use later."""
        return self.fresh_s > 0 or self.etag is not None

    def or_etag(self, etag: str | None) -> "Freshness":
        """With the tag that was asked with, which a short answer need not repeat."""
        return Freshness(self.fresh_s, self.etag or etag)


def freshness_of(headers: Mapping[str, str]) -> Freshness:
    """From the headers of an answer. Names of headers are in lower case, or `headers` does not care."""
    directives = _directives(headers.get("cache-control", ""))
    if directives.keys() & {"no-store", "private"} or headers.get("vary", "").strip() == "*":
        return Freshness()
    etag = headers.get("etag", "").strip()
    age_s = _seconds(headers.get("age", "")) or 0.0
    max_age_s = _seconds(directives.get("s-maxage", "")) or _seconds(directives.get("max-age", "")) or 0.0
    if "no-cache" in directives:
        max_age_s = 0.0
    is_usable = 0 < len(etag) <= MAX_ETAG_CHARACTERS and etag.isascii() and etag.isprintable()
    return Freshness(max(0.0, min(max_age_s, MAX_AGE_S) - age_s), etag if is_usable else None)


def _directives(text: str) -> dict[str, str]:
    parts = (part.strip().partition("=") for part in text.lower().split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in parts}


def _seconds(text: str) -> float | None:
    text = text.strip()
    return float(text) if text.isdecimal() and len(text) < 12 else None


@dataclass(frozen=True)
class KnownMedia:
    """What a URL's file was found to be."""

    key: str
    grid: Grid
    facts: VideoFacts | None
    etag: str | None
    fresh_until: float

    def is_fresh(self, now: float) -> bool:
        """Whether it may be used without asking the host."""
        return now < self.fresh_until


class UrlCache:
    """The files known last. The key of an entry is the URL with all that its media key depends on besides the bytes."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, KnownMedia] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, entry: Hashable) -> KnownMedia | None:
        """What is known, fresh or not."""
        known = self._entries.get(entry)
        if known is not None:
            self._entries.move_to_end(entry)
        return known

    def put(
        self, entry: Hashable, key: str, grid: Grid, facts: VideoFacts | None, freshness: Freshness, now: float
    ) -> None:
        """Remember a file, where its host allows it; forget what was known where it does not."""
        self._entries.pop(entry, None)
        if not freshness.is_storable or not self._max_entries:
            return
        self._entries[entry] = KnownMedia(key, grid, facts, freshness.etag, now + freshness.fresh_s)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def forget(self, entry: Hashable) -> None:
        """It was wrong."""
        self._entries.pop(entry, None)
