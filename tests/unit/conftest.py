"""Fixtures that several files of these tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch_kit import write_input


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A batch's input, of three lines."""
    path = tmp_path / "in.jsonl"
    write_input(path, 3)
    return path
