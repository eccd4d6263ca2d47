"""Members of a tier from Kubernetes: lists and watches the EndpointSlices of one Service in a thread of its own.

Owns that thread and its pace. A fresh watch for each attempt; a new list after every failure and at regular times,
since a watch that missed an event never says so; growing pauses with jitter between failures. While the API server is
away the last known members stay, and the age of the last list tells. The thread calls nothing but the API server.
"""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from common.endpoint_slices import SliceCache
from common.kubernetes_api import KubernetesError, call, lines, watch
from common.members import Member, OnMembers
from common.metrics import Counter, Gauge

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

logger = structlog.get_logger(__name__)

MEMBERS = Gauge("tandem_discovery_members", "Endpoints that Kubernetes lists", ["source", "state"])
LIST_AGE_SECONDS = Gauge("tandem_discovery_list_age_seconds", "Time since the endpoints were last listed", ["source"])
RELISTS = Counter("tandem_discovery_relists_total", "Lists of endpoints that succeeded", ["source"])
FAILURES = Counter("tandem_discovery_errors_total", "Lists and watches that failed", ["source", "reason"])

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 5.0  # a watch that lived so long, or told of a change, was no failure
SLACK_S = 5.0  # in which the server may still end a watch whose time is over
_GONE = 410


class Backoff:
    """Pauses that double, each with half of it at random, so that many watchers do not come back together."""

    def __init__(self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._draw = draw
        self._next_s = first_s

    def next(self) -> float:
        """Seconds to wait now."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._next_s = self._first_s


class KubernetesMembers:
    """The endpoints of one Service, by the names of the ports that make a member. A `MemberSource`."""

    def __init__(
        self,
        api: "Callable[[], ApiClient]",
        namespace: str,
        service: str,
        port_names: Sequence[str],
        *,
        scheme: str = "tcp",
        relist_s: float = 120.0,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        """`api` connects, and is called in the thread, since it imports the client."""
        self.name = f"{namespace}/{service}"
        self._connect = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._cache = SliceCache(port_names, scheme)
        self._relist_s = relist_s
        self._backoff = Backoff(first_pause_s, longest_pause_s)
        self._stop = threading.Event()
        self._response: Any = None  # of the watch that is open
        self._listed_at: float | None = None
        self._began_at = time.monotonic()
        self._failure: str | None = None
        self._told: list[Member] | None = None
        LIST_AGE_SECONDS.labels(self.name).set_function(self.list_age_s)
        self._count()

    def list_age_s(self) -> float:
        """Seconds since the last list, or since the start while there was none."""
        return time.monotonic() - (self._listed_at if self._listed_at is not None else self._began_at)

    def status(self) -> dict[str, object]:
        """For `/ready`: what is known, how old it is, and what keeps it from being newer."""
        return {
            "source": f"kubernetes:{self.name}",
            "members": len(self._told or ()),
            "list_age_s": round(self.list_age_s(), 1),
            "failing": self._failure,
        }

    async def run(self, on_members: OnMembers) -> None:
        """Keep the list until cancelled. Raises ConfigError when there is no way to an API server."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(members: Sequence[Member]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(on_members, members)

        def finish(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(None) if error is None else ended.set_exception(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                self._work(tell)
            except Exception as exc:  # whatever ends the thread is the task's to raise
                error = exc
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, error)

        threading.Thread(target=work, name=f"discovery-{self.name}", daemon=True).start()
        try:
            await ended
        finally:
            self._stop.set()
            if (response := self._response) is not None:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closing just now
                    response.shutdown()

    def _work(self, tell: OnMembers) -> None:
        api = self._connect()
        while not self._stop.is_set():
            try:
                version = self._list(api, tell)
                began, was_told = time.monotonic(), self._watch(api, version, tell)
                if was_told or time.monotonic() - began >= min(STEADY_S, self._relist_s / 2):
                    self._backoff.reset()
                    continue
                self._note_failure("watch ended at once")
            except KubernetesError as error:
                if self._stop.is_set():
                    return
                self._note_failure(error.reason, str(error))
            self._stop.wait(self._backoff.next())

    def _list(self, api: "ApiClient", tell: OnMembers) -> str:
        answer = call(api, "GET", self._path, query=self._query)
        items, metadata = (answer.get("items"), answer.get("metadata")) if isinstance(answer, dict) else (None, None)
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(version, str) or not isinstance(items, list | None):
            raise KubernetesError("the list of EndpointSlices has no items or no resourceVersion")
        self._cache.replace(items or [])
        self._note_malformed()
        self._listed_at = time.monotonic()
        RELISTS.labels(self.name).inc()
        if self._failure is not None:
            logger.info("endpoints are listed again", source=self.name)
            self._failure = None
        self._publish(tell)
        return version

    def _watch(self, api: "ApiClient", version: str, tell: OnMembers) -> bool:
        """Follow changes until the next list is due or the server ends the watch; whether there was any event."""
        window_s = self._relist_s * random.uniform(0.8, 1.0)  # noqa: S311 - spreads the load of many watchers
        query = {
            **self._query,
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(window_s))),
            "allowWatchBookmarks": "true",
        }
        was_told, due_at = False, time.monotonic() + window_s
        with watch(api, self._path, query, window_s + SLACK_S) as response:
            self._response = response  # then look: who stops this sets `_stop` first, then shuts the answer down
            try:
                for line in lines(response) if not self._stop.is_set() else ():
                    if self._stop.is_set() or time.monotonic() > due_at:
                        break
                    was_told = self._apply(line, tell) or was_told
            finally:
                self._response = None
        return was_told

    def _apply(self, line: bytes, tell: OnMembers) -> bool:
        if not line.strip():
            return False
        try:
            event = json.loads(line)
            kind, item = event["type"], event["object"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise KubernetesError("a watch told of what is no event") from None
        if kind == "ERROR":
            code = item.get("code") if isinstance(item, dict) else None
            status = code if isinstance(code, int) else _GONE
            raise KubernetesError(f"a watch ended with status {status}", status)
        if kind == "BOOKMARK":
            return True
        if self._cache.apply(str(kind), item):
            self._publish(tell)
        self._note_malformed()
        return True

    def _publish(self, tell: OnMembers) -> None:
        members = self._cache.members()
        self._count()
        if members != self._told:
            self._told = members
            tell(members)

    def _count(self) -> None:
        for state, count in self._cache.count_by_state().items():
            MEMBERS.labels(self.name, state).set(count)

    def _note_malformed(self) -> None:
        found, self._cache.num_malformed = self._cache.num_malformed, 0
        if found:
            FAILURES.labels(self.name, "malformed").inc(found)
            logger.warning("endpoints without a usable address, or slices that are none, are skipped", count=found)

    def _note_failure(self, reason: str, text: str = "") -> None:
        """Count it, and say it once for each kind of failure."""
        FAILURES.labels(self.name, reason).inc()
        if reason != self._failure:
            logger.warning(
                "endpoints cannot be followed; the last known members stay",
                source=self.name,
                reason=text or reason,
                list_age_s=round(self.list_age_s(), 1),
            )
        self._failure = reason
