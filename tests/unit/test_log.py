"""Logs: what a second call of `configure` changes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from hybridsched import log


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_logger_that_was_used_obeys_a_later_call(capsys: pytest.CaptureFixture[str]) -> None:
    """It kept its first level and its first form for good."""
    logger = log.get_logger("job")
    log.configure(level="error", json_lines=False)
    logger.info("One.", key="one")
    log.configure(level="info", json_lines=True)
    logger.info("Two.", key="two")
    said = json.loads(capsys.readouterr().err)
    assert (said["event"], said["key"], said["component"], said["level"]) == ("Two.", "two", "job", "info")


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is unknown; use one of debug, info, warning, error"):
        log.configure(level="loud")
