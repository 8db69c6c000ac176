"""epilog.sh by itself, as slurmd runs it: what it takes away, what it leaves, and how much work that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_until

SOURCE = Path(__file__).resolve().parents[2] / "slurm" / "epilog.sh"
USER = 65534
JOB = 987_654_321

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs it as root, for jobs of users")


class Node:
    """A folder of marks, one of shared memory, and the script beside its settings."""

    def __init__(self, folder: Path) -> None:
        self.shm, self.marks, self.bin = folder / "shm", folder / "run" / "n1", folder / "bin"
        for path in (self.shm, self.marks, self.bin):
            path.mkdir(parents=True)
        self.shm.chmod(0o1777)
        self.script = folder / "epilog.sh"
        self.edit("PATH=", f"PATH={self.bin}:", source=SOURCE)
        (folder / "hybridsched-node.conf").write_text(
            f"run_dir = {self.marks.parent}\nshm_dir = {self.shm}\nlog = {folder}/log\n"
        )
        self.squeue("exit 1")

    def edit(self, old: str, new: str, *, source: Path | None = None) -> None:
        text = (source or self.script).read_text()
        assert old in text
        self.script.write_text(text.replace(old, new, 1))
        self.script.chmod(0o755)

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def squeue(self, body: str) -> None:
        self.program("squeue", body)

    def stamp(self, job: int, *, kind: str = "job", uid: int = USER, at_s: float = 1000.0) -> Path:
        path = self.marks / f"{kind}-{job}"
        path.write_text(f"{uid}\n")
        os.utime(path, (at_s, at_s))
        return path

    def leave(self, name: str, *, at_s: float | None = None) -> Path:
        path = self.shm / name
        path.write_bytes(b"data")
        os.chown(path, USER, USER)
        if at_s is not None:
            os.utime(path, (at_s, at_s))
        return path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_UID": str(USER), "SLURMD_NODENAME": "n1"}

    def run(self) -> str:
        """What it said. It must end well: a failing epilog drains the node."""
        given = self.env | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
        done = subprocess.run(
            [self.script], env=given, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def left(self) -> list[str]:
        return sorted(path.name for path in self.shm.iterdir())


@pytest.fixture
def node() -> Iterator[Node]:
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory(prefix="hs-epilog-") as folder:
        Path(folder).chmod(0o755)
        made = Node(Path(folder))
        made.stamp(JOB)
        yield made


def test_many_files_are_removed_by_a_few_programs(node: Node) -> None:
    """One program for each file made a healthy node fail its epilog's time, and drain."""
    node.program("rm", f'echo x >> {node.bin}/removed; chmod -f 666 {node.bin}/removed; exec /bin/rm "$@"')
    (node.bin / "removed").write_text("")
    (node.bin / "removed").chmod(0o666)
    for number in range(15_000):
        node.leave(f"left_{number}")
    said = node.run()
    assert "removed 15000 of 15000 files" in said
    assert node.left() == []
    assert len((node.bin / "removed").read_text().split()) < 60
    assert not list(node.marks.iterdir())


def test_odd_names_and_closed_folders_go_and_links_are_not_followed(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("data")
    os.chown(outside / "kept", USER, USER)
    names = ["a b", "a\nb", "a]b", "*", "$(touch x)", "-rf", "'", '"', "@", "ü (deleted)"]
    for name in names:
        node.leave(name)
    (node.shm / "link").symlink_to(outside)
    os.lchown(node.shm / "link", USER, USER)
    closed = node.shm / "closed"
    closed.mkdir()
    node.leave("closed/within")
    os.chown(closed, USER, USER)
    closed.chmod(0)
    (node.shm / "roots").write_text("data")
    node.run()
    assert node.left() == ["roots"]
    assert (outside / "kept").exists()


def test_what_is_open_or_older_stays(node: Node) -> None:
    node.leave("older", at_s=500.0)
    node.leave("mine\nand open")
    folder = node.shm / "folder"
    folder.mkdir()
    os.chown(folder, USER, USER)
    node.leave("folder/open")
    node.leave("shut")
    with (node.shm / "mine\nand open").open(), (folder / "open").open():
        node.run()
    assert node.left() == ["folder", "mine\nand open", "older"]


@pytest.mark.parametrize("squeue", ["exit 0", "echo 5", f"echo {JOB}"])
def test_the_stamp_of_a_job_that_is_no_more_does_not_count(node: Node, squeue: str) -> None:
    """As an epilog leaves it that slurmd has ended: it kept every later one of the user from cleaning."""
    node.stamp(1, at_s=900.0)
    node.leave("of job 1", at_s=950.0)
    node.leave("left")
    node.squeue(squeue)
    node.run()
    assert node.left() == []
    assert not list(node.marks.iterdir())


@pytest.mark.parametrize("squeue", ["echo 1", "exit 1", "exec sleep 600"])
def test_another_job_of_the_user_is_left_alone(node: Node, squeue: str) -> None:
    """What cannot be told counts as here. The last job of the user takes away what all of them left."""
    if "sleep" in squeue:
        node.edit('"$(left_s 5)" squeue', "0.2 squeue")
    other = node.stamp(1, at_s=2000.0)
    node.leave("staged")
    node.leave("of the ended one", at_s=1500.0)
    node.leave(f"hybridsched-{JOB}")
    node.squeue(squeue)
    assert "job-1 of the same user" in node.run()
    assert node.left() == ["of the ended one", "staged"]
    assert not (node.marks / f"job-{JOB}").exists()
    other.rename(node.marks / f"job-{JOB}")
    node.run()
    assert node.left() == []
    assert not list(node.marks.iterdir())


def test_another_users_stamp_does_not_count(node: Node) -> None:
    node.stamp(1, uid=1234)
    node.leave("left")
    node.run()
    assert node.left() == []
    assert [path.name for path in node.marks.iterdir()] == ["job-1"]


def test_an_epilog_that_was_ended_is_made_good_by_the_next_one(node: Node) -> None:
    node.stamp(7, kind="ended", at_s=100.0)
    node.leave("of job 7", at_s=500.0)
    node.run()
    assert node.left() == []


def test_what_there_is_no_time_for_waits_for_the_next_epilog(node: Node) -> None:
    node.leave("left")
    node.program(
        "xargs",
        f'[[ $* != *" rm -rf "* || -e {node.bin}/fast ]] || exec sleep 600\nexec /usr/bin/xargs "$@"',
    )
    node.edit('"$(left_s 20)"', "0.2")
    assert "had no time" in node.run()
    assert node.left() == ["left"]
    (node.bin / "fast").touch()
    node.stamp(JOB, at_s=2_000_000_000.0)
    node.run()
    assert node.left() == []
    assert not list(node.marks.iterdir())


PLANTED = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.prctl(15, b"slurmstepd", 0, 0, 0)
os.setgid(65534); os.setuid(65534)
libc.prctl(4, int(sys.argv[1]), 0, 0, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("dumpable", [0, 1])
def test_what_a_process_says_of_itself_does_not_spare_it(node: Node, dumpable: int) -> None:
    env = node.env | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
    with subprocess.Popen(
        [sys.executable, "-c", PLANTED, str(dumpable)],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            node.run()
            wait_until(lambda: process.poll() is not None, what="the end of the process")
            assert process.returncode == -signal.SIGKILL
        finally:
            process.kill()
