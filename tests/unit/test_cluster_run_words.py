"""What a command complained of, as it goes to terminals and into Slurm's reasons."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridsched.cluster.run import Answer, run
from hybridsched.cluster.values import ClusterError


def test_a_complaint_has_no_colours_and_no_signs_that_steer_a_terminal() -> None:
    said = Answer(status=1, out=b"", err="one\n\x1b[31mred\x1b[0m\x07 \tend\n")
    assert said.complaint == "one / red   end"
    assert Answer(status=3, out=b"", err=" \n").complaint == "nothing (exit status 3)"


@pytest.mark.parametrize(
    ("program", "says"), [("no-such-slurm-command", "slurm-client"), ("{folder}/hand", "it was there when")]
)
async def test_a_command_that_is_missing_says_what_to_do(tmp_path: Path, program: str, says: str) -> None:
    name = program.format(folder=tmp_path)
    with pytest.raises(ClusterError, match=says) as caught:
        await run([name], timeout_s=5.0, environment=os.environ)
    assert (caught.value.code, caught.value.retryable) == ("missing", False)
