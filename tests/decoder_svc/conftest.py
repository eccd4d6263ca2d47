"""A tiny model that is loaded once, in the reference's and in our form, and the two orders of steps."""

import pytest

from tests.decoder_svc import engines
from tests.decoder_svc.engines import World, make_world
from tests.decoder_svc.model.pairs import make_pair


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(make_pair(tmp_path_factory.mktemp("tiny"), is_moe=False, is_tied=False))


@pytest.fixture(params=["in turn", "overlapping"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with engines that finish a step before the next, and with engines that launch the next before."""
    monkeypatch.setattr(engines, "OVERLAPS_STEPS", request.param == "overlapping")
