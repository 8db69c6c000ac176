"""The NVML test double of tests/native, built once a run, and the real pynvml over it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conftest import missing

SOURCES = sorted((Path(__file__).resolve().parent / "native").glob("*.c"))
VARIABLE = "HYBRIDSCHED_NVML_DOUBLE"
LIBRARY = "libnvidia-ml.so.1"
WHOLE = 0xFFFFFFFF
"""For `Double.process`: no instance, the whole GPU."""
UNSAID = 2**64 - 1
"""NVML's word for memory that it does not know."""


@functools.cache
def build() -> Path:
    """The folder that holds the library, for LD_LIBRARY_PATH."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing("a C compiler (cc)")
        raise AssertionError
    folder = tempfile.TemporaryDirectory(prefix="hs-nvml-")
    build.folder = folder  # type: ignore[attr-defined]  # it goes with the process
    out = Path(folder.name) / LIBRARY
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", str(out), *map(str, SOURCES)], check=True, timeout=60)
    return out.parent


@functools.cache
def pynvml() -> ModuleType:
    """The real pynvml, as a module of its own with the double for its library.

    Of its own, so that no other test of this process finds a driver. A child process with LD_LIBRARY_PATH
    finds the double by pynvml's own search: see `Double.environment`.
    """
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        missing("nvidia-ml-py")
        raise AssertionError
    spec = importlib.util.spec_from_file_location("pynvml_on_the_double", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there
    spec.loader.exec_module(module)
    module.nvmlLib = ctypes.CDLL(str(build() / LIBRARY))  # type: ignore[attr-defined]
    return module


class Double:
    """The GPUs of one state file, set up by a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nvml: Any = pynvml()
        self._lib = self.nvml.nvmlLib

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a child process whose pynvml finds these GPUs."""
        return {**os.environ, "LD_LIBRARY_PATH": str(build()), VARIABLE: str(self.path)}

    def new(self, models: Sequence[str]) -> None:
        keys = (ctypes.c_char_p * len(models))(*(model.encode() for model in models))
        self._done(self._lib.double_new(os.fsencode(self.path), keys, len(models)))

    def _done(self, answer: int) -> None:
        assert answer == 0, f"the double said {answer}"

    def root(self, yes: bool) -> None:
        self._done(self._lib.double_root(int(yes)))

    def fail_change(self, after: int, code: int) -> None:
        """The n-th call from now that changes something fails (0: the next)."""
        self._done(self._lib.double_fail_change(after, code))

    def kill_change(self, after: int) -> None:
        """The process that makes the n-th call from now that changes something is killed before it does."""
        self._done(self._lib.double_kill_change(after))

    def fail_any(self, after: int, code: int) -> None:
        """The n-th call from now fails, whatever it is."""
        self._done(self._lib.double_fail_any(after, code))

    def failed(self) -> bool:
        """Whether what was ordered by `fail_change` or `fail_any` has happened."""
        yes = ctypes.c_uint()
        self._done(self._lib.double_failed(ctypes.byref(yes)))
        return bool(yes.value)

    def fail_call(self, name: str, code: int) -> None:
        """Every call of this name fails; an empty name: none."""
        self._done(self._lib.double_fail_call(name.encode(), code))

    def needs_reset(self, gpu: int, yes: bool = True) -> None:
        self._done(self._lib.double_needs_reset(gpu, int(yes)))

    def lost(self, gpu: int, yes: bool = True) -> None:
        self._done(self._lib.double_lost(gpu, int(yes)))

    def mode(self, gpu: int, on: bool) -> None:
        self._done(self._lib.double_mode(gpu, int(on)))

    def gpm(self, gpu: int, on: bool, code: int = 0) -> None:
        self._done(self._lib.double_gpm(gpu, int(on), code))

    def activity(self, gpu: int, percent: int) -> None:
        self._done(self._lib.double_activity(gpu, percent))

    def memory(self, gpu: int, used: int, total: int) -> None:
        self._done(self._lib.double_memory(gpu, ctypes.c_ulonglong(used), ctypes.c_ulonglong(total)))

    def no_processes(self, gpu: int) -> None:
        self._done(self._lib.double_no_processes(gpu))

    def process(
        self, gpu: int, pid: int, *, gi: int = WHOLE, ci: int = WHOLE, memory: int = 0, percent: int = 0
    ) -> None:
        where = (ctypes.c_uint(gpu), ctypes.c_uint(gi), ctypes.c_uint(ci), ctypes.c_uint(pid))
        self._done(self._lib.double_process(*where, ctypes.c_ulonglong(memory), ctypes.c_uint(percent)))

    def reboot(self, gpu: int) -> None:
        self._done(self._lib.double_reboot(gpu))

    def changes(self) -> int:
        """Calls so far that change something."""
        count = ctypes.c_uint()
        self._done(self._lib.double_changes(ctypes.byref(count)))
        return count.value

    def inits(self) -> int:
        """How often this process is inside NVML."""
        return int(self._lib.double_inits())


@contextmanager
def double(path: Path, *models: str) -> Iterator[Double]:
    """A state file with GPUs of these models, for this process until the end."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    try:
        made = Double(path)
        made.new(models)
        yield made
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
