"""The supervisor on real processes: restart, give up, stop, and nothing left behind even after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from hybridsched.demo import supervisor as module
from hybridsched.demo.passes import EngineRestarts
from hybridsched.demo.supervisor import ChildError, ChildSpec, Supervisor
from hybridsched.store.connection import async_client
from hybridsched.store.telemetry import EngineRecord, ReplicaRecord, TelemetryStore
from tests.helpers import alive, await_until, wait_until

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PARENT = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(p.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def child(folder: Path, name: str, code: str, *, restart: bool = True) -> ChildSpec:
    return ChildSpec(
        name=name, argv=(sys.executable, "-c", code), log=folder / f"{name}.log", restart=restart
    )


def text(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_a_killed_child_is_started_again_and_counted(tmp_path: Path) -> None:
    with Supervisor() as children:
        children.start(child(tmp_path, "a", SLEEPER))
        children.start(child(tmp_path, "b", SLEEPER))
        first = children.pid("a")
        assert first is not None
        other = children.pid("b")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "a" in children.check(), what="the restart")
        assert children.restarts == {"a": 1}
        assert children.pid("a") not in (None, first)
        assert children.pid("b") == other
        pids = [pid for name in "ab" if (pid := children.pid(name)) is not None]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_an_engine_is_started_again_once_for_each_wish_of_its_worker(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    client = async_client(valkey_url)
    telemetry = TelemetryStore(client, "demo")

    async def says(restarts: int) -> None:
        engine = EngineRecord(restarts=restarts)
        await telemetry.publish(ReplicaRecord(replica="r0", model="m", lane="r0", engine=engine))

    try:
        with Supervisor() as children:
            children.start(child(tmp_path, "engine-r0", SLEEPER))
            first = children.pid("engine-r0")
            wishes = EngineRestarts(telemetry, children, every_s=0.0)
            await says(0)
            await wishes.look()
            assert children.pid("engine-r0") == first
            await says(1)
            await wishes.look()
            await await_until(lambda: children.check(), what="the restart")
            second = children.pid("engine-r0")
            assert second not in (None, first)
            for _ in range(3):
                await wishes.look()
            assert children.pid("engine-r0") == second, "the record says the same for a while"
            await says(2)
            await wishes.look()
            await await_until(lambda: children.check(), what="the second restart")
            assert children.restarts == {"engine-r0": 2}
    finally:
        await client.aclose()


def test_a_child_that_dies_again_and_again_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACK_OFF_S", (0.0, 0.0))
    monkeypatch.setattr(module, "GIVE_UP", 3)
    with Supervisor() as children:
        children.start(child(tmp_path, "bad", "raise SystemExit('the port is taken')"))
        with pytest.raises(ChildError, match=r"bad died 3 times in a row \(status 1\)[\s\S]*port is taken"):
            wait_until(lambda: children.check() and False, what="the error")


def test_a_program_that_cannot_run_and_one_that_ends_at_once_are_said(tmp_path: Path) -> None:
    with Supervisor() as children:
        with pytest.raises(ChildError, match="ghost cannot be started"):
            children.start(ChildSpec(name="ghost", argv=("/no/such/program",), log=tmp_path / "g.log"))
        children.start(child(tmp_path, "short", "print('bye'); raise SystemExit(3)", restart=False))
        wait_until(lambda: children.status("short") is not None, what="its end")
        assert children.check() == []
        with pytest.raises(ChildError, match=r"short ended while it was starting \(status 3\)[\s\S]*bye"):
            children.ensure_running(["short"])
        with pytest.raises(ValueError, match="exists already"):
            children.start(child(tmp_path, "short", SLEEPER))


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    with Supervisor() as children:
        children.start(child(tmp_path, "good", SLEEPER))
        children.start(child(tmp_path, "deaf", DEAF))
        wait_until(lambda: "up" in text(tmp_path, "deaf") and "up" in text(tmp_path, "good"), what="start")
        pids = [children.pid("good"), children.pid("deaf")]
        assert children.stop(timeout_s=0.5) == ["deaf"]
        assert not any(psutil.pid_exists(pid or 0) for pid in pids)


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    with Supervisor() as children:
        children.start(child(tmp_path, "parent", PARENT))
        wait_until(lambda: text(tmp_path, "parent").strip(), what="the grandchild")
        grandchild = int(text(tmp_path, "parent"))
        children.stop()
    wait_until(lambda: not alive(grandchild), what="the grandchild's end")


def test_no_child_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from hybridsched.demo.supervisor import ChildSpec, Supervisor\n"
        "s = Supervisor()\n"
        f"log = Path({str(tmp_path / 'c.log')!r})\n"
        f"s.start(ChildSpec(name='c', argv=(sys.executable, '-c', {SLEEPER!r}), log=log))\n"
        "print(s.pid('c'), flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    wait_until(lambda: not alive(pid), what="the child's end")
