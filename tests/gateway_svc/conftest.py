"""Every test of the gateway may read the log lines that it causes; nothing is printed."""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """The log lines of this test, in order."""
    with capture_logs() as lines:
        yield lines
