"""Tiny models, dense and MoE, tied and untied, and prompts with images and videos for them."""

import pytest

from tests.decoder_svc.model.pairs import Case, Pair, make_case, make_pair


@pytest.fixture(scope="session", params=["dense-tied", "dense-untied", "moe-tied", "moe-untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind, tie = request.param.split("-")
    return make_pair(tmp_path_factory.mktemp(request.param), is_moe=kind == "moe", is_tied=tie == "tied")


@pytest.fixture(scope="session")
def cases(pair: Pair) -> list[Case]:
    """Text alone; two images; an image and a video; a video of three frame groups."""
    return [
        make_case(pair, 1, [], []),
        make_case(pair, 2, [[1, 4, 6], [1, 8, 4]], []),
        make_case(pair, 3, [[1, 6, 4]], [[2, 4, 4]]),
        make_case(pair, 4, [], [[3, 4, 6]]),
    ]
