"""Embeddings as int8 all the way: tower, store, real sockets or a real Redis, and the decoder's inbox."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
import zmq.asyncio
from torch import Tensor

from common.embedding import checksum
from common.embedding_cache import REDIS, EmbeddingCache
from common.errors import TandemError
from common.members import Member, StaticMembers
from common.messages import (
    MAX_CHUNK_BYTES,
    Fetch,
    FetchCredit,
    GenerateRequest,
    Hello,
    MediaItem,
    PromptSpan,
    SamplingParams,
)
from common.transport import Router
from decoder_svc.embedding_fetch import EncoderFetcher
from decoder_svc.embedding_inbox import EmbeddingInbox
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.model.vision import VisionTower
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.shipping import Shipping
from encoder_svc.slices import Joining, cut
from tests.common.sockets import background, eventually
from tests.encoder_svc.towers import tiny_tower
from tests.valkey import running_valkey

FINGERPRINT, KEY, GRID = "f" * 64, "a" * 64, (4, 6, 4)


@dataclass
class Listener:
    """What came of the fetches."""

    embeddings: list[Tensor] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[TandemError] = field(default_factory=list)

    def delivered(self, key: str, embedding: Tensor) -> None:
        self.embeddings.append(embedding)

    def source_failed(self, request_id: str, key: str, source: str) -> None:
        self.failed.append(source)

    def unusable(self, request_id: str, error: TandemError) -> None:
        self.errors.append(error)

    @property
    def num_told(self) -> int:
        return len(self.embeddings) + len(self.failed) + len(self.errors)


@dataclass
class Encoded:
    """A video's embedding as int8, and as the tower made it."""

    held: HeldEmbedding
    exact: Tensor


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return tiny_tower()


@pytest.fixture
async def encoded(tower: VisionTower) -> AsyncIterator[Encoded]:
    """Encoded in slices, as long videos are."""
    values = np.random.default_rng(1).standard_normal((4 * 6 * 4, tower.patch_width)).astype(np.float32)
    item = TowerItem(KEY, GRID, values)
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="int8")
    joining, held = Joining(GRID), None
    for first in (0, 2):
        held = joining.add((await runner.run([cut(item, first, 2)]))[0])
    runner.close()
    assert held is not None
    with torch.inference_mode():
        yield Encoded(held, tower([torch.from_numpy(values)], [GRID]))


def request() -> GenerateRequest:
    item = MediaItem(key=KEY, modality="video", grid=GRID, spans=[PromptSpan(offset=1, num_tokens=24, grid=GRID)])
    return GenerateRequest(
        request_id="r",
        model="tiny",
        fingerprint=FINGERPRINT,
        prompt_token_ids=[1] * 30,
        media=[item],
        sampling=SamplingParams(seed=0, max_tokens=1),
        time_left_s=10.0,
    )


async def receive(held: HeldEmbedding, exact: Tensor) -> Listener:
    """What an inbox makes of an embedding that an encoder holds."""
    context = zmq.asyncio.Context()
    router = Router(context, "tcp://127.0.0.1:0", name="data", max_payload_bytes=MAX_CHUNK_BYTES)
    store = EmbeddingStore(1 << 24, 60.0)
    store.put(held)
    shipping = Shipping(router, store, FINGERPRINT)

    def hello(role: str) -> Hello:
        return Hello(role=role, instance_id=role, model="tiny", version="0", is_ready=True)  # type: ignore[arg-type]

    async def serve() -> None:
        while True:
            received = await router.receive()
            match received.message:
                case Hello():
                    router.try_send(received.peer, hello("encoder"))
                case Fetch() as fetch:
                    shipping.begin(received.peer, fetch)
                case FetchCredit() as credit:
                    shipping.renew(received.peer, credit)

    fetcher = EncoderFetcher(context, lambda: hello("decoder"), source=StaticMembers([Member((router.endpoint,))]))
    listener = Listener()
    async with background(serve()), background(fetcher.run()):
        inbox = _inbox(fetcher, None, listener, exact)
        inbox.locate("r", KEY, "encoder")
        await eventually(lambda: listener.num_told > 0)
        await inbox.close()
    router.close()
    context.destroy(linger=0)
    return listener


def _inbox(fetcher: EncoderFetcher, cache: EmbeddingCache | None, listener: Listener, exact: Tensor) -> EmbeddingInbox:
    inbox = EmbeddingInbox(
        fetcher, cache, listener, width=exact.shape[1], levels=3, dtype=torch.bfloat16, max_bytes=1 << 24
    )
    inbox.expect(request())
    return inbox


def assert_near(embedding: Tensor, exact: Tensor) -> None:
    parts = exact.view(len(exact), 4, -1)
    error = (embedding.float().view_as(parts) - parts).abs()
    assert embedding.dtype == torch.bfloat16
    assert (error <= parts.abs().amax(dim=2, keepdim=True) * (1 / 254 + 1 / 200)).all()  # half a step, and bfloat16


async def test_a_fetch_from_an_encoder_gives_the_decoder_its_own_dtype(encoded: Encoded) -> None:
    listener = await receive(encoded.held, encoded.exact)
    assert_near(listener.embeddings[0], encoded.exact)


async def test_a_scale_that_is_no_number_fails_the_request_and_nothing_else(encoded: Encoded) -> None:
    payload = bytearray(encoded.held.payload)
    payload[:4] = np.float32("nan").tobytes()
    header = msgspec.structs.replace(encoded.held.header, checksum=checksum(payload))
    listener = await receive(HeldEmbedding(header, memoryview(payload)), encoded.exact)
    assert ["not finite" in error.message for error in listener.errors] == [True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_payload_of_another_dtype_s_size_is_refused(encoded: Encoded, dtype: str) -> None:
    header = msgspec.structs.replace(encoded.held.header, dtype=dtype)
    listener = await receive(HeldEmbedding(header, encoded.held.payload), encoded.exact)
    assert ["bytes, expected" in error.message for error in listener.errors] == [True]


async def test_redis_keeps_it_as_it_is_and_gives_it_to_a_decoder(encoded: Encoded) -> None:
    async with running_valkey() as server:
        cache = EmbeddingCache.connect(server.url, ttl_s=100, wait_s=5.0)
        assert await cache.put(encoded.held.header, encoded.held.payload)
        context = zmq.asyncio.Context()
        listener = Listener()
        inbox = _inbox(EncoderFetcher(context, lambda: None, source=StaticMembers([])), cache, listener, encoded.exact)  # type: ignore[arg-type, return-value]
        inbox.locate("r", KEY, REDIS)
        await eventually(lambda: listener.num_told > 0)
        await inbox.close()
        await cache.close()
        context.destroy(linger=0)
    assert_near(listener.embeddings[0], encoded.exact)
