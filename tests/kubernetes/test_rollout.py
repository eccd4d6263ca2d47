"""Pods that end under load: real processes behind a fake API server, and no request is the worse."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.local import free_port
from tests.integration.cases.asking import client_of, error_of
from tests.integration.conftest import text_message
from tests.kubernetes.conftest import OUTAGE_S
from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.kubernetes.load import Films, Load, film, num_media_of, questions, stories, tokens_for, undisturbed
from tests.kubernetes.pods import DECODER, ENCODER, Deployment, Service, metric_at, sources
from tests.servable import save_servable
from tests.valkey import Valkey, running_valkey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROLLOUTS = 3
REQUESTS = 200
TOGETHER = 4
STORIES = 3
# With none the signal comes along with the news of it: work may still arrive, and what runs has to be drained.
PRE_STOPS_S = (0.0, 0.3)
GRACE_S = 30.0


async def is_all_in_redis(valkey: Valkey, num_media: int, folder: Path) -> bool:
    """Whether it has the embedding of each item, so that none was lost by an encoder that ended; or the encoders found
    it too slow, as a busy machine may be, and left it alone for a while."""
    logs = list(folder.glob("encoder-*.log"))  # noqa: ASYNC240 - some small files
    if any("Redis is skipped" in log.read_text() for log in logs):
        return True
    manifests = await valkey.client.keys("tandem:embedding:{*}")
    assert len(manifests) <= num_media
    return len(manifests) == num_media


@asynccontextmanager
async def gateway(api: FakeApi, folder: Path, environment: dict[str, str]) -> AsyncIterator[tuple[str, Service]]:
    """A gateway that discovers its peers, and ends in time."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    service = Service("gateway", [f"--port={port}"], environment, folder / "gateway.log")
    try:
        await service.start(f"{url}/ready")
        yield url, service
        assert await service.end(GRACE_S) == 0
    finally:
        service.kill()


def environment_of(api: FakeApi, folder: Path, **settings: str) -> dict[str, str]:
    """Settings of all services."""
    checkpoint, _ = save_servable(folder / "tiny", gain=3.0)
    return {
        "TANDEM_MODEL": str(checkpoint),
        "TANDEM_KUBERNETES_API": api.url,
        "TANDEM_DRAIN_TIMEOUT_S": str(GRACE_S - 5),
        "TANDEM_DTYPE": "float32",
        "TANDEM_THREADS": "1",
        "TANDEM_WARM_UP_S": "0",
        **sources(),
        **settings,
    }


async def test_a_rolling_update_of_both_tiers_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    """Decoders end in the middle of stories, encoders with videos and pictures to encode and leases on others."""
    async with fake_api() as api, running_valkey() as valkey:
        environment = environment_of(api, tmp_path, TANDEM_REDIS=valkey.url)
        options: dict[str, Any] = {"pre_stops_s": PRE_STOPS_S, "grace_s": GRACE_S}
        tiers = [
            Deployment(api, tier, tmp_path, {k: v for k, v in environment.items() if k not in hidden}, **options)
            for tier, hidden in ((ENCODER, {"TANDEM_ENCODERS", "TANDEM_DECODERS"}), (DECODER, {"TANDEM_DECODERS"}))
        ]
        try:
            await asyncio.gather(asyncio.to_thread(film), *(tier.scale_up() for tier in tiers))
            async with gateway(api, tmp_path, environment) as (url, _), client_of(url) as client:
                bodies = [questions(), stories(), [film()]]
                short, long, ((_, of_film),) = [await undisturbed(client, some) for some in bodies]
                load, telling = Load(client, "question"), Load(client, "story")
                async with asyncio.TaskGroup() as tasks:
                    films = Films(client, of_film, tasks)
                    tiers[0].until_busy, tiers[0].when_not_ready = films.until_busy, films.ask_more
                    tasks.create_task(load.run(short, TOGETHER))
                    tasks.create_task(telling.run(long, STORIES))
                    await asyncio.gather(*(tier.roll(ROLLOUTS, load.go_on) for tier in tiers))
                    await load.until(REQUESTS)
                    num_during = load.num_done
                    load.is_over = telling.is_over = True
                status = (await client.get("/ready")).json()
                num_media = sum(num_media_of(body) for some in bodies for body in some)
                num_media += load.num_media + telling.num_media + films.num_asked * num_media_of(film())
                async with asyncio.timeout(10):
                    while not await is_all_in_redis(valkey, num_media, tmp_path):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
        finally:
            for tier in tiers:
                tier.kill()
    assert num_during >= REQUESTS
    assert telling.num_done >= ROLLOUTS
    assert [len(tier.ended) for tier in tiers] == [ROLLOUTS, ROLLOUTS]
    assert {code for tier in tiers for _, code in tier.ended} == {0}
    assert all(0 <= pod.seconds_to_end < GRACE_S for tier in tiers for pod, _ in tier.ended)
    # Those that were told at once had work to finish, and said at once that they take no more.
    told_at_once = [pod for tier in tiers for pod, _ in tier.ended[:: len(PRE_STOPS_S)]]
    assert all(pod.work_at_signal > 0 for pod in told_at_once)
    assert all(0 <= pod.seconds_to_unready < 2.0 for pod in told_at_once)
    assert len(films.refusals) >= len(told_at_once) / 2  # that are encoders
    assert {error.code for error in films.refusals} == {"overloaded"}
    assert status["decoders"]["ready"] == status["encoders"]["ready"] == 1
    print(
        num_during,
        telling.num_done,
        films.num_asked,
        len(films.refusals),
        [
            (p.work_at_signal, round(p.seconds_to_unready, 3), round(p.seconds_to_end, 2))
            for t in tiers
            for p, _ in t.ended
        ],
    )


async def test_what_does_not_finish_in_the_drain_of_its_decoder_goes_on_at_another(tmp_path: Path) -> None:
    """The drain is much shorter than the stories are: they are handed over in their middle, and told to the end."""
    async with fake_api() as api:
        environment = {**environment_of(api, tmp_path), "TANDEM_DRAIN_TIMEOUT_S": "1.5"}
        decoders = Deployment(api, DECODER, tmp_path, environment, pre_stops_s=(0.0,), grace_s=GRACE_S)
        try:
            await asyncio.gather(decoders.scale_up(), decoders.scale_up())
            async with gateway(api, tmp_path, environment) as (url, _), client_of(url) as client:
                body = {**stories()[1], "max_tokens": 800}
                ((_, expected),) = await undisturbed(client, [body])
                told = [asyncio.create_task(tokens_for(client, {**body, "cache_salt": str(n)})) for n in range(6)]
                await decoders.pods[0].until_it_works()
                await decoders.scale_down()
                assert not any(story.done() for story in told)
                for story in told:
                    assert await story == expected
                resumed = await metric_at(url, "tandem_gateway_resumed_total")
        finally:
            decoders.kill()
    ((pod, code),) = decoders.ended
    assert code == 0
    assert resumed == pod.work_at_signal > 0
    assert 0 <= pod.seconds_to_end < GRACE_S


async def test_a_gateway_that_is_told_to_stop_finishes_its_streams_and_sends_others_elsewhere(tmp_path: Path) -> None:
    async with fake_api() as api:
        environment = environment_of(api, tmp_path)
        decoders = Deployment(api, DECODER, tmp_path, environment, pre_stops_s=(0.0,), grace_s=GRACE_S)
        try:
            await decoders.scale_up()
            async with gateway(api, tmp_path, environment) as (url, service), client_of(url) as client:
                body = {"model": "tiny", "messages": text_message("A story."), "ignore_eos": True, "max_tokens": 10}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                long = {**body, "max_tokens": 600, "stream": True}
                async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    service.tell_to_stop()
                    ready = await client.get("/ready")
                    while ready.status_code == 200:  # until the signal is heard
                        ready = await client.get("/ready")
                    assert ready.json()["draining"] is True
                    assert (await client.get("/health")).status_code == 200
                    refused = await client.post("/v1/chat/completions", json=body)
                    assert refused.status_code == 503
                    assert error_of(refused)["code"] == "overloaded"
                    chunks = [line async for line in lines if line.startswith("data: ")]
                assert chunks[-1] == "data: [DONE]"
                assert '"finish_reason":"length"' in chunks[-2].replace(" ", "")
        finally:
            decoders.kill()


def test_a_time_without_an_api_server_takes_less_than_a_hundredth_of_a_core(outage: "subprocess.Popen[str]") -> None:
    """The tries come most often at first: a longer time takes less."""
    out, err = outage.communicate(timeout=OUTAGE_S + 60.0)
    assert outage.returncode == 0, err
    found = json.loads(out.splitlines()[-1])  # behind its log lines
    assert found["tries"] >= 5
    assert found["members"] == 1  # told once, and never taken back
    assert 0.0 < found["processor_s"] < 0.01 * OUTAGE_S
