"""The size of the KV cache, from the bytes that it may take."""

import pytest

from common.errors import ConfigError
from decoder_svc.kv_budget import affordable_blocks, make_kv_cache
from tests.decoder_svc.engines import World


def test_the_cache_takes_the_bytes_that_it_is_given(world: World) -> None:
    model = world.pair.model
    cache = make_kv_cache(model, affordable_blocks(model, 100_000, 4), 4)
    assert 100_000 - cache.num_bytes / cache.num_blocks < cache.num_bytes <= 100_000


def test_a_cache_too_small_for_two_blocks_stops_the_start_with_the_bytes_it_needs(world: World) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-bytes 100 .* give at least 8192"):
        affordable_blocks(world.pair.model, 100, 4)
