"""The memory of an engine: found by its port, with its children, and unknown where it cannot be."""

from __future__ import annotations

import subprocess
import sys

import psutil

from hybridsched.telemetry.process_memory import ProcessMemory

SERVER = (
    "import socket, subprocess, sys\n"
    "sock = socket.socket(); sock.bind(('127.0.0.1', 0)); sock.listen()\n"
    "hold = 'print(1, flush=True); block = b\\'x\\' * (64 << 20); input()'\n"
    "child = subprocess.Popen([sys.executable, '-c', hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print(sock.getsockname()[1], flush=True)\n"
    "input()\n"
)


def test_it_is_that_of_the_listener_and_its_children() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        memory = ProcessMemory(f"http://127.0.0.1:{int(server.stdout.readline())}")
        found = memory.mib()
        assert found is not None
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(family) == 2
        assert found > family[0].memory_info().rss / 2**20 + 5, "the child counts"
    finally:
        server.communicate("\n")
    assert memory.mib() is None, "nobody listens there any more"


def test_an_engine_elsewhere_is_unknown() -> None:
    assert ProcessMemory("http://gpu7:8000").mib() is None
    assert ProcessMemory("http://127.0.0.1").mib() is None
