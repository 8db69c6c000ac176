"""What is wrong with a call before Slurm is asked. Both real adapters and the fake use these."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import datetime

from hybridsched.cluster.values import ClusterError, JobSpec

_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*$")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*$")
_SIGNAL = re.compile(r"[A-Z][A-Z0-9+-]{1,9}$")


def _invalid(message: str) -> ClusterError:
    return ClusterError(message, code="invalid", retryable=False)


def one_node(name: str) -> str:
    """The name of exactly one node. `ALL` and lists would mean many, so they are refused."""
    if not _NODE.match(name) or name.upper() in ("ALL", "DEFAULT"):
        raise _invalid(f"node {name!r} was given; the name of one node is needed, no list and not ALL")
    return name


def job_id(job: int) -> str:
    if isinstance(job, bool) or job <= 0:
        raise _invalid(f"job {job!r} was given; a positive number is needed")
    return str(job)


def job_address(job: int, task: int | None) -> str:
    """`123`, or `123_4` for task 4 of array 123."""
    if task is None:
        return job_id(job)
    if isinstance(task, bool) or task < 0:
        raise _invalid(f"task {task!r} of job {job} was given; a number from 0 on is needed")
    return f"{job_id(job)}_{task}"


def signal_name(name: str) -> str:
    """`USR2`, from `USR2` or `SIGUSR2`."""
    bare = name.upper().removeprefix("SIG")
    if not _SIGNAL.match(bare):
        raise _invalid(f"signal {name!r} was given; a name such as USR2 is needed")
    return bare


def gres_word(name: str) -> str:
    if not _WORD.match(name):
        raise _invalid(f"GRES {name!r} was given; a plain name is needed")
    return name


def gres_count(count: int) -> int:
    if isinstance(count, bool) or count < 0:
        raise _invalid(f"a GRES count of {count!r} was given; 0 or more is needed")
    return count


def one_line(what: str, value: str) -> str:
    if "\n" in value or "\0" in value or "\r" in value:
        raise _invalid(f"{what} {value!r} was given; it must be one line")
    return value


def reason(text: str) -> str:
    """A reason for a drain: Slurm refuses to drain without one."""
    if not text.strip():
        raise _invalid("a node is drained with a reason; an empty one was given")
    return one_line("the reason", text.strip())


def reservation(name: str, nodes: Collection[str], start_ms: float, minutes: int) -> list[str]:
    """The fields of a reservation as scontrol takes them."""
    gres_word(name)
    if not nodes or minutes < 1:
        raise _invalid(
            f"reservation {name!r} of {len(nodes)} nodes for {minutes} min; give one of each or more"
        )
    start = datetime.fromtimestamp(math.ceil(start_ms / 1000.0)).strftime("%Y-%m-%dT%H:%M:%S")
    listed = ",".join(one_node(node) for node in nodes)
    return [f"starttime={start}", f"duration={minutes}", f"nodes={listed}"]


def new_reservation(user: str) -> list[str]:
    """What one that is made has besides: jobs of its user need not name it (MAGNETIC) and may start before it
    (FLEX), so that replicas that die meanwhile are replaced."""
    return [f"users={user}", "flags=IGNORE_JOBS,MAGNETIC,FLEX"]


def spec(value: JobSpec) -> JobSpec:
    """A job description that makes sense."""
    if (value.script is None) == (value.script_path is None):
        raise _invalid(f"job {value.name!r} needs either script or script_path, and only one of them")
    if value.script is not None and not value.script.startswith("#!"):
        raise _invalid(
            f"the script of job {value.name!r} must begin with #! and an interpreter, as /bin/bash"
        )
    if value.script is not None and value.arguments:
        raise _invalid(
            f"job {value.name!r}: arguments go to a script_path; a script given as text takes none"
        )
    if value.time_limit_min is not None and value.time_limit_min < 1:
        raise _invalid(f"a time limit of {value.time_limit_min} min was given; 1 or more is needed")
    for gres in value.gres:
        gres_word(gres.name)
        gres_count(gres.count)
    for name in (*value.nodes, *value.excluded):
        one_node(name)
    for key, text in value.environment.items():
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*$", key) or "\0" in text:
            raise _invalid(f"environment variable {key!r} of job {value.name!r} cannot be set")
    texts = {
        "name": value.name,
        "comment": value.comment,
        "partition": value.partition,
        "signal": value.signal,
        "output": value.output,
        "error": value.error,
        "chdir": value.chdir,
        "array": value.array,
        "account": value.account,
        "qos": value.qos,
        "user": value.user,
    }
    for what, text_or_none in texts.items():
        if text_or_none is not None:
            one_line(what, text_or_none)
    return value
