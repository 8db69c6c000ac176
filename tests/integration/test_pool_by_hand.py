"""docs/pool-by-hand.md, as a new user pastes it: each line of it works."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.ports import KeptPorts
from tests.integration.pages import paste, shell_lines

PORTS = ("6390", "8010", "8011")


@pytest.fixture
def chosen() -> Iterator[dict[str, str]]:
    """Free ports in place of the page's."""
    with KeptPorts([0] * len(PORTS)) as kept:
        yield dict(zip(PORTS, map(str, kept.numbers), strict=True))


@pytest.mark.timeout(240)
def test_the_page_can_be_pasted(tmp_path: Path, chosen: dict[str, str]) -> None:
    programs = str(Path(sys.executable).parent)
    script = shell_lines("pool-by-hand.md", chosen | {"$PWD/.venv/bin": programs})
    _, out, err = paste(script, tmp_path)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("try/*.log"))
    assert "Policy idle-window is version 1 of pool try." in out, err + logs
    assert re.search(r"^r0 +llama +closed +no_work", out, re.M), out + logs
    assert "answer: " in out, err + logs
    assert "Lane r0 is " in out
    assert re.search(r"^batch_\w+ completed: 400 lines", out, re.M), out + err + logs
    assert "400 prompts.output.jsonl" in out
    for free in chosen.values():
        with socket.socket() as one:  # nothing of the pool is left behind
            assert one.connect_ex(("127.0.0.1", int(free))) != 0
