"""`worker offline`: which lane it can be."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from hybridsched.cli.main import cli


@pytest.mark.parametrize("own", [[], ["--own-engine"]])
def test_a_lane_has_its_replicas_name(own: list[str]) -> None:
    given = ["worker", "offline", "--replica", "r0", "--model", "m", "--engine", "http://127.0.0.1:1"]
    done = CliRunner().invoke(cli, [*given, *own, "--lane", "r0own"])
    assert done.exit_code == 2, done.output
    assert "--lane r0own: a lane has the name of its replica, r0," in done.output
    assert "leave --lane out" in done.output
