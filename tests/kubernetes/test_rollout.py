"""A rolling update of both tiers under load: real processes behind a fake API server, and no request is the worse."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local import free_port
from tests.integration.cases.asking import client_of, error_of, tokens_of
from tests.integration.conftest import picture_message, text_message
from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.kubernetes.pods import DECODER, ENCODER, Deployment, Service, sources
from tests.servable import save_servable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROLLOUTS = 3
REQUESTS = 200
TOGETHER = 4
PRE_STOP_S = 0.3
GRACE_S = 30.0


def questions() -> list[dict[str, Any]]:
    """Requests with and without pictures, long enough to be in flight when something moves."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 24, "logprobs": True, "ignore_eos": True}
    pictures = [picture_message(seed, width=96, height=64 + 16 * (seed % 3)) for seed in range(6)]
    texts = [text_message(f"Tell me of number {number}.") for number in range(3)]
    return [{**fields, "messages": messages} for messages in (*pictures, *texts)]


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


def environment_of(api: FakeApi, folder: Path) -> dict[str, str]:
    """Settings of all services."""
    checkpoint, _ = save_servable(folder / "tiny", gain=3.0)
    return {
        "TANDEM_MODEL": str(checkpoint),
        "TANDEM_KUBERNETES_API": api.url,
        "TANDEM_DRAIN_TIMEOUT_S": str(GRACE_S - 5),
        "TANDEM_DTYPE": "float32",
        "TANDEM_THREADS": "1",
        **sources(),
    }


class Load:
    """Clients that ask all the time, and never the same twice for any cache."""

    def __init__(self, client: httpx.AsyncClient, asked: list[dict[str, Any]], expected: list[Any]) -> None:
        self._client = client
        self._asked = asked
        self._expected = expected
        self._numbers = itertools.count()
        self.num_done = 0
        self.is_over = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TOGETHER):
                tasks.create_task(self._ask())

    async def go_on(self) -> None:
        """Return when each pod that is there has had its part of the requests."""
        until = self.num_done + REQUESTS // (2 * ROLLOUTS + 1)
        while self.num_done < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _ask(self) -> None:
        while not self.is_over or self.num_done < REQUESTS:
            number = next(self._numbers)
            index = number % len(self._asked)
            body = {**self._asked[index], "cache_salt": f"salt-{number}"}
            response = await self._client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert tokens_of(response) == self._expected[index], (number, body["messages"][0]["content"])
            self.num_done += 1


async def test_a_rolling_update_of_both_tiers_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    async with fake_api() as api:
        environment = environment_of(api, tmp_path)
        options = {"pre_stop_s": PRE_STOP_S, "grace_s": GRACE_S}
        tiers = [
            Deployment(api, tier, tmp_path, {k: v for k, v in environment.items() if k not in hidden}, **options)
            for tier, hidden in ((ENCODER, {"TANDEM_ENCODERS", "TANDEM_DECODERS"}), (DECODER, {"TANDEM_DECODERS"}))
        ]
        try:
            await asyncio.gather(*(tier.scale_up() for tier in tiers))
            async with gateway(api, tmp_path, environment) as (url, _), client_of(url) as client:
                asked = questions()
                expected = [tokens_of(await client.post("/v1/chat/completions", json=body)) for body in asked]
                assert len({str(tokens) for tokens in expected}) == len(asked)
                load = Load(client, asked, expected)
                async with asyncio.TaskGroup() as tasks:
                    loading = tasks.create_task(load.run())
                    await asyncio.gather(*(tier.roll(ROLLOUTS, load.go_on) for tier in tiers))
                    load.is_over = True
                    await loading
                status = (await client.get("/ready")).json()
        finally:
            for tier in tiers:
                tier.kill()
    assert load.num_done >= REQUESTS
    assert [len(tier.ended) for tier in tiers] == [ROLLOUTS, ROLLOUTS]
    assert {code for tier in tiers for _, code in tier.ended} == {0}
    assert all(0 <= pod.seconds_to_end < GRACE_S for tier in tiers for pod, _ in tier.ended)
    assert status["decoders"]["ready"] == status["encoders"]["ready"] == 1
    print(load.num_done, [round(pod.seconds_to_end, 2) for tier in tiers for pod, _ in tier.ended])


async def test_a_gateway_that_is_told_to_stop_finishes_its_streams_and_sends_others_elsewhere(tmp_path: Path) -> None:
    async with fake_api() as api:
        environment = environment_of(api, tmp_path)
        decoders = Deployment(api, DECODER, tmp_path, environment, pre_stop_s=0.0, grace_s=GRACE_S)
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
