"""Fixtures that several files of these tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch_kit import write_input


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of five lines, one of which cannot run."""
    path = tmp_path / "in.jsonl"
    write_input(path, 5, bad=frozenset({1}))
    return path
