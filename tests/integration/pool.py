"""A whole pool in processes of its own, whose parts a test can kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridsched.ports import KeptPorts
from hybridsched.store.embedded import EmbeddedValkey
from tests.helpers import wait_until

MODEL = "tiny"
POOL = "kill"


def free_port() -> int:
    """A loopback port that was free a moment ago, for a program that may not bind one of `KeptPorts`."""
    with KeptPorts([0]) as kept:
        return kept.numbers[0]


class Pool:
    """`replicas` simulated engines with their online and offline workers, a policy worker and a Valkey."""

    def __init__(self, folder: Path, *, replicas: int = 2, speed: float = 5.0) -> None:
        self.folder = folder
        self.speed = speed
        self.replicas = [f"r{i}" for i in range(replicas)]
        self._kept = KeptPorts([0] * replicas)
        self.ports = dict(zip(self.replicas, self._kept.numbers, strict=True))
        (folder / "valkey").mkdir(parents=True)
        self.valkey = EmbeddedValkey(folder / "valkey", appendonly=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return self.valkey.url

    def commands(self) -> dict[str, list[str]]:
        """The command line of each process, by its name."""
        worker = [sys.executable, "-m", "hybridsched", "worker"]
        common = ["--redis", self.url, "--pool", POOL, "--speed", str(self.speed)]
        table = {"policy": [*worker, "policy", *common]}
        for name in self.replicas:
            port = str(self.ports[name])
            replica = ["--replica", name, "--model", MODEL, "--engine", f"http://127.0.0.1:{port}"]
            table[f"engine-{name}"] = [
                *[sys.executable, "-m", "hybridsched.engines.simulated", "--port", port],
                *["--served-model-name", MODEL, "--speed", str(self.speed), "--kv-tokens", "100000"],
                *["--max-num-seqs", "64", "--iteration-log", str(self.folder / f"engine-{name}.jsonl")],
                "--enable-prompt-tokens-details",
            ]
            table[f"online-{name}"] = [*worker, "online", *common, *replica]
            table[f"offline-{name}"] = [*worker, "offline", *common, *replica]
        return table

    def start(self, name: str) -> None:
        """Start one process (or the Valkey), and wait until it is there."""
        if name == "valkey":
            self.valkey.start()
            return
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            self.commands()[name], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        log.close()
        if name.startswith("engine-"):
            url = f"http://127.0.0.1:{self.ports[name.removeprefix('engine-')]}/health"
            wait_until(lambda: self._answers(url), timeout_s=30, what=f"{name}: health")

    @staticmethod
    def _answers(url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self, name: str) -> None:
        """kill -9, and see that it is gone."""
        if name == "valkey":
            self.valkey.kill()
            return
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def start_all(self) -> None:
        self.start("valkey")
        published = self.cli("pool", "policy", "set", "idle-window")
        assert published.returncode == 0, published.stderr
        for name in self.commands():
            self.start(name)

    def stop_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill(name)
        self.valkey.stop()
        self._kept.close()

    def cli(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `hybridsched ARGUMENTS` against this pool."""
        environment = {**os.environ, "HYBRIDSCHED_REDIS_URL": self.url, "HYBRIDSCHED_POOL": POOL}
        return subprocess.run(
            [sys.executable, "-m", "hybridsched", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        """The JSON that a command prints; the command must succeed."""
        done = self.cli(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def logs(self) -> str:
        """The last lines of every process, for a failing test's message."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-8:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)


@contextmanager
def running_pool(folder: Path, **options: Any) -> Iterator[Pool]:
    """A started pool; everything is stopped at the end, however it ends."""
    pool = Pool(folder, **options)
    try:
        pool.start_all()
        yield pool
    finally:
        pool.stop_all()
