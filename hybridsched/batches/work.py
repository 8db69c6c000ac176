"""The work folder of one batch: manifest, locks, and the way to its input.

Names in it: `manifest.json` (written once), `state.json` (how far the output is assembled), `lock` (held
shared by a pool's workers, exclusively by a run without a store), `assemble.lock`, `chunk-<no>.<fence>.jsonl`
(journals) and `recovered.jsonl` (what journals of an earlier ledger held).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from hybridsched.batches.files import (
    DISK,
    BatchFileError,
    Disk,
    FileLock,
    InputUnreadableError,
    OutputBusyError,
    OutputExistsError,
)
from hybridsched.batches.layout import (
    WORK_PREFIX,
    BatchFiles,
    InputIdentity,
    check_identity,
    check_owner,
    identify,
    open_input,
    plan_files,
)
from hybridsched.batches.scan import InputIndex, scan

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True):
    """What a batch is, written once by its user."""

    version: int
    files: BatchFiles
    identity: InputIdentity
    index: InputIndex
    uid: int


class WorkFolder:
    """An open work folder. Make it with `create` or `open`; close it when done."""

    def __init__(self, path: Path, manifest: Manifest, disk: Disk, *, resumed: bool) -> None:
        self.path = path
        self.files = manifest.files
        self.index = manifest.index
        self.identity = manifest.identity
        self.uid = manifest.uid
        self.disk = disk
        self.resumed = resumed
        """Whether the batch had been started before."""
        self._lock = FileLock(path / "lock", disk)

    @classmethod
    def create(
        cls, files: BatchFiles, *, disk: Disk = DISK, progress: Callable[[int], object] | None = None
    ) -> WorkFolder:
        """Start a batch, or take up one that was started before with the same input and output.

        Reads the whole input once (`progress` is told the bytes read). When an unfinished batch has the same
        output its folder, and with it its batch id, is taken up instead of a new one.

        Raises:
            InputUnreadableError, InputChangedError, NotYoursError: see `layout`.
            OutputExistsError: the output or error file is there and belongs to no unfinished batch.
            OutputBusyError: another batch was started on the same output at the same moment.
            BatchFileError: the folder of the output cannot be written to.
        """
        for path in find_work(files.output):
            folder = cls.open(path, disk=disk, resumed=True)
            if (folder.files.input, folder.files.errors) != (files.input, files.errors):
                folder.close()
                raise OutputBusyError(
                    f"{files.output} is the output of the unfinished batch {folder.files.batch_id} "
                    f"(input {folder.files.input}, errors {folder.files.errors}); finish or cancel that one, "
                    "or choose another --output"
                )
            return folder
        with open_input(files.input) as file:
            _check_targets(files)
            identity = identify(file)
            index = scan(file, progress=progress)
            check_identity(files.input, identify(file), identity)
        if index.lines == 0:
            raise InputUnreadableError(f"{files.input} has only blank lines; one request a line is expected")
        path = Path(files.work)
        if not path.is_dir():
            disk.mkdir(path)
        manifest = Manifest(1, files, identity, index, os.geteuid())
        disk.write_whole(path / MANIFEST, msgspec.json.encode(manifest))
        folder = cls(path, manifest, disk, resumed=False)
        try:
            # Only one of two that start on the same output at the same moment makes the file.
            os.close(folder.open_file(Path(files.output), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            disk.sync_folder(path.parent)
        except BatchFileError as exc:
            if isinstance(exc.__cause__, FileExistsError):
                folder.remove()
                raise OutputBusyError(
                    f"{files.output}: another batch was just started on this output"
                ) from exc
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path, *, disk: Disk = DISK, resumed: bool = True) -> WorkFolder:
        """Open the work folder of a batch that was started before; its input must be unchanged.

        Raises:
            BatchFileError: there is no such work folder, or its manifest is unreadable.
            NotYoursError: the folder or a file belongs to another user.
            InputChangedError: the input is another file now.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        check_owner(folder, folder.lstat().st_uid, manifest.uid)
        _check_places(manifest)
        opened = cls(folder, manifest, disk, resumed=resumed)
        try:
            opened.open_input().close()
        except BaseException:
            opened.close()
            raise
        return opened

    def open_input(self) -> BinaryIO:
        """The input, checked to be the file that the batch was started with. The caller closes it.

        Raises:
            InputUnreadableError, InputChangedError, NotYoursError: see `layout`.
        """
        file = open_input(self.files.input, owner=self.uid)
        try:
            check_identity(self.files.input, identify(file), self.identity)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def open_file(self, path: Path, flags: int) -> int:
        """Open a file of this batch for writing; it belongs to the batch's user, also when root makes it."""
        fd = self.disk.open(path, flags)
        if os.geteuid() == 0 and self.uid != 0:
            os.fchown(fd, self.uid, -1)
        return fd

    def lock_shared(self) -> None:
        """Join the pool's workers on this batch.

        Raises:
            OutputBusyError: a run without a store works on it.
        """
        if not self._lock.take(shared=True, wait=False):
            raise OutputBusyError(f"{self.files.output}: a local run works on this batch; wait until it ends")

    def lock_exclusive(self) -> None:
        """Work on this batch alone.

        Raises:
            OutputBusyError: somebody else does.
        """
        if not self._lock.take(wait=False):
            raise OutputBusyError(
                f"{self.files.output}: another run works on this batch; wait until it ends or stop it first"
            )

    def remove(self) -> None:
        """Remove the folder with all in it: the batch has ended. Closes it.

        The manifest goes first, so that a half-removed folder is not taken for an unfinished batch.
        """
        self.close()
        self.disk.unlink(self.path / MANIFEST)
        for entry in self.path.iterdir():
            self.disk.unlink(entry)
        self.disk.rmdir(self.path)

    def discard(self) -> None:
        """Leave no trace of a batch of which nothing was run."""
        output = Path(self.files.output)
        if output.exists() and output.stat().st_size == 0:
            self.disk.unlink(output)
        self.remove()

    def close(self) -> None:
        """Let go of the folder's lock."""
        self._lock.close()


def find_work(output: str | Path) -> list[Path]:
    """Work folders of unfinished batches with this output, in the order of their names."""
    target = str(Path(output).absolute())
    found = []
    for path in sorted(Path(target).parent.glob(f"{WORK_PREFIX}*")):
        try:
            manifest = read_manifest(path)
        except BatchFileError:
            continue  # half made or half removed: no unfinished batch
        if manifest.files.output == target:
            found.append(path)
    return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a work folder, checked against where it stands.

    Raises:
        BatchFileError: missing, unreadable, or of another place.
    """
    if not folder.name.startswith(WORK_PREFIX) or folder.is_symlink():
        raise BatchFileError(f"{folder} is no work folder of a batch")
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BatchFileError(
            f"{folder}: no batch is there (any more); it ended, or this machine does not see its file system"
        ) from None
    except OSError as exc:
        raise BatchFileError(f"{folder / MANIFEST}: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise BatchFileError(f"{folder / MANIFEST} is damaged: {exc}") from exc
    files = manifest.files
    expected = plan_files(files.input, files.batch_id, output=files.output, errors=files.errors)
    if expected.work != str(folder) or files.work != str(folder):
        raise BatchFileError(f"{folder} was moved from {files.work}; move it back, its output stands there")
    return manifest


def _check_targets(files: BatchFiles) -> None:
    for name, option in ((files.output, "--output"), (files.errors, "--errors")):
        target = Path(name)
        if target.exists() or target.is_symlink():
            raise OutputExistsError(f"{name} is there already; remove it or choose another with {option}")
        folder = target.parent
        if not folder.is_dir():
            raise BatchFileError(f"{folder} is no folder; make it or choose another place with {option}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BatchFileError(f"{folder} cannot be written to; choose another place with {option}")


def _check_places(manifest: Manifest) -> None:
    """As root, write for another user only where that user could: no batch may create files elsewhere."""
    if os.geteuid() != 0 or manifest.uid == 0:
        return
    for name in (manifest.files.output, manifest.files.errors):
        place = Path(name).parent
        check_owner(place, place.stat().st_uid, manifest.uid)
