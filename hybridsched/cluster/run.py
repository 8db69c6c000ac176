"""Running one of Slurm's commands: an argument list, never a shell, with a time limit that holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence

from hybridsched.cluster.values import ClusterError
from hybridsched.core.values import Value
from hybridsched.process import die_with_parent

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_OURS = re.compile(
    r"(SBATCH|SQUEUE|SINFO|SCANCEL|SCONTROL|SALLOC)_|SLURM_(TIME_FORMAT|JSON|YAML|BITSTR_LEN)$"
)
"""Variables that change what the commands do or print. A user's own setting must not reach them."""

INSTALL = "install Slurm's client commands (Debian: slurm-client) or add them to PATH"

PATIENCE_TO_DIE_S = 2.0
"""How long a killed command gets to be gone. Only one stuck in the kernel takes any time at all."""


class Answer(Value, frozen=True, kw_only=True):
    """What a command said."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")

    @property
    def complaint(self) -> str:
        """What it had to say about a failure, on one line."""
        lines = (self.err.strip() or self.text.strip()).splitlines()
        said = " / ".join(line.strip() for line in lines[-3:])
        # It goes to terminals and into Slurm's reasons: no colours, no bells.
        plain = "".join(sign if sign.isprintable() else " " for sign in _COLOUR.sub("", said))
        return plain or f"nothing (exit status {self.status})"


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that steer Slurm's commands."""
    return {k: v for k, v in environment.items() if not _OURS.match(k)}


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    stdin: bytes | None = None,
    dies_with_us: bool = False,
) -> Answer:
    """Run a command to its end. `dies_with_us`: the kernel kills it when this process is killed.

    Raises `ClusterError`: `timeout`; `missing`, `denied` or `unreachable` when it could not be started.

    At the time limit, and when the caller is cancelled, the command and all that it started are killed.
    """
    if any("\0" in a for a in argv):
        raise ClusterError(
            f"an argument for {argv[0]} holds a NUL character", code="invalid", retryable=False
        )
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL) if dies_with_us else None,
        )
    except FileNotFoundError as error:
        remedy = "it was there when this program was started" if "/" in argv[0] else INSTALL
        raise ClusterError(
            f"{argv[0]} was not found: {remedy}",
            code="missing",
            retryable=False,
        ) from error
    except PermissionError as error:
        raise ClusterError(f"{argv[0]} may not be run: {error}", code="denied", retryable=False) from error
    except OSError as error:
        # Too many open files or processes, no memory, a file that is no program while it is being installed.
        raise ClusterError(
            f"{argv[0]} could not be started, so nothing was asked of Slurm: {error}",
            code="unreachable",
            retryable=True,
        ) from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin)
    except TimeoutError as error:
        raise ClusterError(
            f"`{' '.join(argv[:4])}` gave no answer within {timeout_s:g} s and was stopped; whether Slurm "
            "acted on it is not known; look at `scontrol ping` and slurmctld's log",
            code="timeout",
            retryable=True,
        ) from error
    finally:
        if process.returncode is None:
            await _end(process)
    return Answer(status=process.returncode or 0, out=out, err=err.decode("utf-8", "replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_TO_DIE_S):
            await process.wait()


_SIGNS: tuple[tuple[str, str, bool], ...] = (
    (
        r"unable to contact slurm controller|connection refused|communication (connection )?failure",
        "unreachable",
        True,
    ),
    # Nothing was asked: slurm.conf is not whole just now, or somebody has spoiled it.
    (r"unable to process configuration file", "unreachable", True),
    (
        r"zero bytes were transmitted|socket timed out|stand-?by mode|munge|protocol authentication",
        "unreachable",
        True,
    ),
    (
        r"access/permission denied|access denied|invalid user id|requires root|not allowed for user",
        "denied",
        False,
    ),
    (r"invalid job id|invalid node name|node \S+ not found|unknown (job|node)", "not_found", False),
    (r"unrecognized option|invalid option|doesn't allow an argument|incompatible version", "missing", False),
    (r"temporarily|try again|not available right now|transition|busy|already being", "refused", True),
)
"""Slurm's own words (slurm_errno.c and what was seen on 22.05), the code they mean, whether to try again."""


def refusal(asked: str, words: str) -> ClusterError:
    """The error for a call that Slurm answered with a complaint."""
    signs = ((code, again) for pattern, code, again in _SIGNS if re.search(pattern, words, re.IGNORECASE))
    code, retryable = next(signs, ("refused", False))
    return ClusterError(f"Slurm refused to {asked}: {words}", code=code, retryable=retryable)
