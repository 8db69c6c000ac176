"""`worker offline --own-engine`: which lanes it can be."""

from __future__ import annotations

from click.testing import CliRunner

from hybridsched.cli.main import cli


def test_a_lane_with_its_own_engine_has_its_replicas_name() -> None:
    given = ["worker", "offline", "--replica", "r0", "--model", "m", "--engine", "http://127.0.0.1:1"]
    done = CliRunner().invoke(cli, [*given, "--own-engine", "--lane", "r0own"])
    assert done.exit_code == 2, done.output
    assert "--lane r0own: a lane with its own engine has the name of its replica, r0" in done.output
    assert "leave --lane out" in done.output
