"""A private Slurm for tests: real daemons of this machine, brought up by slurm/testbed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hybridsched.ports import first_job_id, keep_testbed_ports
from tests.helpers import alive, wait_until

TESTBED = Path(__file__).resolve().parent.parent / "slurm" / "testbed"
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch")
_PREFIX = "hs-slurm-"


def installed() -> bool:
    """Whether every daemon and client of the testbed is on this machine."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    return all(shutil.which(name, path=path) for name in PROGRAMS)


class Testbed:
    """One testbed in its own state folder."""

    __test__ = False

    def __init__(self, state: Path, *options: str, nodes: int = 4, gpus: int = 4, records: int = 1) -> None:
        """`records`: node records of each node, whose ports are kept free too."""
        self.state = state
        self.nodes = tuple(f"n{i}" for i in range(1, nodes + 1))
        self.gpus = gpus
        # Its own from here to `down`, also while a daemon of it is dead.
        self.port_base, self._ports = keep_testbed_ports(nodes * records, seed=os.getpid())
        self.conf = state / "etc" / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        # Two testbeds on one machine share node names and users: with job ids in common as well, the epilog
        # of one would take the other's processes for its own.
        ids = state / "first-job.conf"
        ids.write_text(f"FirstJobId={first_job_id(self.port_base)}\n")
        self._options = [
            *("--state", str(state), "--port-base", str(self.port_base), "--append", str(ids)),
            *("--nodes", str(nodes), "--gpus", str(gpus), *options),
        ]

    def up(self, *options: str) -> None:
        """Start what does not run. Raises AssertionError with what `up` said."""
        _call([str(TESTBED / "up"), *self._options, *options], timeout_s=60)

    def down(self, *, wipe: bool = True) -> None:
        """End everything of this testbed."""
        wish = ["--wipe"] if wipe else []
        _call([str(TESTBED / "down"), "--state", str(self.state), *wish], timeout_s=60)
        if wipe:
            self._ports.close()

    def run(self, *command: str, timeout_s: float = 60, stdin: str | None = None) -> str:
        """What a command says on stdout, run with this testbed's SLURM_CONF. Raises when it fails."""
        return _call(list(command), timeout_s=timeout_s, env=self.env, stdin=stdin)

    def attempt(
        self, *command: str, timeout_s: float = 20, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same without a check of the exit status."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=self.env,
            input=stdin,
            check=False,
        )

    def sbatch(self, *options: str, script: str | None = None, name: str = "job") -> int:
        """Submit `script` (with its #SBATCH lines), or what `options` name; the job's id.

        A script's output goes to STATE/out/JOBID.out unless `options` say otherwise.
        """
        out = self.state / "out"
        out.mkdir(exist_ok=True, mode=0o1777)
        out.chmod(0o1777)
        given = ["sbatch", "--parsable", f"--job-name={name}", f"--output={out}/%j.out", *options]
        said = self.run(*given, stdin=script)
        return int(said.strip().split(";")[0])

    def output(self, job: int | str) -> str:
        """What a job's file holds so far."""
        path = self.state / "out" / f"{job}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`; empty when the job is forgotten."""
        answer = self.attempt("scontrol", "-o", "show", "job", str(job))
        return _fields(answer.stdout) if answer.returncode == 0 else {}

    def wait_job(self, job: int, *states: str, timeout_s: float = 30) -> dict[str, str]:
        """Wait until the job is in one of `states` (RUNNING, PENDING, COMPLETED, ...)."""
        seen: dict[str, str] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.job(job))
            return seen.get("JobState") in states

        try:
            wait_until(there, timeout_s=timeout_s, what=f"job {job} in {' or '.join(states)}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen.get('JobState')} ({seen.get('Reason')})") from None
        return seen

    def node(self, node: str) -> dict[str, str]:
        """The fields of `scontrol -d show node` (with GresUsed)."""
        return _fields(self.run("scontrol", "-o", "-d", "show", "node", node))

    def set_fill(self, node: str, count: int) -> None:
        """Set the live count of hsfill, the node's other GRES repeated unchanged. It is not consumed."""
        others = [part for part in self.node(node)["Gres"].split(",") if not part.startswith("hsfill")]
        gres = ",".join([*others, f"hsfill:no_consume:{count}"])
        self.run("scontrol", "update", f"nodename={node}", f"gres={gres}")

    def fill(self, node: str) -> int:
        """The live count of hsfill."""
        found = re.search(r"\bhsfill:(\d+)", self.node(node).get("Gres", ""))
        return int(found.group(1)) if found else 0

    def pid(self, daemon: str) -> int:
        """Pid of `slurmctld`, `munged` or `slurmd-NODE`."""
        return int((self.state / "run" / f"{daemon}.pid").read_text())

    def kill(self, daemon: str, signal: int = 9) -> None:
        """Kill a daemon and wait until it is gone; `up()` starts it again."""
        pid = self.pid(daemon)
        os.kill(pid, signal)
        wait_until(lambda: not alive(pid), timeout_s=15, what=f"the end of {daemon}")

    def restart_controller(self, signal: int = 15) -> None:
        """Stop slurmctld and start it again with its saved state."""
        self.kill("slurmctld", signal)
        self.up()

    def wait_saved(self, job: int) -> None:
        """Wait until slurmctld has written down what it knows of a job: it does so some seconds after a
        change, and after a kill it knows no more than that."""
        saved, now = self.state / "ctld" / "job_state", time.time()
        self.run("scontrol", "update", f"jobid={job}", "nice=0")  # a change, or there may be nothing to write

        def written() -> bool:
            return saved.exists() and saved.stat().st_mtime > now

        wait_until(written, timeout_s=60, what="slurmctld's saved state")

    def log(self, daemon: str = "slurmctld") -> str:
        """The log of `slurmctld`, `slurmd-NODE`, `hooks` or `munged`."""
        path = self.state / "log" / f"{daemon}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def clear(self) -> None:
        """Back to the state after `up`: no jobs, every node idle, hsfill at its configured count."""
        self.up()
        if self.run("squeue", "-h", "-o", "%i").strip():
            self.run("scancel", "--quiet", "--state=PENDING")
            self.attempt("scancel", "--quiet", "--signal=KILL", "--full", "--state=RUNNING")
            self.run("scancel", "--quiet", "--state=RUNNING")
            self.run("scancel", "--quiet", "--state=SUSPENDED")
            wait_until(
                lambda: not self.run("squeue", "-h", "-o", "%i").strip(),
                timeout_s=40,
                what="a queue without jobs",
            )
        for node in self.nodes:
            if re.search("DRAIN|DOWN|FAIL", self.node(node)["State"]):
                self.attempt("scontrol", "update", f"nodename={node}", "state=resume")
            if self.fill(node) != self.gpus:
                self.set_fill(node, self.gpus)
        wait_until(
            lambda: all(self.node(node)["State"] == "IDLE" for node in self.nodes),
            timeout_s=30,
            what="every node idle",
        )


def _fields(line: str) -> dict[str, str]:
    """`Key=value Key=value`, where values may hold blanks."""
    found = re.finditer(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|$)", line.strip())
    return {match.group(1): match.group(2).strip() for match in found}


def _call(
    command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=env,
        input=stdin,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr or done.stdout}"
        )
    return done.stdout


def sweep() -> None:
    """Take down the testbeds of test runs that are dead: their folders carry the pid of the run."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not alive(int(owner)) and folder.owner() == Path("/proc/self").owner():
            subprocess.run(
                [str(TESTBED / "down"), "--state", str(folder), "--wipe"],
                capture_output=True,
                timeout=60,
                check=False,
            )


def new_state() -> Path:
    """A folder for a testbed, short enough for munge's socket and open to jobs of other users."""
    state = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    state.chmod(0o755)
    return state


def require_slurm() -> None:
    """Skip the test where Slurm's daemons are missing; fail it under CI=true."""
    from tests.conftest import missing

    if not installed():
        missing("Slurm's daemons")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Testbed]:
    """Four nodes with four fake GPUs each, for the whole run. Tests that change it leave it as it was."""
    require_slurm()
    sweep()
    testbed = Testbed(new_state())
    try:
        testbed.up()
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def clean_slurm(slurm: Testbed) -> Testbed:
    """The same, without jobs and with every node idle at the start of the test."""
    slurm.clear()
    return slurm
