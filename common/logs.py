"""Structured log lines of every service: one event, then key=value pairs, or JSON where a collector reads them.

Call `configure_logs` once, in `__main__`. Lines never hold media, prompts, keys or URLs with queries: callers pass
counts, ids and durations only.
"""

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(service: str, level: LogLevel, log_format: LogFormat) -> None:
    """Send structlog and standard-library records through one formatter to stderr."""

    def add_service(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not a context variable: threads that nobody's task started would not have it.
        return {**event, "service": service}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.EventRenamer("event"),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("PIL", "asyncio", "httpcore", "httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
