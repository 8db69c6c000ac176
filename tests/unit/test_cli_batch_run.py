"""What `batch run` says before it begins."""

from __future__ import annotations

from hybridsched.cli.batch_run import unserved


def test_lines_whose_model_no_engine_serves_are_named_with_how_many_they_are() -> None:
    said = unserved({"a": 3, "b": 1200, "c": 1}, {"a", "z"})
    assert "serves b (1,200 lines), c (1 lines); they serve a, z" in said
    assert "--engine" in said
    assert unserved({"a": 3}, {"a", "z"}) == ""
    assert unserved({}, {"a"}) == ""
