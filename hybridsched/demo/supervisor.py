"""Child processes of the demo: started, watched, restarted when they die, and none outlives the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from hybridsched.core.values import Value
from hybridsched.log import get_logger
from hybridsched.process import die_with_parent

_log = get_logger("supervisor")

BACK_OFF_S = (0.1, 3.0)
"""First and longest wait before a child that died is started again."""
STEADY_S = 10.0
"""A child that ran this long before it died begins with the first wait again."""
GIVE_UP = 8
"""Deaths in a row, each before `STEADY_S`, after which a child counts as broken."""


class ChildError(Exception):
    """A child process does not run. The message holds the end of its log."""


class ChildSpec(Value, frozen=True, kw_only=True):
    """How a child is started."""

    name: str
    argv: tuple[str, ...]
    log: Path
    """Where its stdout and stderr go (appended)."""
    restart: bool = True
    """Whether it is started again when it ends by itself."""
    cwd: Path | None = None
    """Its working directory; None: the demo's."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables of its own, beside the demo's."""


class _Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.deaths = 0
        self.again_at: float | None = None
        self.status: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """A set of named children. Call `check` a few times a second: nothing runs in the background.

    Each child leads a process group of its own, so that Ctrl-C reaches the demo alone, which then stops them
    in order; when the demo is killed, the kernel kills them. Use it as a context: leaving stops all.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(os.environ if env is None else env)
        self._children: dict[str, _Child] = {}
        self.restarts: dict[str, int] = {}
        """How often a child was started again, by name; only those that were."""

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def start(self, spec: ChildSpec) -> None:
        """Start a child.

        Raises:
            ChildError: its program cannot be run.
            ValueError: a child of that name exists.
        """
        if spec.name in self._children:
            raise ValueError(f"a child named {spec.name!r} exists already")
        child = _Child(spec)
        self._launch(child)
        self._children[spec.name] = child

    def _launch(self, child: _Child) -> None:
        spec = child.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            try:
                child.process = subprocess.Popen(  # noqa: S603 - an argument list of our own, no shell
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env | spec.env,
                    cwd=spec.cwd,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                raise ChildError(f"{spec.name} cannot be started: {error}") from error
        child.started = time.monotonic()
        child.again_at = None

    def pid(self, name: str) -> int | None:
        """Process id of a child; None when it does not run."""
        child = self._children[name]
        return child.process.pid if child.process is not None and child.running else None

    def status(self, name: str) -> int | None:
        """Exit status of a child that ended (negative: the signal); None while it runs."""
        child = self._children[name]
        return None if child.process is None else child.process.poll()

    def check(self) -> list[str]:
        """Start again what died, each after its wait. Returns the names of those started now.

        Raises:
            ChildError: a child dies again and again.
        """
        now = time.monotonic()
        begun = []
        for child in self._children.values():
            if not child.spec.restart or child.running:
                continue
            if child.again_at is None:
                self._note_death(child, now)
            elif now >= child.again_at:
                self._launch(child)
                name = child.spec.name
                self.restarts[name] = self.restarts.get(name, 0) + 1
                begun.append(name)
        return begun

    def restart(self, name: str) -> None:
        """End a child that runs and cannot be used: the next calls of `check` start it again."""
        child = self._children[name]
        if child.running:
            _log.warning(
                f"{name} cannot be used and is started again; see the logs of its workers for the cause.",
                key="child_restarted",
                child=name,
            )
            self._reap_group(child)

    def _note_death(self, child: _Child, now: float) -> None:
        name = child.spec.name
        child.deaths = child.deaths + 1 if now - child.started < STEADY_S else 1
        status = self.status(name)
        if child.deaths >= GIVE_UP:
            raise ChildError(
                f"{name} died {child.deaths} times in a row (status {status}); the end of its log "
                f"{child.spec.log}:\n{self.tail(name)}"
            )
        wait = min(BACK_OFF_S[0] * 2 ** (child.deaths - 1), BACK_OFF_S[1])
        child.again_at = now + wait
        self._reap_group(child)
        _log.warning(
            f"{name} died and is started again; see its log for the cause.",
            key="child_died",
            child=name,
            status=status,
            wait_s=wait,
            log=str(child.spec.log),
        )

    def ensure_running(self, names: Iterable[str]) -> None:
        """Raise when one of `names` has ended: for the time in which all are expected to come up.

        Raises:
            ChildError: with the end of its log.
        """
        for name in names:
            if not self._children[name].running:
                raise ChildError(
                    f"{name} ended while it was starting (status {self.status(name)}); the end of its log "
                    f"{self._children[name].spec.log}:\n{self.tail(name)}"
                )

    def tail(self, name: str, lines: int = 5) -> str:
        """The last lines of a child's log."""
        return log_tail(self._children[name].spec.log, lines)

    def stop(self, names: Iterable[str] | None = None, *, timeout_s: float = 10.0) -> list[str]:
        """SIGTERM to all of `names` (default: every child), then SIGKILL to those left after `timeout_s`.

        Returns the names that had to be killed. The children are forgotten; their logs stay.
        """
        chosen = [self._children.pop(name) for name in (list(self._children) if names is None else names)]
        for child in chosen:
            if child.process is not None and child.running:
                child.process.terminate()
        deadline = time.monotonic() + timeout_s
        killed = []
        for child in chosen:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                killed.append(child.spec.name)
                _log.warning(
                    f"{child.spec.name} did not stop within {timeout_s:g} s and was killed.",
                    key="child_killed",
                    child=child.spec.name,
                )
            self._reap_group(child)
            child.process.wait()
        return killed

    @staticmethod
    def _reap_group(child: _Child) -> None:
        """End whatever is left of a child's process group."""
        if child.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)


def log_tail(path: Path, lines: int = 5) -> str:
    """The last lines of a text file; says so when there are none."""
    try:
        with path.open("rb") as file:
            text = _last_block(file).decode("utf-8", "replace")
    except OSError:
        return "(no log was written)"
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(kept) or "(the log is empty)"


def _last_block(file: IO[bytes], size: int = 8192) -> bytes:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read()
