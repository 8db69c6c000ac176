"""Starts the real vLLM for tests: one engine at a time, kept while tests ask for the same flags."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil

from hybridsched.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
MODEL = "m"
"""The name under which every engine of the tests serves its model."""
SHAPES = ("multi-head", "grouped-query", "tied-embeddings")
START_S = 600.0
"""Most that a start may take, seconds: about 20 on two free cores, a multiple of it on busy ones."""
_TAIL = 4000
_ATTEMPTS = 3


def vllm_python() -> Path | None:
    """Python of the environment that `make vllm-setup` made; HYBRIDSCHED_VLLM_VENV names another.

    None: there is none, or its set-up did not come to its end.
    """
    venv = Path(os.environ.get("HYBRIDSCHED_VLLM_VENV") or ROOT / ".venv-vllm")
    python = venv / "bin" / "python"
    return python if python.exists() and (venv / ".installed").exists() else None


def make_model(python: Path, out: Path, shape: str, *, layers: int = 2) -> Path:
    """A tiny model of this shape in `out`; see tiny_model.py."""
    done = subprocess.run(
        [str(python), str(ROOT / "tests/vllm/tiny_model.py"), str(out), shape, "--layers", str(layers)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise AssertionError(f"the tiny model could not be made: {done.stderr[-_TAIL:]}")
    return out


def environment(folder: Path) -> dict[str, str]:
    """What a quick, quiet vLLM needs; everything that it leaves behind goes into `folder`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Scheduler and worker in one process, of one thread: more are slower beside other work on the cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "TMPDIR": str(folder),
        # Its unix sockets: a path of theirs is 37 characters longer and may have 107.
        "VLLM_RPC_BASE_PATH": str(folder) if len(str(folder)) < 64 else tempfile.gettempdir(),
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RealVllm:
    """One `vllm serve` on a free port of the loopback; AssertionError with its log when it does not start."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *flags: str,
        served_as: str = MODEL,
        env: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        """`port`: where it listens; 0: a free one."""
        self._folder = Path(tempfile.mkdtemp(prefix="hs-vllm-"))
        self.log = self._folder / "log"
        self.flags = flags
        self.start_s = 0.0
        """Seconds from the start of the process to its first good health check."""
        for attempt in range(_ATTEMPTS):
            self.port = port or _free_port()
            self.url = f"http://127.0.0.1:{self.port}"
            began = time.monotonic()
            command = [
                str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model),
                "--served-model-name", served_as, "--host", "127.0.0.1", "--port", str(self.port),
                "--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni", *flags,
            ]  # fmt: skip
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(self._folder) | dict(env or {}),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),  # xdist kills the processes of a run that is interrupted
                )
            if self._comes_up(began):
                self.start_s = time.monotonic() - began
                return
            tail = self.tail()
            self._end()
            if "address already in use" not in tail.lower() or attempt == _ATTEMPTS - 1:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise AssertionError(f"vLLM did not start with {' '.join(flags)}: {tail}")

    def _comes_up(self, began: float) -> bool:
        while self.process.poll() is None and time.monotonic() - began < START_S:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer,
            ):
                return bool(answer.status == 200)
            time.sleep(0.1)
        return False

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-_TAIL:]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """To the API server's process, as an operator would."""
        self.process.send_signal(number)

    def kill_core(self) -> None:
        """SIGKILL to the process that runs the model, a child of the API server."""
        children = psutil.Process(self.process.pid).children()
        core = max(children, key=lambda child: child.memory_info().rss)  # the others only track resources
        core.kill()

    def stop(self) -> None:
        """Kill all of it and remove what it left."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # orphans of a server that is dead are in its group still
        self.process.wait(30)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=30)


class RealServers:
    """At most one real engine at any time: two would share the cores, and tests would wait twice as long."""

    def __init__(self, python: Path, models: Mapping[str, Path]) -> None:
        self.python = python
        self.models = models
        self._running: RealVllm | None = None
        self._key: tuple[str, tuple[str, ...]] | None = None

    def get(self, *flags: str, shape: str = "grouped-query") -> RealVllm:
        """The engine with these flags: the one that runs, where it has them and lives; else a new one."""
        key = (shape, flags)
        if self._running is None or self._key != key or not self._running.alive:
            self.stop()
            self._running, self._key = RealVllm(self.python, self.models[shape], *flags), key
        return self._running

    def stop(self) -> None:
        """End the engine that runs, if any."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
