"""Pods that end under load: real processes behind a fake API server, and no request is the worse."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local import free_port
from tests.integration.cases.asking import CHAT, chunks_of, client_of, error_of, tokens_of
from tests.integration.conftest import picture_message, text_message
from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.kubernetes.pods import DECODER, ENCODER, Deployment, Service, metric_at, sources
from tests.servable import save_servable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROLLOUTS = 3
REQUESTS = 200
TOGETHER = 4
STORIES = 3
# With none the signal comes along with the news of it: work may still arrive, and what runs has to be drained.
PRE_STOPS_S = (0.0, 0.3)
GRACE_S = 30.0


def questions() -> list[dict[str, Any]]:
    """Requests with and without pictures, streamed and not, that end soon."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 24, "logprobs": True, "ignore_eos": True}
    pictures = [picture_message(seed, width=96, height=64 + 16 * (seed % 3)) for seed in range(6)]
    texts = [text_message(f"Tell me of number {number}.") for number in range(3)]
    return [
        {**fields, "messages": messages, "stream": number % 2 == 0}
        for number, messages in enumerate([*pictures, *texts])
    ]


def stories() -> list[dict[str, Any]]:
    """Streams that run for a good while, so that every decoder is in the middle of some when it is told to end."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 400, "logprobs": True, "ignore_eos": True}
    picture = picture_message(7, "Tell me a story of it.", width=96, height=64)
    return [{**fields, "messages": messages, "stream": True} for messages in (picture, text_message("A story."))]


async def tokens_for(client: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    """The bytes of each token of an answer, streamed or not."""
    if not body["stream"]:
        return tokens_of(await client.post(CHAT, json=body))
    choices = [choice for chunk in await chunks_of(client, body) for choice in chunk["choices"]]
    return [token["bytes"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]


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

    def __init__(self, client: httpx.AsyncClient, salt: str) -> None:
        self._client = client
        self._salt = salt
        self._numbers = itertools.count()
        self.num_done = 0
        self.is_over = False

    async def run(self, asked: list[tuple[dict[str, Any], list[list[int]]]], together: int) -> None:
        """Ask one after the other, so many at once, until it is over; each has to get the tokens beside it."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together):
                tasks.create_task(self._ask(asked))

    async def go_on(self) -> None:
        """Return when the pods that are there have had their part of the requests."""
        until = self.num_done + -(-REQUESTS // ROLLOUTS)
        while self.num_done < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _ask(self, asked: list[tuple[dict[str, Any], list[list[int]]]]) -> None:
        while not self.is_over:
            number = next(self._numbers)
            body, expected = asked[number % len(asked)]
            found = await tokens_for(self._client, {**body, "cache_salt": f"{self._salt}-{number}"})
            assert found == expected, (number, body["messages"][0]["content"])
            self.num_done += 1


async def undisturbed(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Requests with their tokens, while nothing moves; no two have the same."""
    asked = [(body, await tokens_for(client, body)) for body in bodies]
    assert all(len(tokens) == body["max_tokens"] for body, tokens in asked)
    assert len({str(tokens) for _, tokens in asked}) == len(asked)
    return asked


async def test_a_rolling_update_of_both_tiers_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    async with fake_api() as api:
        environment = environment_of(api, tmp_path)
        options: dict[str, Any] = {"pre_stops_s": PRE_STOPS_S, "grace_s": GRACE_S}
        tiers = [
            Deployment(api, tier, tmp_path, {k: v for k, v in environment.items() if k not in hidden}, **options)
            for tier, hidden in ((ENCODER, {"TANDEM_ENCODERS", "TANDEM_DECODERS"}), (DECODER, {"TANDEM_DECODERS"}))
        ]
        try:
            await asyncio.gather(*(tier.scale_up() for tier in tiers))
            async with gateway(api, tmp_path, environment) as (url, _), client_of(url) as client:
                short, long = await undisturbed(client, questions()), await undisturbed(client, stories())
                load, telling = Load(client, "question"), Load(client, "story")
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(load.run(short, TOGETHER))
                    tasks.create_task(telling.run(long, STORIES))
                    await asyncio.gather(*(tier.roll(ROLLOUTS, load.go_on) for tier in tiers))
                    num_during = load.num_done
                    load.is_over = telling.is_over = True
                status = (await client.get("/ready")).json()
        finally:
            for tier in tiers:
                tier.kill()
    assert num_during >= REQUESTS
    assert telling.num_done >= ROLLOUTS
    assert [len(tier.ended) for tier in tiers] == [ROLLOUTS, ROLLOUTS]
    assert {code for tier in tiers for _, code in tier.ended} == {0}
    assert all(0 <= pod.seconds_to_end < GRACE_S for tier in tiers for pod, _ in tier.ended)
    # Those that were told at once had work to finish.
    assert all(pod.work_at_signal > 0 for pod, _ in tiers[1].ended[:: len(PRE_STOPS_S)])
    assert status["decoders"]["ready"] == status["encoders"]["ready"] == 1
    print(
        num_during,
        telling.num_done,
        [(p.work_at_signal, round(p.seconds_to_end, 2)) for t in tiers for p, _ in t.ended],
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
