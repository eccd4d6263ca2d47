"""What clients ask while pods come and go, with the tokens that they have to get; and what keeps an encoder busy."""

import asyncio
import base64
import contextlib
import functools
import itertools
from typing import Any

import httpx
import zmq.asyncio
from PIL import Image

from common.messages import EncodeReply, EncodeRequest, ErrorDetail
from common.transport import Dealer
from tests.common.sockets import can_send, eventually, hello, received
from tests.integration.cases.asking import CHAT, chunks_of, tokens_of
from tests.integration.conftest import picture_message, text_message
from tests.kubernetes.pods import WORK, Pod, metrics_by, plain_client
from tests.media_samples import encoded, flat_frames, png, video_file

PART = 20  # requests, at least, between two rollouts
VIDEO_PATCHES = 12 * 12 * 20


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


def num_media_of(body: dict[str, Any]) -> int:
    """Pictures and videos of a request."""
    return sum(
        part["type"] != "text" for m in body["messages"] if isinstance(m["content"], list) for part in m["content"]
    )


@functools.cache
def film() -> dict[str, Any]:
    """A request that an encoder works on for a while: small pictures are soon done, a large one and a video are not."""
    files = [("image", "png", png(96, 64, 100 + seed)) for seed in range(3)]
    files.append(("image", "png", encoded(Image.new("RGB", (5000, 4000), "green"))))
    files.append(("video", "mp4", video_file(flat_frames(96, 1280, 720), fps=8)))
    urls = [(f"{kind}_url", f"{kind}/{name};base64,{base64.b64encode(data).decode()}") for kind, name, data in files]
    parts: list[dict[str, Any]] = [{"type": kind, kind: {"url": f"data:{data}"}} for kind, data in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    return {**questions()[1], "messages": messages}


async def tokens_for(client: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    """The bytes of each token of an answer, streamed or not."""
    if not body["stream"]:
        return tokens_of(await client.post(CHAT, json=body))
    choices = [choice for chunk in await chunks_of(client, body) for choice in chunk["choices"]]
    return [token["bytes"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]


class Load:
    """Clients that ask all the time, and never the same twice for any cache."""

    def __init__(self, client: httpx.AsyncClient, salt: str) -> None:
        self._client = client
        self._salt = salt
        self._numbers = itertools.count()
        self.num_done = 0
        self.num_media = 0
        self.is_over = False

    async def run(self, asked: list[tuple[dict[str, Any], list[list[int]]]], together: int) -> None:
        """Ask one after the other, so many at once, until it is over; each has to get the tokens beside it."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(together):
                tasks.create_task(self._ask(asked))

    async def go_on(self) -> None:
        """Return when the pods that are there have had their part of the requests."""
        await self.until(self.num_done + PART)

    async def until(self, num_done: int) -> None:
        """Return when so many requests are done."""
        while self.num_done < num_done:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _ask(self, asked: list[tuple[dict[str, Any], list[list[int]]]]) -> None:
        while not self.is_over:
            number = next(self._numbers)
            body, expected = asked[number % len(asked)]
            self.num_media += num_media_of(body)
            found = await tokens_for(self._client, {**body, "cache_salt": f"{self._salt}-{number}"})
            assert found == expected, (number, body["messages"][0]["content"])
            self.num_done += 1


class Films:
    """Films that are asked for when an encoder is to end, one at a time and for as long as none keeps it busy."""

    def __init__(self, client: httpx.AsyncClient, expected: list[list[int]], tasks: asyncio.TaskGroup) -> None:
        self._client = client
        self._expected = expected
        self._tasks = tasks
        self.num_asked = 0
        self.refusals: list[ErrorDetail] = []

    async def until_busy(self, pod: Pod) -> None:
        """Return when the encoder has a video and pictures to encode, and leases on what it has encoded."""
        async with plain_client() as client, asyncio.timeout(60):
            while True:
                asked = self._tasks.create_task(self._ask(self.num_asked))
                self.num_asked += 1
                while not asked.done():
                    queued, leases = await metrics_by(client, pod.url, WORK["encoder"], "tandem_encoder_leases")
                    if queued > VIDEO_PATCHES and leases:
                        return
                    await asyncio.sleep(0.002)

    async def ask_more(self, pod: Pod) -> None:
        """Ask the encoder that ends for a picture, as a gateway does that has not heard of it."""
        context = zmq.asyncio.Context()
        try:
            with contextlib.suppress(TimeoutError):  # it may have ended meanwhile
                self.refusals.append(await self._refusal(context, pod))
        finally:
            context.destroy(linger=0)

    async def _refusal(self, context: zmq.asyncio.Context, pod: Pod) -> ErrorDetail:
        dealer = Dealer(context, f"tcp://{pod.host}:{pod.ports['data']}", name="late")
        await eventually(lambda: can_send(dealer, hello("gateway", "late")), timeout_s=5.0)
        await received(dealer, timeout_s=5.0)
        dealer.send(
            EncodeRequest(
                request_id="late",
                key="0" * 64,
                modality="image",
                expected_grid=(1, 4, 4),
                fingerprint="0" * 64,
                time_left_s=5.0,
            ),
            png(64, 64),
        )
        reply = (await received(dealer, timeout_s=5.0)).message
        assert isinstance(reply, EncodeReply)
        assert reply.error is not None
        return reply.error

    async def _ask(self, number: int) -> None:
        found = await tokens_for(self._client, {**film(), "cache_salt": f"film-{number}"})
        assert found == self._expected, number


async def undisturbed(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Requests with their tokens, while nothing moves; no two have the same."""
    asked = [(body, await tokens_for(client, body)) for body in bodies]
    assert all(len(tokens) == body["max_tokens"] for body, tokens in asked)
    assert len({str(tokens) for _, tokens in asked}) == len(asked)
    return asked
