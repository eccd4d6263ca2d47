"""An encoder's shipping and a decoder's fetcher on one host: after the first fetch, embeddings are mapped.

At the end through the whole system, whose answers are the same with and without it.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image
from prometheus_client import REGISTRY

from common.embedding import ExpectedEmbedding
from common.members import Member, StaticMembers
from common.messages import Fetch, FetchCredit, Hello
from common.shared_region import host_id
from common.transport import Router
from decoder_svc.embedding_fetch import EncoderFetcher
from encoder_svc.embedding_store import EmbeddingStore, HeldEmbedding
from encoder_svc.shared_regions import MIN_BYTES, SharedRegions
from encoder_svc.shipping import Shipping
from tests.common.sockets import background, eventually, hello, ipc_address, zmq_context
from tests.encoder_svc.embeddings import FINGERPRINT, held
from tests.integration.turns import generated, messages_of, telling_checkpoint
from tests.media_samples import encoded, picture
from tests.reference import Media, Turn
from tests.stack import running_stack

pytestmark = pytest.mark.skipif(host_id() is None, reason="this system has no memfd or no /proc")


class Encoder:
    """Holds embeddings as a runner makes them, and ships them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._regions = SharedRegions()
        self.store = EmbeddingStore(16 * MIN_BYTES, 60.0)
        self.shipping = Shipping(router, self.store, FINGERPRINT, self._regions)

    def hold(self, number: int) -> HeldEmbedding:
        """A new embedding, shared where that is wanted by now."""
        embedding = held(number, 2 * MIN_BYTES)
        if (region := self._regions.take(2 * MIN_BYTES)) is not None:
            region.write(0, embedding.payload)
            embedding = HeldEmbedding(embedding.header, region.seal(), region)
        self.store.put(embedding)
        return embedding

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            received = await self._router.receive()
            match received.message:
                case Hello():
                    self._router.try_send(received.peer, hello("encoder", "e"))
                case Fetch() as fetch:
                    self.shipping.begin(received.peer, fetch)
                case FetchCredit() as credit:
                    self.shipping.renew(received.peer, credit)


@contextlib.asynccontextmanager
async def fetching(host: str | None) -> AsyncIterator[tuple[Encoder, EncoderFetcher]]:
    with zmq_context() as context, ipc_address() as address:
        encoder = Encoder(Router(context, address, name="data"))
        members = StaticMembers([Member((address,))])
        fetcher = EncoderFetcher(context, lambda: hello("decoder", "d"), source=members, host=host)
        async with background(encoder.run()), background(fetcher.run()):
            await eventually(lambda: fetcher.encoder_ids)
            yield encoder, fetcher


async def fetch(fetcher: EncoderFetcher, embedding: HeldEmbedding) -> tuple[bytes, float]:
    """What came, and how much of it was mapped."""
    header, name = embedding.header, "tandem_decoder_mapped_bytes_total"
    expected = ExpectedEmbedding(header.key, header.grid, FINGERPRINT, header.rows, header.width, header.levels)
    before = REGISTRY.get_sample_value(name) or 0.0
    _, payload = await fetcher.fetch("e", expected, 10)
    return bytes(payload), (REGISTRY.get_sample_value(name) or 0.0) - before


async def test_a_decoder_of_the_host_maps_what_is_encoded_after_its_first_fetch() -> None:
    async with fetching(host_id()) as (encoder, fetcher):
        first = encoder.hold(1)
        assert await fetch(fetcher, first) == (first.payload, 0)
        for number in (2, 3):
            later = encoder.hold(number)
            assert await fetch(fetcher, later) == (later.payload, 2 * MIN_BYTES)
        assert await fetch(fetcher, first) == (first.payload, 0)  # it was made before
        await eventually(lambda: encoder.shipping.bytes_in_flight == 0)


async def test_what_the_encoder_lets_go_stays_with_the_decoder_that_mapped_it() -> None:
    async with fetching(host_id()) as (encoder, fetcher):
        await fetch(fetcher, encoder.hold(1))
        embedding = encoder.hold(2)
        expected = bytes(embedding.payload)
        header = embedding.header
        wanted = ExpectedEmbedding(header.key, header.grid, FINGERPRINT, header.rows, header.width, header.levels)
        _, payload = await fetcher.fetch("e", wanted, 10)
        await eventually(lambda: encoder.shipping.bytes_in_flight == 0)
        del embedding
        encoder.hold(3)
        encoder.store.reserve("e" * 64, 16 * MIN_BYTES)  # evicts all
        assert encoder.store.held_bytes == 0
        assert payload == expected


@pytest.mark.parametrize("host", [None, "0" * 32])
async def test_a_decoder_of_another_host_is_sent_all(host: str | None) -> None:
    async with fetching(host) as (encoder, fetcher):
        for number in (1, 2):
            embedding = encoder.hold(number)
            assert embedding.region is None
            assert await fetch(fetcher, embedding) == (embedding.payload, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_answers_are_the_same_whether_pictures_are_mapped_or_sent(tmp_path: Path) -> None:
    model, _ = telling_checkpoint(tmp_path)
    settings = model / "preprocessor_config.json"
    read = json.loads(settings.read_text())
    settings.write_text(json.dumps(read | {"size": read["size"] | {"longest_edge": 2 << 20}}))
    large = [Media("image", encoded(Image.fromarray(picture(1280, 1152, seed)))) for seed in range(3)]
    answers, mapped = {}, {}
    for is_on in ("true", "false"):
        own = {"encoder": {"TANDEM_SHARE_MEMORY": is_on}}
        async with running_stack(tmp_path / is_on, model, by_role=own) as stack:
            answers[is_on] = [
                await generated(stack, messages_of([Turn("user", [image, "What is in the picture?"])]), 16)
                for image in large
            ]
            mapped[is_on] = await stack.metric("decoder-0", "tandem_decoder_mapped_bytes_total")
            assert await stack.metric("decoder-0", "tandem_decoder_fetched_bytes_total") > 3 * MIN_BYTES
    assert answers["true"] == answers["false"]
    assert len({str(answer) for answer in answers["true"]}) == len(large)
    assert mapped["true"] > 2 * MIN_BYTES  # the first is encoded before anybody of this host has asked
    assert mapped["false"] == 0
