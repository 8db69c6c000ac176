"""Pages of docs/ for tests, as a reader pastes their shell lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Pasted(NamedTuple):
    """How the shell ended, and what it printed."""

    status: int
    out: str
    err: str


def shell_lines(page: str, changes: Mapping[str, str]) -> str:
    """All shell lines of a page, with `changes` from what it says to what the test needs."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S))
    for old in changes:
        assert old in script, old
    # In one pass: a free port may have one of the page's within.
    return re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], script)


def paste(script: str, folder: Path) -> Pasted:
    """Run them in one shell that ends at the first line that fails, and with it all that it has started."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDSCHED_")}
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as shell:
        try:
            out, err = shell.communicate(timeout=200)
        finally:
            if shell.poll() != 0:
                with contextlib.suppress(ProcessLookupError):  # it left nothing behind
                    os.killpg(shell.pid, signal.SIGKILL)
    return Pasted(shell.returncode, out, err)
