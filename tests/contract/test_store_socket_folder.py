"""Folders of sockets: those of dead owners go at the next start, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from hybridsched.store import socket_folder
from hybridsched.store.socket_folder import OWNER, make_folder, remove_left


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left(base: Path, name: str, pid: int, started: float) -> Path:
    folder = base / name
    folder.mkdir()
    (folder / OWNER).write_bytes(msgspec.json.encode({"pid": pid, "started": started}))
    return folder


def dead() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_folders_of_dead_owners_go_and_all_others_stay(base: Path) -> None:
    me = psutil.Process()
    killed = left(base, "hs-killed", dead(), 1.0)
    reused = left(base, "hs-reused", me.pid, me.create_time() - 1000)
    mine = left(base, "hs-mine", me.pid, me.create_time())
    other = left(base, "other", dead(), 1.0)
    bare = base / "hs-bare"
    bare.mkdir()
    garbled = left(base, "hs-garbled", 1, 1.0)
    (garbled / OWNER).write_bytes(b"{")
    outside = left(base, "outside", dead(), 1.0)
    (base / "hs-link").symlink_to(outside)
    made = make_folder()
    kept = [mine, other, bare, garbled, outside, base / "hs-link", made]
    assert [folder for folder in kept if not folder.exists()] == []
    assert [folder for folder in (killed, reused) if folder.exists()] == []
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_server_that_outlives_its_owner_keeps_its_folder(base: Path) -> None:
    folder = left(base, "hs-x", dead(), 1.0)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
        server.listen()
        assert remove_left(base) == []
    assert remove_left(base) == [folder]


def test_a_folder_of_another_user_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(base, "hs-theirs", dead(), 1.0)
    monkeypatch.setattr(socket_folder.os, "geteuid", lambda: os.getuid() + 1)
    assert remove_left(base) == []
    assert folder.exists()
