"""Before an encoder is ready it has run the common sizes, and knows its speed; within its time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from common.errors import ModelFailure
from common.messages import Grid
from encoder_svc.embedding_store import HeldEmbedding
from encoder_svc.runner import TowerItem
from encoder_svc.warm_up import warm_up
from tests.media_samples import DEMO_PROCESSOR


@dataclass
class Tower:
    batches: list[list[Grid]] = field(default_factory=list)
    error: Exception | None = None

    async def run(self, items: Sequence[TowerItem]) -> list[HeldEmbedding]:
        if self.error is not None:
            raise self.error
        self.batches.append([item.grid for item in items])
        assert all(item.pixel_values.shape[0] == item.grid[1] * item.grid[2] for item in items)
        return []


async def test_each_common_size_runs_once_whatever_the_pixel_limits_make_of_it() -> None:
    tower = Tower()
    assert await warm_up(tower, DEMO_PROCESSOR, 60.0) == len(tower.batches) == 5  # type: ignore[arg-type]
    assert len({(len(batch), batch[0]) for batch in tower.batches}) == 5
    assert (1, 14, 14) in tower.batches[0]


async def test_without_time_nothing_runs() -> None:
    tower = Tower()
    assert await warm_up(tower, DEMO_PROCESSOR, 0.0) == 0  # type: ignore[arg-type]
    assert tower.batches == []


async def test_a_tower_that_gives_no_usable_embedding_never_becomes_ready() -> None:
    with pytest.raises(ModelFailure):
        await warm_up(Tower(error=ModelFailure("not finite")), DEMO_PROCESSOR, 60.0)  # type: ignore[arg-type]
