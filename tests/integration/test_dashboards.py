"""Every query of the dashboards is answered by a real Prometheus that scrapes a real system."""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from deploy.local import free_port
from tests.deploy.helm.test_monitoring import HISTOGRAM_SUFFIX, METRIC, expressions
from tests.deploy.helm.tools import prometheus
from tests.deploy.helm.values_schema import CHART
from tests.integration.conftest import picture_message, text_message
from tests.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.kubernetes, pytest.mark.timeout(900)]

NAMESPACE = "here"
# What a counter's rate needs, and a system without its optional parts does not show.
WINDOW = "1m"


def queries() -> dict[str, str]:
    """The queries of all panels, by dashboard and title, as Grafana sends them."""
    found = {}
    for path in sorted((CHART / "files" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$namespace", NAMESPACE).replace("[5m]", f"[{WINDOW}]")
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = query
    return found


def configuration(stack: Stack) -> dict[str, Any]:
    """Scrapes each process as a pod of its own."""
    targets = [
        {"targets": [urlsplit(url).netloc], "labels": {"namespace": NAMESPACE, "pod": name}}
        for name, url in stack.plan.ready_urls.items()
    ]
    scrape = {"job_name": "tandem", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": targets}
    return {"scrape_configs": [scrape]}


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path, config: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus with an empty store, as a client of its API."""
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(prometheus()),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, f"--web.listen-address={address}", stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=10) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def has_data(client: httpx.AsyncClient, query: str) -> bool:
    """Whether a query gives at least one number."""
    body = (await client.get("/api/v1/query", params={"query": query})).json()
    assert body["status"] == "success", (query, body)
    return any(sample["value"][1] != "NaN" for sample in body["data"]["result"])


async def ask(client: AsyncOpenAI, seed: int) -> None:
    """Traffic, so that every rate has something to rise by. A picture that comes again is a hit."""
    for message in (text_message("hello"), picture_message(seed), picture_message(seed)):
        await client.chat.completions.create(model="tiny", messages=message, max_completion_tokens=4)


# What scales a tier, or shows that it should: a scaler takes an absent series for an error, or for nothing to do.
IDLE = {
    "gateway-0": [
        'tandem_autoscale_replicas{tier="encoder"}',
        'tandem_autoscale_replicas{tier="decoder"}',
        "tandem_autoscale_backlog_seconds",
        "tandem_autoscale_backlog_patches",
        "tandem_autoscale_occupancy",
        "tandem_autoscale_held_requests",
    ],
    "encoder-0": ["tandem_encoder_queued_patches", "tandem_encoder_queued_bytes"],
    "decoder-0": ["tandem_decoder_waiting", "tandem_decoder_running", "tandem_decoder_backlog_seconds"],
}


async def check_idle(stack: Stack) -> None:
    """K8S-10: with no traffic each signal is there and 0, and a process has every metric that the chart asks for."""
    defined: set[str] = set()
    async with httpx.AsyncClient(trust_env=False) as client:
        for name, url in stack.plan.ready_urls.items():
            text = (await client.get(url.replace("/ready", "/metrics"))).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            assert {series: float(values[series]) for series in IDLE[name]} == dict.fromkeys(IDLE[name], 0.0)
            defined |= set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    asked = {
        name for query in expressions().values() for name in METRIC.findall(query.replace("namespace:tandem_", ""))
    }
    of_clusters = {name for name in asked if name.startswith(("tandem_autoscaler_", "tandem_discovery_"))}
    missing = {name for name in asked - of_clusters if not {name, HISTOGRAM_SUFFIX.sub("", name)} & defined}
    assert missing == set()


async def test_every_panel_has_data(tiny_checkpoint: Path, tmp_path: Path) -> None:
    prometheus()  # before anything is started: it may have to be fetched
    missing = queries()
    assert len(missing) > 40
    async with (
        running_stack(tmp_path / "stack", tiny_checkpoint) as stack,
        running_prometheus(tmp_path, configuration(stack)) as client,
        stack.client() as openai,
    ):
        await check_idle(stack)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                for seed in itertools.count():
                    await ask(openai, seed)
                    with contextlib.suppress(httpx.ConnectError):  # it may still start
                        missing = {
                            title: query for title, query in missing.items() if not await has_data(client, query)
                        }
                    if not missing:
                        break
                    await asyncio.sleep(1.0)  # until the next scrape
    assert missing == {}
