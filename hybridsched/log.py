"""Logs: a sentence plus a stable key, on stderr; JSON when stderr is not a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog


def configure(*, level: str = "info", json_lines: bool | None = None) -> None:
    """Set up logging once per process. `json_lines` None means: JSON unless stderr is a terminal.

    Raises:
        ValueError: `level` is not the name of a log level.
    """
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        raise ValueError(f"log level {level!r} is unknown; use one of debug, info, warning, error")
    as_json = (not sys.stderr.isatty()) if json_lines is None else json_lines
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(names[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Stderr())),
        # A logger that was used before obeys a later call as well; a line is rare enough to be bound anew.
        cache_logger_on_first_use=False,
    )


class _Stderr:
    """Standard error as it is at each line: loggers outlive a stream that stood in its place for a while."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger bound to the name of its component."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(component=name))
