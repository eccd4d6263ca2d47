"""What several of these tests start from."""

from collections.abc import AsyncIterator

import pytest

from tests.kubernetes.fake_api import FakeApi, fake_api


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        server.add_deployment("encoders", 2)
        server.add_deployment("decoders", 1)
        yield server
