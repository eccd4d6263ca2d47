"""Which requests a gateway takes on: how many at once, how many of one API key, and each key its share.

Owns the counts of what runs and the keys' allowances. A key beyond its own limits is told so (429), whoever comes when
the gateway is full is sent elsewhere (503). When it is nearly full, the keys that run more than an equal share wait,
and the last quarter is left to the others. Pure: `now` is an argument.
"""

import math
from dataclasses import dataclass

from common.errors import Overloaded, RateLimited
from gateway_svc.http.api_keys import ApiKey

# The part of all requests that keys may run before shares are looked at.
FREE_FOR_ALL = 0.75
RETRY_AFTER_S = 1.0


@dataclass
class _Use:
    """What one key uses. `allowance` is how many requests it may send now, refilled all the time."""

    num_running: int = 0
    allowance: float = 0.0
    refilled_at: float = -math.inf

    def refill(self, per_minute: float, now: float) -> None:
        """At most a minute's worth is saved up."""
        self.allowance = min(max(per_minute, 1.0), self.allowance + (now - self.refilled_at) * per_minute / 60)
        self.refilled_at = now


class Admission:
    """The requests of one gateway. Every `admit` that returns is followed by one `leave`."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_running = 0
        self._uses: dict[str, _Use] = {}

    @property
    def num_running(self) -> int:
        """Requests that were admitted and have not left."""
        return self._num_running

    def admit(self, key: ApiKey | None, now: float) -> None:
        """Count a request in. Raises RateLimited or Overloaded, and then counts nothing."""
        if self._num_running >= self._max_requests:
            raise Overloaded(
                f"this gateway runs {self._max_requests} requests, which is its limit: try again, or another gateway",
                retry_after_s=RETRY_AFTER_S,
            )
        if key is not None:
            self._admit_key(key, now)
        self._num_running += 1

    def leave(self, key: ApiKey | None) -> None:
        """Count a request out."""
        self._num_running -= 1
        if key is not None:
            self._uses[key.name].num_running -= 1

    def _admit_key(self, key: ApiKey, now: float) -> None:
        use = self._uses.setdefault(key.name, _Use())
        limits = key.limits
        if limits.max_inflight and use.num_running >= limits.max_inflight:
            raise RateLimited(
                f"this API key runs {use.num_running} requests, and {limits.max_inflight} is its limit: wait for one "
                "to end",
                retry_after_s=RETRY_AFTER_S,
            )
        self._check_share(use)
        if limits.requests_per_minute:
            use.refill(limits.requests_per_minute, now)
            if use.allowance < 1:
                raise RateLimited(
                    f"this API key may send {limits.requests_per_minute:g} requests a minute: send them more slowly",
                    retry_after_s=(1 - use.allowance) * 60 / limits.requests_per_minute,
                )
            use.allowance -= 1
        use.num_running += 1

    def _check_share(self, use: _Use) -> None:
        """Of what runs when little is left, no key has more than an equal part."""
        if self._num_running < self._max_requests * FREE_FOR_ALL:
            return
        others = sum(other.num_running > 0 for other in self._uses.values() if other is not use)
        share = max(1, self._max_requests // (others + 1)) if others else int(self._max_requests * FREE_FOR_ALL)
        if use.num_running >= share:
            raise RateLimited(
                f"this gateway is nearly full, and this API key runs {use.num_running} of its requests, where "
                f"{share} are its share: try again later",
                retry_after_s=RETRY_AFTER_S,
            )
