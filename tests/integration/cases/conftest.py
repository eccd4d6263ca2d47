"""One running system for all cases that do not hurt it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.gateway_svc.media_host import MediaHost, media_host
from tests.integration.cases.asking import client_of
from tests.stack import Stack, running_stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def host() -> AsyncIterator[MediaHost]:
    """A media host that the system may contact although it is on loopback."""
    async with media_host() as host:
        yield host


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, host: MediaHost
) -> AsyncIterator[Stack]:
    """One process of each kind, which serves the tiny model by the name that the cases use."""
    environment = {
        "TANDEM_ALLOW_PRIVATE_MEDIA_HOSTS": f"127.0.0.1:{host.port}",
        "TANDEM_MEDIA_TIMEOUT_S": "1.5",
    }
    folder = tmp_path_factory.mktemp("cases")
    async with running_stack(folder, tiny_checkpoint, environment, served_model_name="tandem-demo") as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the system."""
    async with client_of(stack.url) as client:
        yield client
