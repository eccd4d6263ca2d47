"""Discovery against an API server that misbehaves as real ones do: nothing is lost, nothing stays that has gone."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from common import discovery_kubernetes, kubernetes_api
from common.discovery_kubernetes import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff, KubernetesMembers
from common.kubernetes_api import connect
from common.members import Member
from tests.kubernetes.fake_api import NAMESPACE, FakeApi, addresses, endpoint, endpoint_slice, fake_api

SERVICE = "decoder"
PORTS = {"control": 7201}
STATUSES = [401, 403, 410, 429, 500, 504]
REASONS = ["unreachable", "malformed", "watch ended at once", *map(str, STATUSES)]


def decoders(name: str, *entries: Any, **fields: Any) -> Any:
    return {**endpoint_slice(name, SERVICE, list(entries), PORTS), **fields}


class Watched:
    """A source that runs, and what it told."""

    def __init__(self, api: FakeApi, source: KubernetesMembers) -> None:
        self.api = api
        self.source = source
        self.told: list[Sequence[Member]] = []
        self._before: dict[str, float] = {}
        self._before = {reason: self.errors(reason) for reason in REASONS}

    @property
    def hosts(self) -> list[str]:
        return sorted(member.endpoints[0].split("/")[2].partition(":")[0] for member in (self.told or [[]])[-1])

    async def until(self, *hosts: str) -> None:
        await self.api.until(lambda: self.told and self.hosts == sorted(hosts))

    def errors(self, reason: str) -> float:
        """Failures since this was made."""
        return self.metric("tandem_discovery_errors_total", reason=reason) - self._before.get(reason, 0.0)

    def metric(self, name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"source": self.source.name, **labels}) or 0.0


def source_of(api: FakeApi, relist_s: float = 120.0, longest_pause_s: float = 0.05) -> KubernetesMembers:
    return KubernetesMembers(
        partial(connect, api.url),
        NAMESPACE,
        SERVICE,
        ["control"],
        relist_s=relist_s,
        first_pause_s=0.01,
        longest_pause_s=longest_pause_s,
    )


@asynccontextmanager
async def watching(api: FakeApi, **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(api, source_of(api, **options))
    task = asyncio.create_task(watched.source.run(watched.told.append))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.until(lambda: not [t for t in threading.enumerate() if t.name.startswith("discovery-")])


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        server.put(decoders("d", endpoint("10.0.0.1", "decoder-1")))
        yield server


async def test_members_are_listed_then_followed(api: FakeApi) -> None:
    async with watching(api) as watched:
        await watched.until("10.0.0.1")
        api.put(decoders("d", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        await watched.until("10.0.0.1", "10.0.0.2")
        api.put(decoders("e", endpoint("10.0.0.3")))
        await watched.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        api.delete("d")
        await watched.until("10.0.0.3")
        assert (api.num_lists, api.num_watches) == (1, 1)


async def test_other_services_are_none_of_it(api: FakeApi) -> None:
    api.put(endpoint_slice("x", "web", [endpoint("10.9.9.9")], PORTS))
    async with watching(api) as watched:
        await watched.until("10.0.0.1")
        await api.until(lambda: api.num_open)
        api.put(endpoint_slice("y", "web", [endpoint("10.9.9.8")], PORTS))
        api.put(decoders("d", endpoint("10.0.0.2")))
        await watched.until("10.0.0.2")


async def test_a_terminating_pod_gets_no_new_work_and_stays_while_it_serves(api: FakeApi) -> None:
    async with watching(api) as watched:
        await watched.until("10.0.0.1")
        api.put(decoders("d", endpoint("10.0.0.1", ready=False, terminating=True), endpoint("10.0.0.2")))
        await watched.until("10.0.0.1", "10.0.0.2")
        assert {m.endpoints[0]: m.takes_new_work for m in watched.told[-1]} == {
            "tcp://10.0.0.1:7201": False,
            "tcp://10.0.0.2:7201": True,
        }
        assert watched.metric("tandem_discovery_members", state="serving") == 1
        api.put(decoders("d", endpoint("10.0.0.1", ready=False, serving=False, terminating=True)))
        await api.until(lambda: watched.hosts == [])
        assert watched.metric("tandem_discovery_members", state="terminating") == 1


async def test_a_watch_that_breaks_is_followed_by_a_list(api: FakeApi) -> None:
    async with watching(api) as watched:
        await api.until(lambda: api.num_open)
        api.is_mute = True
        api.put(decoders("d", endpoint("10.0.0.7")))
        api.is_mute = False
        api.break_watches()
        await watched.until("10.0.0.7")
        assert api.num_lists == 2
        assert watched.errors("unreachable") >= 1


async def test_a_watch_that_the_server_ends_is_followed_by_a_list(api: FakeApi) -> None:
    async with watching(api) as watched:
        for number in range(2, 6):
            await api.until(lambda: api.num_open)
            api.is_mute = True
            api.put(decoders("d", endpoint(f"10.0.0.{number}")))
            api.is_mute = False
            api.end_watches()
            await watched.until(f"10.0.0.{number}")


async def test_a_delete_that_no_watch_told_of_is_mended_by_the_next_list(api: FakeApi) -> None:
    api.put(decoders("gone", endpoint("10.0.0.9")))
    async with watching(api, relist_s=1.0) as watched:
        await watched.until("10.0.0.1", "10.0.0.9")
        await api.until(lambda: api.num_open)
        api.delete("gone", is_told=False)
        await watched.until("10.0.0.1")


async def test_a_history_that_was_compacted_is_listed_anew(api: FakeApi) -> None:
    async with watching(api) as watched:
        await api.until(lambda: api.num_open)
        api.is_mute = True
        api.put(decoders("d", endpoint("10.0.0.4")))
        api.is_mute = False
        api.say("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        await watched.until("10.0.0.4")
        assert watched.errors("410") == 1


@pytest.mark.parametrize("status", STATUSES)
async def test_a_refused_list_or_watch_is_tried_again(api: FakeApi, status: int) -> None:
    """504 is `too large resource version`, after which others hung."""
    api.list_answers.extend([200, status, status])
    api.watch_answers.append(status)
    async with watching(api) as watched:
        await api.until(lambda: api.num_open)
        assert watched.hosts == ["10.0.0.1"]
        assert api.num_lists == 4
        assert watched.errors(str(status)) >= 3


async def test_a_slow_api_server_blocks_nothing_and_is_waited_for(api: FakeApi) -> None:
    api.delay_s = 0.5
    async with watching(api) as watched:
        began, ticks = time.monotonic(), 0
        while not watched.told:
            await asyncio.sleep(0.005)
            ticks += 1
        assert time.monotonic() - began >= 0.5
        assert ticks > 20  # the event loop went on


async def test_an_api_server_that_never_answers_is_given_up_and_asked_again(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "READ_S", 0.1)
    api.delay_s = 30.0
    async with watching(api) as watched:
        await api.until(lambda: watched.errors("unreachable") >= 2)
        api.delay_s = 0.0
        await watched.until("10.0.0.1")


async def test_a_watch_over_a_dead_connection_is_given_up_and_listed_anew(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says that it is dead: neither does the server end the watch in its time, nor does anything break."""
    monkeypatch.setattr(discovery_kubernetes, "SLACK_S", 0.1)
    api.ends_watches = False
    async with watching(api, relist_s=1.0) as watched:
        await watched.until("10.0.0.1")
        await api.until(lambda: api.num_open)
        api.is_mute = True
        api.put(decoders("d", endpoint("10.0.0.3")))
        await watched.until("10.0.0.3")


async def test_a_watch_from_a_version_that_is_gone_is_listed_anew(api: FakeApi) -> None:
    """The history was compacted between the list and the watch: the watch itself answers with the error."""
    api.compacts_before_watch = True
    async with watching(api) as watched:
        await api.until(lambda: api.num_lists >= 2)
        assert watched.errors("410") >= 1
        await api.until(lambda: api.num_open)
        api.put(decoders("d", endpoint("10.0.0.4")))
        await watched.until("10.0.0.4")


async def test_an_answer_that_breaks_in_its_middle_or_is_no_list_changes_nothing(api: FakeApi) -> None:
    async with watching(api) as watched:
        await watched.until("10.0.0.1")
        await api.until(lambda: api.num_open)
        api.list_bodies.extend([b'{"metadata": {"resourceVersion": "9"}, "items": [', b"[]", b'{"items": []}', b"null"])
        api.list_bodies.append(b"[" * 100_000)
        api.break_watches()
        await api.until(lambda: not api.list_bodies and api.num_open)
        assert watched.hosts == ["10.0.0.1"]
        assert len(watched.told) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[]\n",
        b'{"type": "ADDED"}\n',
        b'"text"\n',
        b'{"type": "ERROR", "object": null}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"x" * (5 << 20) + b"\n",
    ],
    ids=lambda line: repr(line[:30]),
)
async def test_what_is_no_event_is_followed_by_a_list(api: FakeApi, line: bytes) -> None:
    async with watching(api) as watched:
        await api.until(lambda: api.num_open)
        api.is_mute = True
        api.put(decoders("d", endpoint("10.0.0.5")))
        api.is_mute = False
        for watch in api._watches:
            watch.put_nowait(line)
        await watched.until("10.0.0.5")


async def test_a_malformed_slice_changes_nothing_and_is_counted(api: FakeApi) -> None:
    api.put({"metadata": {"name": "bad"}, "endpoints": 17}, "bad")
    api.put("no object at all", "worse")
    async with watching(api) as watched:
        await watched.until("10.0.0.1")
        await api.until(lambda: api.num_open)
        api.put(decoders("d", endpoint("10.0.0.1"), ports=None))
        api.put(decoders("e", {"addresses": []}, endpoint("10.0.0.6")))
        await watched.until("10.0.0.1", "10.0.0.6")
        await api.until(lambda: watched.errors("malformed") >= 4)


async def test_an_api_server_that_is_away_leaves_the_last_known_members(api: FakeApi) -> None:
    async with watching(api) as watched:
        with capture_logs() as logs:
            await watched.until("10.0.0.1")
            await api.until(lambda: api.num_open)
            await api.stop()
            failed = watched.errors("unreachable")
            await api.until(lambda: watched.errors("unreachable") >= failed + 2)
            num_said = len(logs)
            await api.until(lambda: watched.errors("unreachable") >= failed + 6)
            assert len(logs) == num_said  # an outage is told once, not with each try
            assert watched.hosts == ["10.0.0.1"]
            assert watched.source.status()["failing"] == "unreachable"
            age = watched.metric("tandem_discovery_list_age_seconds")
            await api.until(lambda: watched.metric("tandem_discovery_list_age_seconds") > age)
            api.slices.clear()
            api.put(decoders("n", endpoint("10.0.0.8")))
            await api.start()
            await watched.until("10.0.0.8")
            assert watched.source.status()["failing"] is None
        said = [(line["log_level"], line["event"]) for line in logs]
        assert ("warning", "endpoints cannot be followed; the last known members stay") in said
        assert ("info", "endpoints are listed again") in said


async def test_a_source_waits_for_an_api_server_that_is_not_there_yet() -> None:
    api = FakeApi()
    async with watching(api) as watched:
        await api.until(lambda: watched.source.status()["failing"] == "unreachable")
        api.put(decoders("d", endpoint("10.0.0.1")))
        await api.start()
        await watched.until("10.0.0.1")
    await api.stop()


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered(api: FakeApi) -> None:
    async with watching(api, longest_pause_s=10.0) as watched:
        await watched.until("10.0.0.1")
        for _ in range(4):
            await api.until(lambda: api.num_open)
            api.end_watches()
            await api.until(lambda: not api.num_open)
        assert watched.errors("watch ended at once") >= 4
        assert watched.source._backoff.next() >= 0.08


async def test_five_hundred_endpoints_come_at_once_and_one_by_one(api: FakeApi) -> None:
    found = list(addresses(500, first=1000))
    for start in range(0, 500, 100):
        api.put(decoders(f"s{start}", *(endpoint(a) for a in found[start : start + 100])))
    async with watching(api) as watched:
        await watched.until("10.0.0.1", *found)
        await api.until(lambda: api.num_open)
        for number in range(1, 50):
            api.put(decoders("d", *(endpoint(a) for a in addresses(number, first=5000))))
        await watched.until(*addresses(49, first=5000), *found)
        assert api.num_lists == 1


def test_pauses_double_to_a_limit_and_half_of_each_is_drawn() -> None:
    least, most = Backoff(0.5, 4.0, lambda: 0.0), Backoff(0.5, 4.0, lambda: 1.0)
    assert [least.next() for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert [most.next() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    most.reset()
    assert most.next() == 0.5


def test_a_minute_without_a_server_is_a_dozen_tries_at_most() -> None:
    for luck in (0.0, 1.0):  # of the draw
        pauses, elapsed, tries = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, lambda luck=luck: luck), 0.0, 0
        while elapsed < 60.0:
            elapsed, tries = elapsed + pauses.next(), tries + 1
        assert 5 <= tries <= 10


async def test_no_way_to_an_api_server_ends_the_source_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.errors import ConfigError

    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    source = KubernetesMembers(partial(connect, None), NAMESPACE, SERVICE, ["control"])
    with pytest.raises(ConfigError, match="--kubernetes-api"):
        await source.run(lambda members: None)
