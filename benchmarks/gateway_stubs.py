"""A decoder and an encoder that cost nothing, and the bare server that a gateway is measured beside.

    python -m benchmarks.gateway_stubs services CONTROL ENCODER_CONTROL ENCODER_DATA TOKENIZER
    python -m benchmarks.gateway_stubs bare PORT
    python -m benchmarks.gateway_stubs uploads PORT COUNT

The stub decoder answers every prompt with letters that follow from its token ids, and sends one TokenBatch a step for
all that run. A request says in its sampling parameters what a real decoder would use otherwise: `seed` is how many
requests must be there before the first step, `temperature` how many hundredths of a second a step lasts. When a
request is cancelled it says so on stdout, with the time. The uploads are requests with a file of 20 MB each.
"""

import asyncio
import base64
import http.client
import io
import json
import string
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvicorn
import zmq.asyncio
from fastapi import FastAPI
from PIL import Image
from starlette.responses import StreamingResponse
from tokenizers import Tokenizer

from common.messages import Cancel, GenerateRequest, Hello, Limits, MediaNeeded, SequenceTokens, TokenBatch, Usage
from common.transport import Router

LETTERS = string.ascii_letters
STRIDE = 7  # of letters from token to token: prime to their number, so that a lost token shows
MODEL = "bench"
UPLOAD_BYTES = 20 << 20


def letter_after(letter: str) -> str:
    """The letter that must follow in a stream from which nothing was lost."""
    return LETTERS[(LETTERS.index(letter) + STRIDE) % len(LETTERS)]


@dataclass
class _Running:
    peer: bytes
    request: GenerateRequest
    num_sent: int = 0


class StubDecoder:
    """Gives each request `max_tokens` letters, all requests in step."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, letter_ids: list[int]) -> None:
        self._router = Router(context, endpoint, name="stub")
        self._letter_ids = letter_ids
        self._running: dict[str, _Running] = {}
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._step_all())

    async def _receive(self) -> None:
        while True:
            received = await self._router.receive()
            message = received.message
            if isinstance(message, Hello):
                self._router.try_send(received.peer, stub_hello("decoder"))
            elif isinstance(message, GenerateRequest):
                needed = MediaNeeded(request_id=message.request_id, attempt=message.attempt, keys=[])
                self._router.send(received.peer, needed)
                self._running[message.request_id] = _Running(received.peer, message)
                self._arrived.set()
            elif isinstance(message, Cancel):
                self._running.pop(message.request_id, None)
                print(time.monotonic(), flush=True)

    async def _step_all(self) -> None:
        while True:
            self._arrived.clear()
            wanted = max((running.request.sampling.seed for running in self._running.values()), default=1)
            if len(self._running) < wanted:
                await self._arrived.wait()
                continue
            step_s = max(running.request.sampling.temperature for running in self._running.values()) / 100
            began = time.monotonic()
            while self._running:
                self._step()
                began += step_s
                await asyncio.sleep(max(0.0, began - time.monotonic()))

    def _step(self) -> None:
        of_peer: dict[bytes, list[SequenceTokens]] = {}
        for running in list(self._running.values()):
            of_peer.setdefault(running.peer, []).append(self._next(running))
        for peer, sequences in of_peer.items():
            self._router.send(peer, TokenBatch(sequences=sequences))

    def _next(self, running: _Running) -> SequenceTokens:
        request, offset = running.request, running.num_sent
        first = sum(request.prompt_token_ids)
        running.num_sent += 1
        is_last = running.num_sent == request.sampling.max_tokens
        if is_last:
            del self._running[request.request_id]
        usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=running.num_sent, cached_tokens=0)
        return SequenceTokens(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=0,
            offset=offset,
            tokens=[self._letter_ids[(first + STRIDE * offset) % len(LETTERS)]],
            finish_reason="length" if is_last else None,
            usage=usage if is_last or offset == 0 else None,
        )


async def _answer_hellos(router: Router) -> None:
    while True:
        received = await router.receive()
        if isinstance(received.message, Hello):
            router.try_send(received.peer, stub_hello("encoder"))


def stub_hello(role: str) -> Hello:
    """What a stub says of itself."""
    return Hello(
        role=role,  # type: ignore[arg-type]
        instance_id=f"stub-{role}",
        model=MODEL,
        version="0",
        fingerprint="f" * 64 if role == "encoder" else None,
        wire_dtype="float32" if role == "encoder" else None,
        vocab_size=512,
        limits=Limits(max_model_len=2048),
        is_ready=True,
    )


async def serve_stubs(control: str, encoder_control: str, encoder_data: str, tokenizer_file: str) -> None:
    """Both stubs, until cancelled."""
    context = zmq.asyncio.Context()
    tokenizer = Tokenizer.from_file(tokenizer_file)
    letter_ids = [token for letter in LETTERS if (token := tokenizer.token_to_id(letter)) is not None]
    assert len(letter_ids) == len(LETTERS)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(StubDecoder(context, control, letter_ids).run())
        for endpoint in (encoder_control, encoder_data):
            tasks.create_task(_answer_hellos(Router(context, endpoint, name="stub")))


def bare_app() -> FastAPI:
    """What anyone would write who has a stream of tokens and no Tandem."""
    app = FastAPI()

    async def chunks(num_tokens: int, step_s: float) -> AsyncIterator[str]:
        head = {"id": f"chatcmpl-{time.monotonic_ns():032x}", "object": "chat.completion.chunk"}
        began = time.monotonic()
        for position in range(num_tokens):
            choice = {
                "index": 0,
                "delta": {"content": LETTERS[STRIDE * position % len(LETTERS)]},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = {**head, "created": int(time.time()), "model": MODEL, "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
            began += step_s
            await asyncio.sleep(max(0.0, began - time.monotonic()))
        yield "data: [DONE]\n\n"

    @app.post("/v1/chat/completions")
    async def create(body: dict[str, object]) -> StreamingResponse:
        stream = chunks(int(str(body["max_tokens"])), float(str(body["temperature"])) / 100)
        return StreamingResponse(stream, media_type="text/event-stream")

    return app


def upload(port: int, count: int) -> None:
    """Send so many requests with a large picture, one after the other, when a line on stdin says so."""
    picture = io.BytesIO()
    Image.new("RGB", (256, 256), "red").save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue() + bytes(UPLOAD_BYTES)).decode()
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    body = json.dumps({"model": MODEL, "messages": [message], "max_tokens": 1, "seed": 1, "temperature": 0}).encode()
    sys.stdin.readline()
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "uploads":
        upload(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "bare":
        uvicorn.run(bare_app(), port=int(sys.argv[2]), log_level="warning", access_log=False)
    else:
        asyncio.run(serve_stubs(*sys.argv[2:]))
