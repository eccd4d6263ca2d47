"""When embeddings are made where decoders of the host can map them, and how many."""

import gc

import numpy as np
import pytest
from prometheus_client import REGISTRY

from common import shared_region
from common.embedding import check_payload
from common.shared_region import SharedRegion, host_id, map_region
from encoder_svc import shared_regions
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem, TowerRunner
from encoder_svc.shared_regions import MIN_BYTES, SharedRegions
from encoder_svc.slices import Joining, cut
from tests.encoder_svc.embeddings import FINGERPRINT, key
from tests.encoder_svc.towers import tiny_tower

pytestmark = pytest.mark.skipif(host_id() is None, reason="this system has no memfd or no /proc")


def wanted() -> SharedRegions:
    """As after a decoder of this host has fetched something."""
    regions = SharedRegions()
    assert regions.is_near(host_id())
    return regions


def test_there_are_none_before_a_decoder_of_this_host_asked() -> None:
    regions = SharedRegions()
    for host in (None, "0" * 32):
        assert not regions.is_near(host)
        assert regions.take(MIN_BYTES) is None
    assert regions.is_near(host_id())
    assert regions.take(MIN_BYTES) is not None


def test_there_are_none_for_a_setting_and_none_for_small_embeddings() -> None:
    never = SharedRegions(may_share=False)
    assert not never.is_near(host_id())
    assert never.take(MIN_BYTES) is None
    assert wanted().take(MIN_BYTES - 1) is None


def test_their_number_is_bounded_and_those_that_end_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_region, "MAX_REGIONS", 2)
    regions = wanted()
    first, second = regions.take(MIN_BYTES), regions.take(MIN_BYTES)
    assert first is not None
    assert second is not None
    assert regions.num_bytes == 2 * MIN_BYTES
    assert regions.take(MIN_BYTES) is None
    del first
    gc.collect()
    assert regions.num_bytes == MIN_BYTES
    assert regions.take(MIN_BYTES) is not None


def test_a_system_that_gives_none_is_not_asked_again_soon_whoever_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def refuse(num_bytes: int) -> SharedRegion:
        nonlocal asked
        asked += 1
        raise OSError("too many open files")

    regions = wanted()
    monkeypatch.setattr(shared_regions, "SharedRegion", refuse)
    for _ in range(3):
        assert regions.is_near(host_id())  # what there is can be mapped
        assert regions.take(MIN_BYTES) is None
    assert asked == 1
    monkeypatch.setattr(shared_regions, "RETRY_S", 0.0)
    assert regions.take(MIN_BYTES) is None
    assert asked == 2


def is_mapped(held: HeldEmbedding) -> bool:
    """Whether another process could map the embedding, and would find just it."""
    if held.region is None:
        return False
    check_payload(held.header, held.payload)
    assert held.payload.readonly
    return map_region(held.region.place, held.header.num_bytes) == held.payload


def test_the_metric_is_that_of_the_regions_that_report_it() -> None:
    regions = wanted()
    regions.report()
    region = regions.take(MIN_BYTES)
    assert region is not None
    wanted()  # another one changes nothing
    assert REGISTRY.get_sample_value("tandem_encoder_shared_bytes") == MIN_BYTES


async def test_whole_items_are_made_there_and_videos_when_their_slices_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_regions, "MIN_BYTES", 1)
    tower, regions = tiny_tower(), wanted()
    runner = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32", regions=regions)
    plain = TowerRunner(tower, fingerprint=FINGERPRINT, wire_dtype="float32")
    values = np.random.default_rng(3).standard_normal((3 * 4 * 6, tower.patch_width)).astype(np.float32)
    picture, video = TowerItem(key(1), (1, 4, 6), values[:24]), TowerItem(key(2), (3, 4, 6), values)
    alone, *together = [*(await runner.run([picture])), *(await runner.run([picture, picture]))]
    (expected,) = await plain.run([picture])
    assert all(is_mapped(one) and one.payload == expected.payload for one in (alone, *together))
    assert expected.region is None
    joining, parts = Joining(video.grid, regions), []
    for first in range(3):
        (part,) = await runner.run([cut(video, first, 1)])
        assert part.region is None
        parts.append(part)
    joined = [joining.add(part) for part in parts][-1]
    assert joined is not None
    assert is_mapped(joined)
    assert joined.payload == b"".join(part.payload for part in parts)
    runner.close()
    plain.close()
