"""pyslurm's process: killed when it hangs, started anew when it dies, refused when it is not there."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.pyslurm_adapter import PyslurmCluster
from hybridsched.cluster.values import ClusterError
from tests.contract.cluster_rigs import StandinRig, offline

CLUSTER = Path(__file__).resolve().parents[2] / "hybridsched" / "cluster"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[StandinRig]:
    made = StandinRig(tmp_path)
    yield made
    await made.close()


async def test_a_call_that_hangs_is_ended_and_the_next_one_works(rig: StandinRig) -> None:
    await rig.pyslurm.ping()
    rig.pyslurm._timeout_s = 0.5
    rig.path.with_suffix(".hang").touch()
    before = time.monotonic()
    with pytest.raises(ClusterError) as error:
        await rig.pyslurm.ping()
    assert (error.value.code, error.value.retryable) == ("timeout", True)
    assert time.monotonic() - before < 15
    rig.path.with_suffix(".hang").unlink()
    rig.pyslurm._timeout_s = 20.0
    await rig.pyslurm.ping()


async def test_a_call_that_ends_its_process_is_told_and_the_next_one_works(rig: StandinRig) -> None:
    rig.path.with_suffix(".abort").touch()
    with pytest.raises(ClusterError) as error:
        await rig.pyslurm.ping()
    assert (error.value.code, error.value.retryable) == ("died", True)
    assert "-6" in str(error.value)
    await rig.pyslurm.ping()


async def test_a_module_that_is_not_there_is_told_with_the_remedy() -> None:
    cluster = PyslurmCluster(
        commands=CommandCluster(environment={}), module="no_such_pyslurm", python=sys.executable, timeout_s=20
    )
    for _ in range(2):
        with pytest.raises(ClusterError) as error:
            await cluster.jobs()
        assert (error.value.code, error.value.retryable) == ("missing", False)
        assert "commands" in str(error.value)
    await cluster.close()


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("B:USR2@60", "B:SIGUSR2@60"),
        ("USR2", "SIGUSR2"),
        ("B:SIGTERM", "B:SIGTERM"),
        ("TERM@30", "SIGTERM@30"),
    ],
)
async def test_signals_go_by_their_full_name(rig: StandinRig, given: str, sent: str) -> None:
    number = await rig.cluster.submit(offline(rig, signal=given))
    with rig.state() as slurm:
        spec = slurm.jobs[number].spec
    assert spec.signal == sent
    assert spec.environment["SBATCH_SIGNAL"] == given, "where a job_submit plugin sees it"


async def test_task_0_of_an_array_is_a_task(rig: StandinRig) -> None:
    number = await rig.cluster.submit(offline(rig))
    with rig.state() as slurm:
        slurm._set(number, array_job=number, array_task=0)
    (job,) = await rig.cluster.jobs(ids=[number])
    assert (job.array_job, job.array_task) == (number, 0)


def test_the_calls_that_end_the_process_are_never_made() -> None:
    """Reservation.create aborts, the resource layout segfaults, configured_gres is read and never written."""
    for path in CLUSTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                assert name not in ("create", "get_resource_layout_per_node", "load_stats"), path
                assert "configured_gres" not in {k.arg for k in node.keywords}, path


def test_pyslurm_is_imported_nowhere() -> None:
    for path in CLUSTER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert "pyslurm" not in {a.name for a in node.names}, path
