"""The process in which pyslurm runs: one JSON line in for a call, one JSON line out for its answer.

pyslurm holds Python's lock through every call, and libslurm tries for minutes to reach a dead slurmctld: in
the caller's own process that would stop everything, gates included. Some of its calls end the process
outright. So it gets a process of its own, which may be killed at any time.

    python -m hybridsched.cluster.pyslurm_host [MODULE]
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import msgspec

from hybridsched.cluster.pyslurm_calls import Calls
from hybridsched.cluster.run import refusal
from hybridsched.cluster.values import ClusterError, JobChange, JobSpec


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    op: str
    args: list[Any] = msgspec.field(default_factory=list)
    spec: JobSpec | None = None
    environment: dict[str, str] | None = None
    change: JobChange | None = None


class Failure(msgspec.Struct, kw_only=True):
    message: str
    code: str
    retryable: bool

    def error(self) -> ClusterError:
        return ClusterError(self.message, code=self.code, retryable=self.retryable)


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    value: Any = None
    failure: Failure | None = None


def answer(calls: Calls, line: bytes) -> Reply:
    """The reply to one request. Never raises: what goes wrong is the reply."""
    op = "a call"
    try:
        request = msgspec.json.decode(line, type=Request)
        op = request.op
        call = calls.table()[request.op]
        extra = [x for x in (request.spec, request.environment, request.change) if x is not None]
        return Reply(value=call(*request.args, *extra))
    except ClusterError as error:
        return Reply(failure=Failure(message=str(error), code=error.code, retryable=error.retryable))
    except Exception as error:  # noqa: BLE001 - whatever pyslurm raises belongs to the caller
        told = refusal(f"do {op} by pyslurm", f"{type(error).__name__}: {error}")
        return Reply(failure=Failure(message=str(told), code=told.code, retryable=told.retryable))


def main(argv: list[str]) -> int:
    """Serve until stdin ends. What libslurm prints on stdout goes to stderr, out of the answers' way."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    name = argv[1] if len(argv) > 1 else "pyslurm"
    try:
        calls = Calls(importlib.import_module(name))
    except Exception as error:  # noqa: BLE001 - a version that does not fit raises all sorts of things
        failure = Failure(
            message=f"the module {name} cannot be used here ({type(error).__name__}: {error}); install the "
            "pyslurm whose version is that of your Slurm (major.minor), or use Slurm's commands",
            code="missing",
            retryable=False,
        )
        out.write(msgspec.json.encode(Reply(failure=failure)) + b"\n")
        out.flush()
        return 1
    out.write(msgspec.json.encode(Reply(value="ready")) + b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        out.write(msgspec.json.encode(answer(calls, line)) + b"\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
