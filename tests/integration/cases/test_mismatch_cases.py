"""An encoder whose embeddings are not the decoder's, and two fleets that share one Redis."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.integration.cases.asking import ask, client_of, error_of, text_of
from tests.integration.cases.manifest import case
from tests.paths import needs_shared
from tests.servable import save_servable
from tests.stack import Stack, running_stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mismatched(
    stack: Stack, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A second fleet at the first one's Redis, whose encoder makes embeddings of another width."""
    folder = tmp_path_factory.mktemp("mismatched")
    wide, _ = save_servable(folder / "wide", text={"hidden_size": 64}, vision={"out_hidden_size": 64})
    redis = next(c.environment["TANDEM_REDIS"] for c in stack.plan.services if c.name == "gateway-0")
    served = {"served_model_name": "tandem-demo", "redis": redis}
    by_role = {"encoder": {"TANDEM_MODEL": str(wide)}}
    async with running_stack(folder / "stack", tiny_checkpoint, by_role=by_role, **served) as other:
        yield other


async def test_an_encoder_of_another_width_fails_pictures_alone_and_no_cache_hit_crosses(
    client: httpx.AsyncClient, mismatched: Stack
) -> None:
    entry, text = case("DIS-09"), case("DIS-03").body("then")
    bodies = [entry.body(), case("RED-08").body()]
    for body in bodies:
        assert text_of(await ask(client, body))  # now in the Redis that both use
    async with client_of(mismatched.url) as asker:
        for body in bodies:
            response = await ask(asker, body)
            assert response.status_code in entry.statuses
            message = error_of(response)["message"]
            assert "width" in message or "fingerprint" in message
            assert text_of(await ask(asker, text)) == text_of(await ask(client, text))
    for body in bodies:
        assert text_of(await ask(client, body))
