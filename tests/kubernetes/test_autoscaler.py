"""`tandem autoscaler` against an API server that refuses, conflicts and goes away: one acts, and never by guesswork."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from common.autoscale import Policy, Share, TierName
from common.autoscale_shares import Collected, ShareCollector
from common.errors import ConfigError
from common.kubernetes_api import KubernetesError, connect
from common.members import Member, StaticMembers
from deploy.autoscaler.__main__ import open_autoscaler
from deploy.autoscaler.cluster import DELETION_COST, Cluster, Lease
from deploy.autoscaler.config import AutoscalerSettings
from deploy.autoscaler.election import Election
from deploy.autoscaler.scaler import Autoscaler, TierScaler, deletion_costs
from deploy.local import free_port
from tests.kubernetes.fake_api import NAMESPACE, FakeApi, fake_api
from tests.paths import REPOSITORY


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeShares:
    """Gateways that count what the test says."""

    def __init__(self) -> None:
        self.work: dict[str, float] = {"encoder": 0.0, "decoder": 0.0}
        self.loads: dict[str, float] = {}
        self.asked = self.answered = 2

    async def collect(self, tier: TierName) -> Collected:
        share = Share(tier=tier, replicas=self.work[tier], loads=self.loads)
        return Collected(tier, {"g": share} if self.answered else {}, self.asked, self.answered)


class Stage:
    """An autoscaler, its gateways, its cluster and its clock."""

    def __init__(self, api: FakeApi, identity: str = "one", **options: Any) -> None:
        self.api, self.clock, self.shares = api, Clock(), FakeShares()
        self.cluster = Cluster(connect(api.url), NAMESPACE)
        self.election = Election(self.cluster, "lease", identity, 15.0)
        policy = Policy(min_replicas=1, max_replicas=8, window_s=300.0, down_every_s=60.0)
        self.tiers = [TierScaler("encoder", "encoders", policy), TierScaler("decoder", "decoders", policy)]
        self.autoscaler = Autoscaler(
            self.tiers, self.shares, self.cluster, self.election, interval_s=5.0, clock=self.clock, **options
        )

    async def look(self, times: int = 1, every_s: float = 5.0) -> None:
        for _ in range(times):
            await self.autoscaler.look()
            self.clock.now += every_s

    def replicas(self) -> tuple[int, int]:
        return tuple(self.api.scales[name]["spec"]["replicas"] for name in ("encoders", "decoders"))  # type: ignore


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        server.add_deployment("encoders", 2)
        server.add_deployment("decoders", 1)
        yield server


async def test_tiers_are_scaled_apart_with_an_event_each(api: FakeApi) -> None:
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    await stage.look()
    assert stage.replicas() == (5, 1)
    assert len(api.events) == 1
    assert api.events[0]["involvedObject"]["name"] == "encoders"
    assert api.events[0]["reason"] == "ScaledUp"
    assert "from 2 to 5 replicas" in api.events[0]["message"]
    stage.shares.work = {"encoder": 0.5, "decoder": 2.5}
    await stage.look(62)
    assert stage.replicas() == (4, 3)
    await stage.look(13)
    assert stage.replicas() == (3, 3)


async def test_a_dry_run_says_once_what_it_would_do_and_writes_nothing(api: FakeApi) -> None:
    stage = Stage(api, is_dry_run=True)
    stage.shares.work["encoder"] = 4.3
    with capture_logs() as logs:
        await stage.look(3)
    assert stage.replicas() == (2, 1)
    assert {method for method, _ in api.requests} == {"GET"}
    assert [(line["replicas"], line["desired"]) for line in logs if line["event"] == "a tier would be scaled"] == [
        (2, 5)
    ]


async def test_a_conflict_is_read_again_and_decided_anew(api: FakeApi) -> None:
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    before = metric("tandem_autoscaler_scalings_total", tier="encoder", direction="up", outcome="conflict")
    api.statuses["PUT", "encoders/scale"] = 409
    await stage.look()
    assert stage.replicas() == (2, 1)
    assert metric("tandem_autoscaler_scalings_total", tier="encoder", direction="up", outcome="conflict") == before + 1
    del api.statuses["PUT", "encoders/scale"]
    await stage.look()
    assert stage.replicas() == (5, 1)


async def test_a_scale_that_changed_since_it_was_read_is_not_overwritten(api: FakeApi) -> None:
    cluster = Cluster(connect(api.url), NAMESPACE)
    scale = await asyncio.to_thread(cluster.scale, "encoders")
    await asyncio.to_thread(cluster.set_scale, scale, 3)
    with pytest.raises(KubernetesError, match="409"):
        await asyncio.to_thread(cluster.set_scale, scale, 7)
    assert api.scales["encoders"]["spec"]["replicas"] == 3


NO_SCALES: list[Any] = [
    {},
    [],
    "text",
    {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 200},
    {"kind": "Scale", "metadata": {}, "spec": {"replicas": 3}},
    {"kind": "Deployment", "metadata": {"resourceVersion": "1"}, "spec": {"replicas": 3}},
    *(
        {"kind": "Scale", "metadata": {"resourceVersion": "1"}, "spec": {"replicas": bad}, "status": {"replicas": 3}}
        for bad in ("3", True, -1, 2.5, None, [])
    ),
    {"kind": "Scale", "metadata": {"resourceVersion": "1"}, "spec": {"replicas": 3}, "status": {"replicas": "3"}},
]


@pytest.mark.parametrize("answer", NO_SCALES, ids=json.dumps)
async def test_an_answer_that_is_no_scale_is_not_taken_for_zero_replicas(api: FakeApi, answer: Any) -> None:
    stage = Stage(api)
    api.scales["encoders"] = answer
    stage.shares.work = {"encoder": 4.3, "decoder": 2.5}
    await stage.look()
    assert [path.split("/")[-2] for method, path in api.requests if method == "PUT"] == ["decoders"]


async def test_a_scale_of_zero_leaves_its_number_out(api: FakeApi) -> None:
    del api.scales["encoders"]["spec"]["replicas"]
    scale = await asyncio.to_thread(Cluster(connect(api.url), NAMESPACE).scale, "encoders")
    assert (scale.wanted, scale.present) == (0, 2)


@pytest.mark.parametrize("status", [403, 404, 429, 500])
async def test_one_tier_that_cannot_be_read_does_not_keep_the_other_from_its_size(api: FakeApi, status: int) -> None:
    stage = Stage(api)
    stage.shares.work = {"encoder": 4.3, "decoder": 2.5}
    api.statuses["GET", "encoders/scale"] = status
    await stage.look()
    assert stage.replicas() == (2, 3)


async def test_events_that_are_forbidden_do_not_keep_it_from_scaling(api: FakeApi) -> None:
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    api.statuses["POST", "/events"] = 403
    await stage.look()
    assert stage.replicas() == (5, 1)


async def test_no_answer_from_any_gateway_changes_nothing(api: FakeApi) -> None:
    stage = Stage(api)
    stage.shares.answered = 0
    await stage.look(100)
    assert stage.replicas() == (2, 1)


async def test_an_answer_without_all_gateways_lets_a_tier_grow_and_not_shrink(api: FakeApi) -> None:
    stage = Stage(api)
    stage.shares.answered = 1
    await stage.look(100)
    assert stage.replicas() == (2, 1)
    stage.shares.work["encoder"] = 3.5
    await stage.look()
    assert stage.replicas() == (4, 1)


async def test_replicas_that_somebody_else_set_are_taken_as_they_are(api: FakeApi) -> None:
    """Whoever scaled up by hand keeps it for a window."""
    stage = Stage(api)
    await stage.look(30)
    api.scales["encoders"]["spec"]["replicas"] = 6
    await stage.look(50)
    assert stage.replicas() == (6, 1)
    await stage.look(30)
    assert stage.replicas()[0] in (4, 5)


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
    assert stage_of(first) == (2, 1)  # the one that leads saw no work
    first.clock.now += 10.1
    assert not first.election.is_leader(first.clock.now)  # before the other may begin
    await second.autoscaler.look()
    assert stage_of(second) == (2, 1)
    first.clock.now += 5.1
    await second.autoscaler.look()
    assert api.leases["lease"]["spec"]["holderIdentity"] == "two"
    assert api.leases["lease"]["spec"]["leaseTransitions"] == 2
    assert stage_of(second) == (5, 1)
    await first.autoscaler.look()
    assert not first.election.is_leader(first.clock.now)


def stage_of(stage: Stage) -> tuple[int, int]:
    return stage.replicas()


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


async def test_pods_with_least_to_do_go_first(api: FakeApi) -> None:
    stage = Stage(api, sets_costs=True)
    stage.tiers[0].members = [Member((f"tcp://10.0.0.{n}:7101",), True, f"encoder-{n}") for n in (1, 2, 3)]
    stage.shares.loads = {"tcp://10.0.0.1:7101": 9.0, "tcp://10.0.0.2:7101": 0.0, "tcp://10.0.0.3:7101": 4.0}
    await stage.look()
    costs = {name: pod["metadata"]["annotations"][DELETION_COST] for name, pod in api.pods.items()}
    assert costs == {"encoder-1": "200", "encoder-2": "0", "encoder-3": "100"}
    patches = [entry for entry in api.requests if entry[0] == "PATCH"]
    await stage.look(10)
    assert [entry for entry in api.requests if entry[0] == "PATCH"] == patches  # nothing changed


async def test_beside_another_autoscaler_pods_are_marked_and_replicas_left_alone(api: FakeApi) -> None:
    stage = Stage(api, sets_costs=True, leaves_replicas=True)
    stage.tiers[0].members = [Member((f"tcp://10.0.0.{n}:7101",), True, f"encoder-{n}") for n in (1, 2)]
    stage.shares.loads = {"tcp://10.0.0.1:7101": 9.0}
    stage.shares.work["encoder"] = 4.3
    await stage.look(2)
    assert set(api.pods) == {"encoder-1", "encoder-2"}
    assert not [path for _, path in api.requests if path.endswith("/scale")]
    other = Stage(api, "two", sets_costs=True, leaves_replicas=True)  # it does not lead
    other.tiers[0].members = [Member(("tcp://10.0.0.3:7101",), True, "encoder-3")]
    await other.look()
    assert "encoder-3" not in api.pods


async def test_a_dry_run_marks_no_pods(api: FakeApi) -> None:
    stage = Stage(api, is_dry_run=True, sets_costs=True)
    stage.tiers[0].members = [Member(("tcp://10.0.0.1:7101",), True, "encoder-1")]
    await stage.look()
    assert {method for method, _ in api.requests} == {"GET"}


def test_leaving_the_replicas_without_marking_pods_is_no_work_at_all() -> None:
    settings = AutoscalerSettings(gateways=("http://g:8000",), encoder_deployment="encoders", leave_replicas=True)
    with pytest.raises(ConfigError, match="--deletion-cost"):
        asyncio.run(open_autoscaler(settings))


async def test_a_right_to_pods_that_is_missing_does_not_keep_it_from_scaling(api: FakeApi) -> None:
    stage = Stage(api, sets_costs=True)
    stage.tiers[0].members = [Member(("tcp://10.0.0.1:7101",), True, "encoder-1")]
    stage.shares.work["encoder"] = 4.3
    api.statuses["PATCH", "encoder-1"] = 403
    await stage.look()
    assert stage.replicas() == (5, 1)


def test_equal_loads_cost_the_same() -> None:
    members = [Member((f"e{n}",), True, f"p{n}") for n in range(3)] + [Member(("x",), True, "")]
    costs = deletion_costs(members, Share(tier="encoder", loads={"e1": 5.0}))
    assert costs["p0"] == costs["p2"] < costs["p1"]
    assert "" not in costs


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


async def test_the_command_scales_by_what_a_gateway_answers_and_ends_with_0(api: FakeApi) -> None:
    """The real process: a gateway's JSON in, a scale and an event out, SIGTERM gives the lease back."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from common.service import http_server

    def share(request: Any) -> JSONResponse:
        tier = request.path_params["tier"]
        work = 3.5 if tier == "encoder" else 0.0
        return JSONResponse({"gateway": "g", "share": {"tier": tier, "replicas": work}})

    port = free_port()
    server = http_server(Starlette(routes=[Route("/autoscale/v1/{tier}", share)]), "127.0.0.1", port)
    serving = asyncio.create_task(server.serve_until_cancelled())
    arguments = ["--gateways", f"http://127.0.0.1:{port}", "--kubernetes-api", api.url, "--namespace", NAMESPACE]
    arguments += ["--encoder-deployment", "encoders", "--interval-s", "0.1", "--http-port", str(free_port())]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.autoscaler", *arguments),
        cwd=REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await api.until(lambda: api.scales["encoders"]["spec"]["replicas"] == 4 and api.events, timeout_s=30)
        process.terminate()
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert api.leases["tandem-autoscaler"]["spec"]["holderIdentity"] == ""
    finally:
        if process.returncode is None:
            process.kill()
        server.should_exit = True
        await serving


# Shares of gateways.


def gateways(answers: dict[str, Any], clock: Clock | None = None) -> ShareCollector:
    """A collector whose gateways answer so: a body, a status, or an exception."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["scope"] == "self"
        found = answers[request.url.host]
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, content=found)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=1.0)
    collector = ShareCollector(StaticMembers([]), client, clock or Clock())
    collector._set_members([Member((f"http://{host}:8000",)) for host in answers])
    return collector


def body(gateway: str, replicas: float, tier: str = "encoder") -> bytes:
    return json.dumps({"gateway": gateway, "share": {"tier": tier, "replicas": replicas}}).encode()


async def test_a_gateway_that_is_silent_for_minutes_is_not_waited_for_any_more() -> None:
    """A pod that restarts for ever stays in the list of a Service that publishes addresses that are not ready."""
    clock = Clock()
    answers: dict[str, Any] = {"a": body("g1", 1.5), "b": httpx.ConnectError("refused")}
    collector = gateways(answers, clock)
    assert not (await collector.collect("encoder")).is_complete
    clock.now += 299.0
    assert not (await collector.collect("encoder")).is_complete
    clock.now += 2.0
    assert (await collector.collect("encoder")).is_complete
    answers["b"] = body("g2", 1.0)
    assert (await collector.collect("encoder")).total.replicas == 2.5
    answers["b"] = httpx.ConnectError("refused")
    assert not (await collector.collect("encoder")).is_complete


async def test_shares_are_added_and_a_gateway_that_is_listed_twice_counts_once() -> None:
    collected = await gateways({"a": body("g1", 1.5), "b": body("g2", 2.0), "c": body("g2", 2.0)}).collect("encoder")
    assert collected.total.replicas == 3.5
    assert collected.is_complete


@pytest.mark.parametrize(
    "bad",
    [
        500,
        404,
        b"",
        b"<html>",
        b'{"gateway": "", "share": {"tier": "encoder"}}',
        b'{"gateway": "g", "share": {"tier": "encoder", "replicas": -1}}',
        b'{"gateway": "g", "share": {"tier": "encoder", "replicas": NaN}}',
        b'{"gateway": "g", "share": {"tier": "walrus"}}',
        body("g", 1.0, tier="decoder"),
        b" " * (5 << 20),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
    ],
)
async def test_an_answer_that_is_none_makes_the_sum_incomplete(bad: Any) -> None:
    collected = await gateways({"a": body("g1", 1.5), "b": bad}).collect("encoder")
    assert collected.total.replicas == 1.5
    assert not collected.is_complete
