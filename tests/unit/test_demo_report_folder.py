"""The demo's report folder: one run at a time, and never over the results of a user's own batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridsched.demo.errors import DemoUsageError
from hybridsched.demo.report_folder import LOCK, MARK, free_folder, held, holds_own_results, prepare


def own_batch(folder: Path, *, journal: bytes = b"", output: bytes = b"") -> Path:
    """What an interrupted run of a user's batch leaves."""
    with held(folder):
        prepare(folder, generated=False)
    work = folder / ".hybridsched-batch_a"
    work.mkdir()
    (work / "manifest.json").write_bytes(b"{}")
    (work / "chunk-0.1.jsonl").write_bytes(journal)
    (folder / "batch.output.jsonl").write_bytes(output)
    return folder


def test_a_second_run_in_the_same_folder_is_refused_and_told_whose_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    with held(folder):
        prepare(folder, generated=True)
        with pytest.raises(DemoUsageError, match=r"another demo \(process \d+\) is writing"), held(folder):
            pytest.fail("it was let in")
        assert (folder / MARK).exists()
    with held(folder):
        prepare(folder, generated=True)


def test_a_run_that_comes_to_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with held(tmp_path / "report"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with held(tmp_path / "empty"):
        pass
    with held(tmp_path / "empty"):
        assert (tmp_path / "empty" / LOCK).exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DemoUsageError, match="no report of the demo"), held(tmp_path):
        pytest.fail("it was taken")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("left", [{"journal": b"{}\n"}, {"output": b"{}\n"}])
def test_finished_lines_of_a_users_batch_are_kept_and_the_next_run_has_a_folder_of_its_own(
    tmp_path: Path, left: dict[str, bytes]
) -> None:
    folder = own_batch(tmp_path / "report", **left)
    assert holds_own_results(folder)
    with pytest.raises(DemoUsageError, match="your own batch"), held(folder):
        prepare(folder, generated=True)
    assert free_folder(folder) == tmp_path / "report-2"
    own_batch(tmp_path / "report-2", output=b"{}\n")
    assert free_folder(folder) == tmp_path / "report-3"
    assert free_folder(tmp_path / "other") == tmp_path / "other"


def test_a_users_batch_that_was_stopped_before_its_first_line_blocks_nothing(tmp_path: Path) -> None:
    folder = own_batch(tmp_path / "report")
    assert not holds_own_results(folder)
    assert free_folder(folder) == folder
    with held(folder):
        prepare(folder, generated=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted([MARK, LOCK])
