"""Of several autoscalers one acts, by a Lease: when it falls silent, is slow, ends, or is refused the lease."""

import asyncio
import json
import threading
from typing import Any, cast

import pytest

from common.autoscale import TierName
from common.autoscale_shares import Collected
from common.kubernetes_api import KubernetesError
from deploy.autoscaler.cluster import Cluster, Lease
from deploy.autoscaler.election import Election
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.stage import Stage


async def test_of_two_only_one_acts_and_the_other_follows_when_it_falls_silent(api: FakeApi) -> None:
    first, second = Stage(api, "one"), Stage(api, "two")
    second.clock = first.clock
    second.autoscaler._clock = first.clock
    await first.look()
    await second.autoscaler.look()
    assert api.leases["lease"]["spec"]["holderIdentity"] == "one"
    second.shares.work["encoder"] = 4.3
    for _ in range(6):
        await first.look()
        await second.autoscaler.look()
    assert first.replicas() == (2, 1)  # the one that leads saw no work
    first.clock.now += 10.1
    assert not first.election.is_leader(first.clock.now)  # before the other may begin
    await second.autoscaler.look()
    assert second.replicas() == (2, 1)
    first.clock.now += 5.1
    await second.autoscaler.look()
    assert api.leases["lease"]["spec"]["holderIdentity"] == "two"
    assert api.leases["lease"]["spec"]["leaseTransitions"] == 2
    assert second.replicas() == (5, 1)
    await first.autoscaler.look()
    assert not first.election.is_leader(first.clock.now)


async def test_two_that_take_a_free_lease_at_once_do_not_both_lead(api: FakeApi) -> None:
    first, second = Stage(api, "one"), Stage(api, "two")
    led = await asyncio.gather(*(asyncio.to_thread(stage.election.run, 1000.0) for stage in (first, second)))
    assert sorted(led) == [False, True]


async def test_a_leader_that_cannot_renew_stops_before_its_lease_ends(api: FakeApi) -> None:
    stage = Stage(api)
    await stage.look()
    api.statuses["GET", "/lease"] = 500
    stage.shares.work["encoder"] = 4.3
    stage.clock.now += 11.0
    await stage.look()
    assert stage.replicas() == (2, 1)


@pytest.mark.parametrize("status", [401, 403, 409, 429, 500, 504])
@pytest.mark.parametrize("call", [("GET", "/lease"), ("POST", "/leases")])
async def test_nobody_acts_who_cannot_have_the_lease(api: FakeApi, call: tuple[str, str], status: int) -> None:
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    api.statuses[call] = status
    await stage.look(2)
    assert stage.replicas() == (2, 1)
    api.statuses.clear()
    await stage.look()
    assert stage.replicas() == (5, 1)


@pytest.mark.parametrize("lease", [{}, [], {"kind": "Lease", "metadata": {}}, {"kind": "Status"}], ids=json.dumps)
async def test_a_lease_that_is_none_is_not_taken_for_a_free_one(api: FakeApi, lease: Any) -> None:
    api.leases["lease"] = lease
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    await stage.look()
    assert {method for method, _ in api.requests} == {"GET"}


async def test_a_leader_whose_lease_ends_while_it_asks_does_not_act(api: FakeApi) -> None:
    """Gateways, or the API server, take so long to answer that another autoscaler may have begun."""
    stage = Stage(api)
    collect = stage.shares.collect

    async def collect_slowly(tier: TierName) -> Collected:
        stage.clock.now += 10.1
        return await collect(tier)

    stage.shares.collect = collect_slowly  # type: ignore[method-assign]
    stage.shares.work["encoder"] = 4.3
    await stage.look()
    assert stage.election.is_leader(stage.clock.now - 25.0)
    assert stage.replicas() == (2, 1)


async def test_one_that_was_restarted_takes_no_pod_before_it_has_seen_a_window(api: FakeApi) -> None:
    first = Stage(api)
    await first.look(59)
    second = Stage(api)  # under the same name, as a pod that restarts in place; it has seen nothing
    second.clock.now = first.clock.now
    await second.look(60)
    assert second.replicas() == (2, 1)
    await second.look(2)
    assert second.replicas() == (1, 1)


async def test_a_leader_that_ends_leaves_the_lease_to_the_next(api: FakeApi) -> None:
    stage = Stage(api)
    task = asyncio.create_task(stage.autoscaler.run())
    await api.until(lambda: api.leases)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert api.leases["lease"]["spec"]["holderIdentity"] == ""
    other = Stage(api, "two")
    await other.look()
    assert other.election.is_leader(other.clock.now - 5.0)


class OneLease:
    """A cluster that holds one lease; the second write of it waits a little for somebody else to read it."""

    def __init__(self) -> None:
        self.held: Lease | None = None
        self.writes, self.reads = 0, 0
        self.renewing, self.read_meanwhile = threading.Event(), threading.Event()

    def lease(self, name: str) -> Lease | None:
        if self.renewing.is_set():
            self.read_meanwhile.set()
        return self.held

    def write_lease(self, name: str, holder: str, duration_s: float, before: Lease | None) -> None:
        self.writes += 1
        if self.writes == 2:
            self.renewing.set()
            self.read_meanwhile.wait(0.2)
        if self.held is not None and (before is None or before.version != self.held.version):
            raise KubernetesError("conflict", 409)
        self.held = Lease(holder, str(self.writes), 15, str(self.writes), 0)


async def test_a_renewal_that_is_under_way_does_not_keep_the_lease_from_being_given_back() -> None:
    cluster = OneLease()
    election = Election(cast(Cluster, cluster), "lease", "one", 15.0)
    assert election.run(0.0)
    renewal = asyncio.create_task(asyncio.to_thread(election.run, 1.0))
    await asyncio.to_thread(cluster.renewing.wait, 10.0)
    await asyncio.to_thread(election.resign, 1.0)
    await renewal
    assert cluster.held is not None
    assert cluster.held.holder == ""
    assert not election.run(2.0)
