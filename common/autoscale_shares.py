"""What all gateways count of a tier: each is asked for its share, and the answers are added up.

Used by a gateway that answers for all, and by `tandem autoscaler`. A gateway that is listed twice counts once; one that
does not answer in time is missing from the sum, which is then a lower bound and says so. One that has not answered for
minutes has no work any more. Runs on the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
import msgspec
import structlog
from msgspec import Meta, Struct

from common.autoscale import Share, TierName, total
from common.members import Member, MemberSource

logger = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 4 << 20
MAX_TOGETHER = 64
FORGET_S = 300.0  # a gateway that is listed and silent for so long is not there, whatever the list says


class OwnShare(Struct, frozen=True, kw_only=True):
    """The answer of one gateway for itself."""

    gateway: Annotated[str, Meta(min_length=1, max_length=128)]
    share: Share


@dataclass(frozen=True)
class Collected:
    """The shares of the gateways that answered, by id, and how many were asked."""

    tier: TierName
    shares: dict[str, Share]
    asked: int
    answered: int

    @property
    def total(self) -> Share:
        """All together."""
        return total(self.tier, self.shares.values())

    @property
    def is_complete(self) -> bool:
        """Whether every gateway that is known has answered."""
        return self.answered == self.asked


class ShareCollector:
    """Asks the gateways of a source. The owner awaits `run`."""

    def __init__(
        self,
        source: MemberSource,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._source = source
        self._client = client or httpx.AsyncClient(trust_env=False, timeout=ASK_TIMEOUT_S, follow_redirects=False)
        self._slots = asyncio.Semaphore(MAX_TOGETHER)
        self._heard_at: dict[str, float] = {}  # by URL; when it was listed, for one that never answered

    async def run(self) -> None:
        """Follow who the gateways are, until cancelled."""
        try:
            await self._source.run(self._set_members)
            await asyncio.Event().wait()  # a static list is told once
        finally:
            await self._client.aclose()

    def status(self) -> dict[str, object]:
        """Of the source."""
        return self._source.status()

    async def collect(self, tier: TierName, own: OwnShare | None = None) -> Collected:
        """The shares of all gateways; `own` is that of the gateway that asks, which need not ask itself."""
        urls = list(self._heard_at)
        answers = await asyncio.gather(*(self._ask(url, tier) for url in urls))
        now = self._clock()
        for url, answer in zip(urls, answers, strict=True):
            if answer is not None and url in self._heard_at:
                self._heard_at[url] = now
        asked = sum(now - self._heard_at.get(url, now) < FORGET_S for url in urls)
        found = {answer.gateway: answer.share for answer in answers if answer is not None}
        if own is not None:
            found[own.gateway] = own.share
        return Collected(tier, found, asked, sum(answer is not None for answer in answers))

    def _set_members(self, members: Sequence[Member]) -> None:
        now = self._clock()
        urls = [member.endpoints[0].rstrip("/") for member in members]
        self._heard_at = {url: self._heard_at.get(url, now) for url in urls}

    async def _ask(self, url: str, tier: TierName) -> OwnShare | None:
        try:
            async with self._slots, asyncio.timeout(ASK_TIMEOUT_S):
                async with self._client.stream("GET", f"{url}/autoscale/v1/{tier}", params={"scope": "self"}) as answer:
                    body = await _read(answer)
                share = msgspec.json.decode(body, type=OwnShare)
        except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
            logger.warning("a gateway does not tell its share", url=url, reason=str(error) or type(error).__name__)
            return None
        return share if share.share.tier == tier else None


async def _read(answer: httpx.Response) -> bytes:
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}")
    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
