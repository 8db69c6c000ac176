"""The private Slurm that a demo runs on: slurm/testbed, brought up, guarded and taken down.

A guard process takes it down when the demo is killed, and the next demo takes down what both left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from hybridsched.demo.supervisor import ChildError
from hybridsched.log import get_logger
from hybridsched.ports import KeptPorts, first_job_id, keep_testbed_ports
from hybridsched.slurmfiles.render import source_folder

GPUS_A_NODE = 2
"""Replicas of a node. A demo of four GPUs then has two nodes, so that Slurm has a choice."""
SPARE_GPUS = 1
"""GPUs of a node beyond its replicas': an offline job may hold one of its own, until online wants it."""
REPLICA_CPUS = 4
"""As workers/online.sbatch asks."""
OTHER_CPUS = 3
"""For two offline jobs and an extra online one. No room for one more replica: the spare GPU stays spare."""
GPU_TYPE = "a100"
KILL_WAIT_S = 15
UP_S = 60.0
_PREFIX = "hs-demo-"
_MARK = "demo.pid"
_log = get_logger("slurm-demo")


class Testbed:
    """Use it as a context. `gpus` replicas have room.

    `state`: the folder of its daemons, which must be short, absent, empty, or left by a demo that is dead;
    None: a new one in the temporary folder. Their logs are copied to `logs` at the end.

    Raises (when entered):
        ChildError: it does not come up; with what the daemons said.
    """

    __test__ = False

    def __init__(self, *, gpus: int, state: Path | None, logs: Path) -> None:
        self.nodes = -(-gpus // GPUS_A_NODE)
        self._wanted = state
        self._logs = logs
        self._guard: subprocess.Popen[bytes] | None = None
        self._ports: KeptPorts | None = None
        self.state = Path()
        self._source = source_folder()

    @property
    def scripts(self) -> Path:
        """The folder above workers/ with the batch scripts."""
        return self._source.parent

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands speak to this Slurm."""
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.state / "etc" / "slurm.conf")}

    def __enter__(self) -> Self:
        _sweep()
        self.state = self._claim()
        try:
            self._watch_over()
            base = self._keep_ports()
            ids = self.state / "first-job.conf"
            # Two testbeds of one machine share node names: with job ids in common as well, the epilog of one
            # would take the other's processes for its own.
            ids.write_text(f"FirstJobId={first_job_id(base)}\n", encoding="ascii")
            self._call(
                "up",
                *("--port-base", str(base), "--nodes", str(self.nodes)),
                *("--gpus", str(GPUS_A_NODE + SPARE_GPUS), "--fill", str(GPUS_A_NODE), "--type", GPU_TYPE),
                *("--cpus", str(REPLICA_CPUS * GPUS_A_NODE + OTHER_CPUS), "--kill-wait", str(KILL_WAIT_S)),
                *("--append", str(ids)),
            )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _claim(self) -> Path:
        """The state folder, ours from now on."""
        if self._wanted is None:
            state = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        else:
            state = self._wanted.absolute()
            if (state / _MARK).exists():
                if _alive(_owner(state)):
                    raise ChildError(f"{state} is in use by a demo that runs (process {_owner(state)})")
                _down(self._source, state)
            try:
                state.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ChildError(f"the state folder {state} cannot be made: {error}") from error
            if any(state.iterdir()):
                raise ChildError(
                    f"{state} is not empty and was not left by a demo; choose another with --slurm-state"
                )
        state.chmod(0o755)
        started = psutil.Process().create_time()
        (state / _MARK).write_text(f"{os.getpid()} {started}", encoding="ascii")
        return state

    def _keep_ports(self) -> int:
        """The port base; its ports are ours until the end, also while a daemon is away."""
        try:
            base, self._ports = keep_testbed_ports(self.nodes, seed=os.getpid())
        except OSError as error:
            raise ChildError(str(error)) from error
        return base

    def _watch_over(self) -> None:
        guard = self._source / "testbed" / "guard"
        self._guard = subprocess.Popen(  # noqa: S603 - an argument list of our own
            [str(guard), "--state", str(self.state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _call(self, name: str, *options: str) -> None:
        argv = [str(self._source / "testbed" / name), "--state", str(self.state), *options]
        try:
            done = subprocess.run(  # noqa: S603 - an argument list of our own
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=UP_S,
                check=False,
                start_new_session=True,  # Ctrl-C is for the demo, which then takes it down in order
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ChildError(f"slurm/testbed/{name} did not end: {error}") from error
        if done.returncode != 0:
            raise ChildError(f"the private Slurm does not come {name}: {done.stderr.strip()[-1500:]}")

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._logs.mkdir(parents=True, exist_ok=True)
            for path in (self.state / "log").glob("*.log"):
                shutil.copyfile(path, self._logs / path.name)
        if self._ports is not None:
            self._ports.close()
        if not _down(self._source, self.state):
            return  # the guard tries again when this process ends
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(b"done\n")
                self._guard.stdin.close()
            self._guard.wait(10)


def _down(source: Path, state: Path) -> bool:
    """Take down what runs in `state` and remove it; whether that went well."""
    try:
        done = subprocess.run(  # noqa: S603 - an argument list of our own
            [str(source / "testbed" / "down"), "--state", str(state), "--wipe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=UP_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said, status = str(error), -1
    else:
        said, status = done.stderr.strip(), done.returncode
    if status != 0 and (state / "etc" / "shape").exists():
        _log.warning(
            "The private Slurm was not taken down; the next demo tries again, or call slurm/testbed/down.",
            key="testbed_not_down",
            state=str(state),
            said=said[-500:],
        )
        return False
    if state.exists():  # it did not come up: nothing of Slurm is in it
        shutil.rmtree(state, ignore_errors=True)
    return True


def _owner(state: Path) -> tuple[int, float]:
    """Process and its start that a state folder belongs to; (0, 0) when that cannot be read."""
    try:
        pid, started = (state / _MARK).read_text(encoding="ascii").split()
        return int(pid), float(started)
    except (OSError, ValueError):
        return 0, 0.0


def _alive(owner: tuple[int, float]) -> bool:
    pid, started = owner
    try:
        return pid > 0 and abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.Error:
        return False


def _sweep() -> None:
    """Take down what demos have left whose guard was killed with them."""
    for state in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            mine = state.stat().st_uid == os.geteuid() and (state / _MARK).exists()
        except OSError:
            continue
        if mine and not _alive(_owner(state)):
            _down(source_folder(), state)


def program() -> str:
    """The `hybridsched` that jobs run: the one beside this Python.

    Raises:
        ChildError: there is none.
    """
    found = Path(sys.executable).parent / "hybridsched"
    if not found.exists():
        raise ChildError(f"{found} is missing: install the package, so that Slurm's jobs can run it")
    return str(found)
