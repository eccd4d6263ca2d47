"""Pods and Deployments for drills: real processes, each with an address of its own, moved as Kubernetes moves pods.

A pod is a `tandem` process on its own loopback address with the usual ports, and its endpoint in a slice of the fake
API server. Kubernetes' order of things: a new pod is ready before the old one is told; the slice says that a pod ends
before it gets its signal, and forgets it when its process is gone.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from common.processes import Command
from tests.forked import forked
from tests.kubernetes.fake_api import NAMESPACE, FakeApi, endpoint, endpoint_slice

ENCODER = ("encoder", {"control": 7101, "data": 7102}, 7100)
DECODER = ("decoder", {"control": 7201}, 7200)
READY_S = 150.0
WORK = {"encoder": "tandem_encoder_queued_patches", "decoder": "tandem_decoder_active_requests"}
_hosts = itertools.count(1)


def next_host() -> str:
    """A loopback address that no other process of this test run has."""
    return f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 250 + 1}.{next(_hosts) % 250 + 1}"


def plain_client() -> httpx.AsyncClient:
    """A client for probes and metrics, which need no certificates: loading those takes as long as ten requests."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=5.0)


async def metric_at(url: str, name: str) -> float:
    """A metric without labels of the process at `url`."""
    async with plain_client() as client:
        (value,) = await metrics_by(client, url, name)
    return value


async def metrics_by(client: httpx.AsyncClient, url: str, *names: str) -> list[float]:
    """Metrics without labels of the process at `url`, of one moment."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    values = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
    return [float(values[name]) for name in names]


class Service:
    """A `tandem` process, with the grace that Kubernetes gives it."""

    def __init__(self, role: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._is_told = False
        command = Command(role, ["python", "-m", f"{role}_svc", *arguments], environment, log_file=log)
        self._process = forked(command)

    async def start(self, url: str) -> None:
        """Start, and wait until the readiness probe at `url` succeeds; the log tells why it never does."""
        await asyncio.to_thread(self._process.start)
        async with plain_client() as client, asyncio.timeout(READY_S):
            while True:
                assert self._process.is_alive(), f"it ended while it started: see {self.log}"
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(url)).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    def tell_to_stop(self) -> None:
        """SIGTERM, once: a second one would cut off what runs."""
        if not self._is_told:
            self._process.terminate()
        self._is_told = True

    async def end(self, grace_s: float) -> int:
        """SIGTERM, and the exit code. Raises TimeoutError when the grace ends first."""
        self.tell_to_stop()
        await asyncio.to_thread(self._process.join, grace_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"it did not end within {grace_s} s: see {self.log}")
        return self._process.exitcode

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()


@dataclass
class Pod:
    """One process and its place in the cluster."""

    role: str
    ports: dict[str, int]
    http_port: int
    log: Path
    environment: dict[str, str]
    host: str = field(default_factory=next_host)
    work_at_signal: float = -1.0
    seconds_to_unready: float = -1.0
    seconds_to_end: float = -1.0

    def __post_init__(self) -> None:
        sockets = [f"--{port}-endpoint=tcp://{self.host}:{number}" for port, number in self.ports.items()]
        http = [f"--http-host={self.host}", f"--http-port={self.http_port}"]
        self.service = Service(self.role, [*sockets, *http], self.environment, self.log)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.host.rpartition('.')[2]}"

    @property
    def url(self) -> str:
        """Of its probes and metrics."""
        return f"http://{self.host}:{self.http_port}"

    async def start(self) -> None:
        """Start the process and wait until its readiness probe succeeds."""
        await self.service.start(f"{self.url}/ready")

    async def work(self) -> float:
        """How many requests a decoder runs, or how many patches an encoder has to encode."""
        return await metric_at(self.url, WORK[self.role])

    async def until_it_works(self) -> None:
        """Return when it has something to do."""
        async with plain_client() as client, asyncio.timeout(30.0):
            while await metrics_by(client, self.url, WORK[self.role]) == [0]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    async def end(self, grace_s: float, when_not_ready: Callable[["Pod"], Awaitable[None]]) -> int:
        """SIGTERM, and the exit code. `when_not_ready` is called once its readiness probe fails."""
        self.work_at_signal = await self.work()
        began = time.monotonic()
        self.service.tell_to_stop()
        if await self._is_seen_not_ready():
            self.seconds_to_unready = time.monotonic() - began
            await when_not_ready(self)
        code = await self.service.end(grace_s)
        self.seconds_to_end = time.monotonic() - began
        return code

    async def _is_seen_not_ready(self) -> bool:
        """Probe until it says that it is not ready; false when it is gone before it was asked."""
        async with plain_client() as client:
            with contextlib.suppress(httpx.TransportError):
                while (await client.get(f"{self.url}/ready")).status_code == 200:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.005)
                assert (await client.get(f"{self.url}/health")).status_code == 200
                return True
        return False


async def _nothing(pod: Pod) -> None:
    pass


class Deployment:
    """One tier of one replica, rolled with one pod more than it has, and none fewer."""

    def __init__(
        self,
        api: FakeApi,
        tier: tuple[str, dict[str, int], int],
        folder: Path,
        environment: dict[str, str],
        *,
        pre_stops_s: Sequence[float],
        grace_s: float,
    ) -> None:
        """`pre_stops_s` are the pauses between a slice and a signal, for one pod after the other, again and again."""
        self._api = api
        self._tier = tier
        self._folder = folder
        self._environment = environment
        self._pre_stops_s = itertools.cycle(pre_stops_s)
        self._grace_s = grace_s
        self._number = itertools.count()
        self.until_busy: Callable[[Pod], Awaitable[None]] = Pod.until_it_works
        """Returns when a pod that is to be replaced has something to do."""
        self.when_not_ready: Callable[[Pod], Awaitable[None]] = _nothing
        """Called for a pod that was told to end, as in `Pod.end`."""
        self.pods: list[Pod] = []
        self.ended: list[tuple[Pod, int]] = []

    async def scale_up(self) -> None:
        """One pod more, which is in the slices once it is ready."""
        self._tell(await self._start())

    async def _start(self) -> Pod:
        role, ports, http_port = self._tier
        pod = Pod(role, ports, http_port, self._folder / f"{role}-{next(self._number)}.log", self._environment)
        self.pods.append(pod)
        self._tell(pod, ready=False, serving=False)
        await pod.start()
        return pod

    async def scale_down(self) -> None:
        """The oldest pod ends: not ready at once, then its hook, its signal, and gone."""
        pod = self.pods.pop(0)
        self._tell(pod, ready=False, serving=True, terminating=True)
        await asyncio.sleep(next(self._pre_stops_s))
        code = await pod.end(self._grace_s, self.when_not_ready)
        self.ended.append((pod, code))
        self._api.delete(pod.name)

    async def roll(self, times: int, before_each: Callable[[], Awaitable[None]]) -> None:
        """Replace the pod while it works, again and again. What it works on came before there was another."""
        for _ in range(times):
            await before_each()
            pod = await self._start()
            await self.until_busy(self.pods[0])
            self._tell(pod)
            await self.scale_down()

    def kill(self) -> None:
        for pod in self.pods:
            pod.service.kill()

    def _tell(self, pod: Pod, **conditions: bool) -> None:
        entry = endpoint(pod.host, pod.name, **conditions)
        self._api.put(endpoint_slice(pod.name, self._tier[0], [entry], self._tier[1]))


def sources() -> dict[str, str]:
    """Settings that make gateways and decoders discover the tiers."""
    return {"TANDEM_ENCODERS": f"kubernetes:{NAMESPACE}/encoder", "TANDEM_DECODERS": f"kubernetes:{NAMESPACE}/decoder"}
