"""`tandem autoscaler` against an API server that refuses, conflicts and goes away: it never acts by guesswork."""

import asyncio
import json
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.autoscale import Share
from common.errors import ConfigError
from common.kubernetes_api import KubernetesError, connect
from common.members import Member
from deploy.autoscaler.__main__ import open_autoscaler
from deploy.autoscaler.cluster import DELETION_COST, Cluster
from deploy.autoscaler.config import AutoscalerSettings
from deploy.autoscaler.scaler import deletion_costs
from deploy.local import free_port
from tests.kubernetes.fake_api import NAMESPACE, FakeApi
from tests.kubernetes.stage import Stage, metric
from tests.paths import REPOSITORY


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


@pytest.mark.parametrize(
    ("status", "outcome"), [(409, "conflict"), (403, "failed"), (422, "failed"), (429, "failed"), (500, "failed")]
)
async def test_a_change_that_is_refused_is_read_again_and_decided_anew(api: FakeApi, status: int, outcome: str) -> None:
    stage = Stage(api)
    stage.shares.work["encoder"] = 4.3
    labels = {"tier": "encoder", "direction": "up", "outcome": outcome}
    before = metric("tandem_autoscaler_scalings_total", **labels)
    api.statuses["PUT", "encoders/scale"] = status
    await stage.look()
    assert stage.replicas() == (2, 1)
    assert not api.events
    assert metric("tandem_autoscaler_scalings_total", **labels) == before + 1
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
