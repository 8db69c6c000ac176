"""workers/mode-hand.sh: what goes over ssh, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HAND = Path(__file__).resolve().parents[2] / "workers" / "mode-hand.sh"


def run(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """With an ssh that says what it was given and what it read."""
    ssh = folder / "ssh"
    ssh.write_text('#!/bin/bash\nprintf "%s|" "$@"\ncat\nexit ${SSH_SAYS:-0}\n')
    ssh.chmod(0o755)
    return subprocess.run(
        [str(HAND), *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


@pytest.mark.parametrize(
    ("words", "there"),
    [
        (("gpu01", "slurmd-stop", "gpu01-night"), "systemctl stop slurmd@gpu01-night"),
        (("gpu01", "slurmd-start", "gpu01"), "systemctl start slurmd@gpu01"),
        (("gpu01", "mig-apply"), "hybridsched mode apply -f -"),
        (("gpu01", "mig-assert"), "hybridsched mode assert -f -"),
    ],
)
def test_what_is_done_on_the_host(tmp_path: Path, words: tuple[str, ...], there: str) -> None:
    done = run(tmp_path, *words, stdin="the layout")
    assert done.returncode == 0
    *options, last = done.stdout.rsplit("|", 1)[0].split("|")
    assert (options[-1], last) == ("root@gpu01", there)
    assert done.stdout.endswith("|the layout" if "mig" in words[1] else "|")


def test_a_site_may_give_ssh_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSCHED_HAND_SSH_CONFIG", "/etc/hybridsched/ssh config")
    done = run(tmp_path, "gpu01", "slurmd-stop", "gpu01")
    assert done.stdout.startswith("-F|/etc/hybridsched/ssh config|")


def sent(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Where each call of ssh went, and what it was to run there."""
    words = done.stdout.split("|")
    return [(words[i - 1], words[i]) for i, word in enumerate(words) if words[i - 1].startswith("root@")]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSCHED_HAND_CONTROLLER", "head1")


@pytest.mark.usefixtures("controller")
def test_a_nodes_gres_are_written_where_slurmctld_is_and_where_the_host_has_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "hybridsched slurm configure gpu01 night --etc /opt/slurm"
    monkeypatch.setenv("HYBRIDSCHED_HAND_ETC", "/opt/slurm")
    done = run(tmp_path, "gpu01", "configure", "gpu01", "night")
    assert done.returncode == 0
    assert sent(done) == [
        ("root@head1", write),
        ("root@gpu01", f"if [ -e /opt/slurm/slurm.conf ]; then {write}; fi"),
    ]


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize("status", [1, 2, 255])
def test_what_fails_on_slurmctlds_host_is_said_and_the_host_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("SSH_SAYS", str(status))
    done = run(tmp_path, "gpu01", "configure", "gpu01", "night")
    assert done.returncode == status
    assert [where for where, _ in sent(done)] == ["root@head1"]


@pytest.mark.usefixtures("controller")
def test_slurmctld_is_restarted_on_its_host(tmp_path: Path) -> None:
    done = run(tmp_path, "-", "slurmctld-restart")
    assert sent(done) == [("root@head1", "systemctl restart slurmctld")]


@pytest.mark.parametrize("name", ["head1; reboot", "-oProxyCommand=x"])
def test_a_controller_that_is_no_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HYBRIDSCHED_HAND_CONTROLLER", name)
    done = run(tmp_path, "-", "slurmctld-restart")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_word_of_an_earlier_term_is_refused_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frozen policy worker had asked for comes late, when another has gone on."""
    heard = tmp_path / "term"

    def there(term: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("HYBRIDSCHED_TERM", term)
        said = run(tmp_path, "gpu01", "slurmd-stop", "gpu01").stdout
        command = said.partition("|root@gpu01|")[2].removesuffix("|")
        assert command.endswith("systemctl stop slurmd@gpu01")
        command = command.replace("/run/hybridsched-hand.term", str(heard)).replace("systemctl", "echo")
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=20)

    assert there("1796057033240").stdout == "stop slurmd@gpu01\n"
    assert there("1796057033241").returncode == 0
    late = there("1796057033240")
    assert (late.returncode, late.stdout) == (1, "")
    assert "term 1796057033240 of the policy workers, and that of 1796057033241 has begun" in late.stderr
    # Nothing of a quarter of an hour ago is still under way: the count may have begun anew.
    os.utime(heard, (0, 0))
    assert there("7").returncode == 0
    heard.write_text("no number\n")
    assert there("8").returncode == 0
    assert heard.read_text() == "8\n"
    monkeypatch.setenv("HYBRIDSCHED_TERM", "1; reboot")
    assert run(tmp_path, "gpu01", "slurmd-stop", "gpu01").stdout.split("|")[-2].startswith("systemctl")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("gpu01",),
        ("-oProxyCommand=touch x", "slurmd-stop", "n1"),
        ("gpu01", "slurmd-stop", "n1; reboot"),
        ("gpu01 reboot", "slurmd-stop", "n1"),
        ("-", "slurmctld-restart"),
        ("gpu01", "configure", "gpu01", "day"),
        ("gpu01", "configure", "gpu01", "day; reboot"),
        ("-", "slurmd-stop", "n1"),
        ("gpu01", "anything"),
    ],
)
def test_what_is_no_name_or_not_its_work_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mode-hand.sh: ")
