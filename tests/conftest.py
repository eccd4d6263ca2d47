"""What holds for every test: one thread of compute in each process, and logging as it was when the test is over.

The workers share few cores, and OpenMP teams that share cores stall each other: set before torch is imported, and
inherited by the services that tests start.
"""

import logging
import os
from collections.abc import Iterator

import pytest
import structlog

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs in the test's process sends logs to a stream that is closed when the test is over."""
    level, config = logging.root.level, structlog.get_config()
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
    logging.root.setLevel(level)
    structlog.configure(**config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that at the end no worker is left alone with one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
