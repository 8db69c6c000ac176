"""A program that imports the client while Redis is away: its stdout stays its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from hybridsched.client import Client, StoreError
with Client("redis://127.0.0.1:1", pool="p", patience_s=0.4) as client:
    try:
        client.complete(model="m", prompt="x", path="/v1/completions", timeout_s=5)
    except StoreError as error:
        print("answer:", type(error).__name__)
"""


def test_retries_are_not_reported_on_stdout() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "answer: StoreUnavailable\n", (done.stdout, done.stderr)
    assert done.stderr.count("cannot be reached") == 1, "one line for the outage, however many tries"
    assert "Traceback" not in done.stderr
