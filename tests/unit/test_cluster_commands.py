"""The commands adapter against programs that misbehave on purpose."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from hybridsched.cluster.commands import CommandCluster, sbatch_arguments, sbatch_environment
from hybridsched.cluster.run import base_environment, run
from hybridsched.cluster.values import ClusterError, Gres, JobSpec, total
from tests.helpers import alive, await_until

DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def cluster(folder: Path, **options: float) -> CommandCluster:
    settings = {"timeout_s": 5.0, "ping_timeout_s": 1.0, "doubt_s": 0.2, **options}
    return CommandCluster(
        environment={"PATH": f"{folder}:{os.environ['PATH']}"},
        timeout_s=settings["timeout_s"],
        ping_timeout_s=settings["ping_timeout_s"],
        doubt_s=settings["doubt_s"],
    )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


async def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ClusterError) as error:
        await run(["no-such-slurm-command"], timeout_s=1, environment={"PATH": "/nowhere"})
    assert (error.value.code, error.value.retryable) == ("missing", False)
    assert "slurm-client" in str(error.value)


async def test_a_silent_command_is_ended_with_all_it_started(tmp_path: Path) -> None:
    program(tmp_path, "hang", f"sleep 60 & echo $! > {tmp_path}/child\nwait\n")
    with pytest.raises(ClusterError) as error:
        await run([str(tmp_path / "hang")], timeout_s=0.5, environment=dict(os.environ))
    assert (error.value.code, error.value.retryable) == ("timeout", True)
    child = int((tmp_path / "child").read_text())
    await await_until(lambda: not alive(child), what="the end of the child")


async def test_a_cancelled_call_ends_its_command(tmp_path: Path) -> None:
    program(tmp_path, "hang", f"echo $$ > {tmp_path}/pid\nexec sleep 60\n")
    call = asyncio.create_task(run([str(tmp_path / "hang")], timeout_s=50, environment=dict(os.environ)))
    await await_until(
        lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), what="the start"
    )
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


async def test_a_call_to_a_dead_controller_gives_up_before_its_time(path: Path) -> None:
    program(
        path,
        "scontrol",
        'case $1 in ping) echo "Slurmctld(primary) at c is DOWN"; exit 1;; *) exec sleep 60;; esac\n',
    )
    before = time.monotonic()
    with pytest.raises(ClusterError) as error:
        await cluster(path, timeout_s=30).config(["X"])
    assert error.value.code == "unreachable"
    assert time.monotonic() - before < 20, "it did not wait for its whole time limit"


async def test_a_controller_that_hangs_is_a_timeout(path: Path) -> None:
    program(path, "scontrol", "exec sleep 60\n")
    with pytest.raises(ClusterError) as error:
        await cluster(path, timeout_s=1.5, ping_timeout_s=0.5).config(["X"])
    assert error.value.code == "timeout"


async def test_json_that_cannot_be_had_is_replaced_by_text(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = 'echo "$*" >> "$0.calls"\n'
    program(path, "scontrol", 'echo "slurm-wlm 22.05.8"\n')
    told = (DATA / "22.05" / "squeue_marked.txt").as_posix()
    program(
        path,
        "squeue",
        mark
        + 'case "$*" in *--json*) echo "squeue: error: cannot find serializer plugin" >&2; exit 1;; esac\n'
        + "for form; do :; done; m=${form%%|*}\n"
        + f'sed "s/MARK/$m/g" {told}\n',
    )
    made = cluster(path)
    first = await made.jobs(ids=[1, 2])
    assert [j.id for j in first] == [2, 1]
    await made.jobs(ids=[1])
    calls = (path / "squeue.calls").read_text()
    assert calls.count("--json") == 1, "it is not tried at every look"
    monkeypatch.setattr("hybridsched.cluster.commands.JSON_AGAIN_S", 0.0)
    again = cluster(path)
    await again.jobs(ids=[1])
    await again.jobs(ids=[1])
    calls = (path / "squeue.calls").read_text()
    assert calls.count("--json") == 3, "it is not given up for ever"


async def test_a_name_that_is_no_utf_8_costs_nothing(path: Path) -> None:
    """`sbatch -J $'bad\\xff'` by any user in any partition."""
    raw = (DATA / "22.05" / "squeue.json").read_bytes()
    head, jobs_of_it = raw.split(b'"jobs"')
    bad = head + b'"jobs"' + jobs_of_it.replace(b'"name": "', b'"name": "bad\xff', 1)
    assert b"\xff" in bad
    (path / "bad.json").write_bytes(bad)
    program(path, "scontrol", 'echo "slurm-wlm 22.05.8"\n')
    program(path, "squeue", f'case "$*" in *--json*) cat {path}/bad.json;; *) exit 1;; esac\n')
    jobs = await cluster(path).jobs()
    assert any(j.name.startswith("bad\ufffd") for j in jobs)
    assert all(j.restarts is not None for j in jobs)


async def test_a_command_that_cannot_be_started_is_unreachable(tmp_path: Path) -> None:
    """It is being installed, or this process has too many files open."""
    (tmp_path / "scontrol").write_bytes(b"\x7fELF")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(ClusterError) as error:
        await run([str(tmp_path / "scontrol")], timeout_s=1, environment={})
    assert (error.value.code, error.value.retryable) == ("unreachable", True)
    assert "Exec format error" in str(error.value)


async def test_later_versions_are_read_as_json(path: Path) -> None:
    folder = DATA / "24.11"
    program(
        path,
        "scontrol",
        f'case "$*" in *--version*) echo "slurm 24.11.5";; *--json*) cat {folder}/scontrol_node.json;;'
        ' *hostnames*) printf "n2\\nn3\\n";; *) exit 9;; esac\n',
    )
    program(path, "squeue", f"cat {folder}/squeue.json\n")
    made = cluster(path)
    nodes = {n.name: n for n in await made.nodes()}
    assert total(nodes["n1"].gres, "hsfill") == 1
    jobs = {j.id: j for j in await made.jobs()}
    assert jobs[5].nodes == ("n2", "n3")


async def test_sbatch_that_names_no_job(path: Path) -> None:
    program(path, "sbatch", "echo Submitted\n")
    with pytest.raises(ClusterError) as error:
        await cluster(path).submit(JobSpec(name="x", script="#!/bin/sh\n"))
    assert error.value.code == "unreadable"
    program(path, "sbatch", 'cat > "$0.script"; echo "17;cluster2"\n')
    assert await cluster(path).submit(JobSpec(name="x", script="#!/bin/sh\necho hi\n")) == 17
    assert (path / "sbatch.script").read_text() == "#!/bin/sh\necho hi\n"


def test_a_whole_command_line() -> None:
    spec = JobSpec(
        name="a b",
        script_path="/jobs/it's mine.sh",
        arguments=("--x", "$HOME; rm"),
        partition="offline",
        gres=(Gres(name="gpu", type="a100", count=2), Gres(name="hsfill")),
        nodes=("n1", "n2"),
        time_limit_min=90,
        cpus_per_task=4,
        memory_mb=2048,
        comment="batch=b1",
        signal="B:USR2@60",
        requeue=True,
        append=True,
        output="/logs/%j.out",
        chdir="/data",
        array="0-3%1",
        environment={"A": "1,2 3"},
        hold=True,
        user="nobody",
    )
    assert sbatch_arguments(spec) == [
        "sbatch",
        "--parsable",
        "--job-name=a b",
        "--partition=offline",
        "--gres=gpu:a100:2,hsfill:1",
        "--nodelist=n1,n2",
        "--time=90",
        "--cpus-per-task=4",
        "--mem=2048M",
        "--comment=batch=b1",
        "--open-mode=append",
        "--output=/logs/%j.out",
        "--chdir=/data",
        "--array=0-3%1",
        "--uid=nobody",
        "--requeue",
        "--hold",
        "/jobs/it's mine.sh",
        "--x",
        "$HOME; rm",
    ]
    environment = sbatch_environment(spec, {"PATH": "/bin", "A": "0"})
    assert environment == {"PATH": "/bin", "A": "1,2 3", "SBATCH_SIGNAL": "B:USR2@60"}


def test_the_caller_s_own_slurm_settings_do_not_reach_the_commands() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/x", "SLURM_JOB_ID": "7"}
    steering = {
        "SBATCH_PARTITION": "x",
        "SQUEUE_FORMAT": "%i",
        "SCANCEL_CTLD": "1",
        "SLURM_TIME_FORMAT": "relative",
    }
    assert base_environment({**kept, **steering}) == kept
