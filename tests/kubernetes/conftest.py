"""What several of these tests start from."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.paths import REPOSITORY

OUTAGE_S = 25.0  # less than the tests take beside which it is measured


@pytest.fixture(scope="session", autouse=True)
def outage() -> Iterator["subprocess.Popen[str]"]:
    """A discovery thread whose API server is away, in a process that waits while all of these tests run: they take as
    long, and the test that reads what it measured is the last."""
    command = [sys.executable, "-m", "tests.kubernetes.outage", str(OUTAGE_S)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        server.add_deployment("encoders", 2)
        server.add_deployment("decoders", 1)
        yield server
