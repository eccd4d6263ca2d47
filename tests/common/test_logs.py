"""Log lines: one record a line, in both formats, from structlog and from libraries."""

import json
import logging
import threading
from collections.abc import Iterator

import pytest
import structlog

from common.logs import configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_json_lines_hold_fields_and_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("encoder", "info", "json")
    structlog.get_logger("a").info("item encoded", request_id="r1", num_tokens=3)
    logging.getLogger("uvicorn.error").warning("from a %s", "library")
    try:
        raise ValueError("why")
    except ValueError as exc:
        structlog.get_logger("a").error("it failed", exc_info=exc)
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], first["request_id"], first["num_tokens"]) == ("item encoded", "r1", 3)
    assert (first["service"], first["level"]) == ("encoder", "info")
    assert (second["event"], second["level"]) == ("from a library", "warning")
    assert "ValueError: why" in third["exception"]


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_what_is_below_the_level_is_not_written(
    level: structlog.typing.Any, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("encoder", level, "text")
    logger = structlog.get_logger("b")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("line")
    logging.getLogger("httpx").info("GET http://user:SECRET@host/")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == expected
    assert "SECRET" not in "".join(lines)


@pytest.mark.filterwarnings("error")
def test_a_traceback_in_text_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("encoder", "info", "text")
    prompt = " ".join(["what", "the", "user", "wrote"])
    try:
        raise ValueError(len(prompt))
    except ValueError as exc:
        structlog.get_logger("c").error("it failed", exc_info=exc)
    error = capsys.readouterr().err
    assert "ValueError: 19" in error
    assert prompt not in error


def test_lines_of_every_thread_name_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("decoder", "info", "json")
    thread = threading.Thread(target=lambda: structlog.get_logger("c").info("a step failed"))
    thread.start()
    thread.join()
    assert json.loads(capsys.readouterr().err)["service"] == "decoder"
