"""The work folder of one batch: manifest, locks, and the way to its input.

Names in it: `manifest.json` (written once), `state.json` (how far the output is assembled), `lock` (held
shared by a pool's workers, exclusively by a run without a store), `assemble.lock`, `chunk-<no>.<fence>.jsonl`
(journals) and `recovered.jsonl` (what journals of an earlier ledger held).

Any number of processes may start one batch, or end it, at one moment. What orders them: the claim on the
output decides whose batch it is; who has a folder's lock, and finds the manifest there then, has the batch;
and the claims are made, and the manifest taken away, under that lock only. Whoever loses starts over.

Everything is done with the rights of the batch's user, through folders that are opened once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from hybridsched.batches.batch_lock import BatchLock
from hybridsched.batches.claims import Claim, drop_claim, read_claim, take_claim
from hybridsched.batches.errors import (
    BatchFileError,
    BatchGoneError,
    DiskFullError,
    FolderGoneError,
    NotYoursError,
    OutputBusyError,
    OutputChangedError,
    OutputExistsError,
    file_errors,
)
from hybridsched.batches.files import DISK, Disk
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import (
    BatchFiles,
    check_identity,
    open_input,
    same_file,
)
from hybridsched.batches.leftovers import ENDED, has_batch, sweep, was_ended
from hybridsched.batches.manifest import MANIFEST, Manifest, check_name, find_work, manifest_in, open_work
from hybridsched.batches.progress import STATE, Progress, write_progress
from hybridsched.batches.rights import Rights
from hybridsched.batches.seen import SeenInput, read_input
from hybridsched.batches.targets import Target, busy, check_folder, check_free, open_targets

_TRIES = 100
_PAUSE_S = 0.02
"""A start that meets another one, or the end of a batch, looks again after this long: so often."""

_REFUSALS = 3
"""A file that stands in the way so often, with no batch to be found whose output it is, is not ours."""

_pause = time.sleep


class _AgainError(OutputBusyError):
    """Another start was faster, or is under way; it is to be looked for again."""


class WorkFolder:
    """An open work folder. Make it with `create` or `open`; close it when done."""

    def __init__(self, folder: Folder, manifest: Manifest, disk: Disk, *, resumed: bool) -> None:
        self.folder = folder
        self.path = folder.path
        self.files = manifest.files
        self.index = manifest.index
        self.uid = manifest.uid
        self.disk = disk
        self.resumed = resumed
        """Whether the batch had been started before."""
        self._identity = manifest.identity
        self._made: dict[Path, int] = {}
        self.output, self.errors = open_targets(manifest.files, folder.rights)
        self._lock = BatchLock(folder, self.output.folder, disk)

    @classmethod
    def create(
        cls, files: BatchFiles, *, disk: Disk = DISK, progress: Callable[[int], object] | None = None
    ) -> WorkFolder:
        """Start a batch, or take up one that was started before with the same input and output.

        Reads the whole input once (`progress` is told the bytes read). When an unfinished batch has the same
        output its folder, and with it its batch id, is taken up instead of a new one. Output and error file
        are the batch's alone from then on, also against batches that are submitted at the same moment.

        Raises:
            InputUnreadableError, InputChangedError, NotYoursError: see `layout`.
            WrongPathError: the output or error file would stand in a folder that is not there.
            OutputExistsError: the output or error file is there and belongs to no unfinished batch.
            OutputBusyError: one of them is the output or error file of another unfinished batch.
            BatchFileError: the folder of the output cannot be written to.
        """
        seen: SeenInput | None = None
        refused = 0
        for _ in range(_TRIES):
            try:
                if found := _begun_before(files):
                    return cls._take_up(found, files, disk)
                for name, option in ((files.output, "--output"), (files.errors, "--errors")):
                    if not Path(name).parent.is_dir():
                        read_input(files.input, progress)  # one that is not there either is named first
                    check_folder(Path(name).parent, option)
                try:
                    for target in open_targets(files, Rights(os.geteuid())):
                        check_free(target)
                except (OutputBusyError, OutputExistsError) as exc:
                    refused += 1
                    if refused == _REFUSALS:
                        sweep(Path(files.output), disk)
                        raise
                    raise _AgainError(str(exc)) from exc  # perhaps of a start that was not seen before
                refused = 0
                if seen is None:
                    seen = read_input(files.input, progress)
                    continue  # others may have started meanwhile
                return cls._make_new(files, seen, disk)
            except (_AgainError, BatchGoneError) as exc:
                last = exc
            _pause(_PAUSE_S)
        if isinstance(last, OutputBusyError):
            raise last
        raise OutputBusyError(f"{files.output}: batches with this output come and go; try again") from last

    @classmethod
    def _make_new(cls, files: BatchFiles, seen: SeenInput, disk: Disk) -> WorkFolder:
        output, work = Path(files.output), Path(files.work)
        sweep(output, disk)
        place = Folder.open(output.parent, rights=Rights(os.geteuid()))
        try:
            disk.mkdir(place, work.name)
        except BatchFileError as exc:
            if not isinstance(exc.__cause__, FileExistsError):
                raise
        with _gone_is_told(work):
            folder = Folder.open(work)
        if folder.uid != os.geteuid():
            raise NotYoursError(f"{work} is there already and belongs to user {folder.uid}; remove it")
        made = cls(folder, Manifest(1, files, *seen, os.geteuid()), disk, resumed=False)
        try:
            made._begin()
        except BaseException:
            made.close()
            raise
        return made

    def _begin(self) -> None:
        """Take the folder, write down what the batch is and take its files.

        The manifest goes first: what a crash leaves is found by it and taken up.
        """
        if not self._lock.take() or has_batch(self.folder):  # the same was started at the same moment
            raise _under_way(self.files)
        if was_ended(self.folder):
            self._lock.remove_folder()
            raise _under_way(self.files)
        manifest = Manifest(1, self.files, self._identity, self.index, self.uid)
        try:
            self.disk.write_whole(self.folder, MANIFEST, msgspec.json.encode(manifest))
            self.disk.sync_folder(self.output.folder)
            self._take_files()
        except DiskFullError:
            with suppress(BatchFileError):  # what stays is harmless; the reason counts
                self.discard()
            raise
        self._lock.release()

    def _take_files(self) -> None:
        """Claim the output and error file and make them. Only for the holder of the exclusive lock.

        That they are made here, and were not there, is the last word on whose they are.
        """
        try:
            self._claim()
            output, errors = (self._make(target) for target in self.targets)
        except OutputBusyError as exc:
            self.discard()
            raise _AgainError(str(exc)) from exc  # a look at what is there now says what to do
        write_progress(self.folder, Progress(output_inode=output, error_inode=errors), self.disk)

    @classmethod
    def _take_up(cls, path: Path, files: BatchFiles, disk: Disk) -> WorkFolder:
        with _gone_is_told(path / MANIFEST):
            folder = cls.open(path, disk=disk, resumed=True)
        try:
            folder._check_same(files)
            folder._keep_claims()
        except BaseException:
            folder.close()
            raise
        return folder

    def _keep_claims(self) -> None:
        """See to it that the claims are there: a start that was cut short may have made none."""
        if self._has_claims():
            return
        if not self._lock.take_batch():
            if self.folder.exists(STATE):
                return  # its files stand there, which keeps others off as well
            raise _under_way(self.files)
        if self.folder.exists(STATE):
            self._claim()
        elif not self._has_claims():  # under the lock: its start has died
            self._take_files()
        self._lock.release()

    def _has_claims(self) -> bool:
        wanted = Claim(self.files.batch_id, self.files.work)
        return all(read_claim(target.folder, target.name) == wanted for target in self.targets)

    def _check_same(self, files: BatchFiles) -> None:
        mine = self.files
        if not (same_file(mine.input, files.input) and same_file(mine.errors, files.errors)):
            raise OutputBusyError(
                f"{files.output} is the output of the unfinished batch {mine.batch_id} (input {mine.input}, "
                f"errors {mine.errors}); finish or cancel that one, or choose another --output"
            )

    @classmethod
    def open(cls, path: str | Path, *, disk: Disk = DISK, resumed: bool = True) -> WorkFolder:
        """Open the work folder of a batch that was started before; its input must be unchanged.

        Raises:
            BatchFileError: there is no such work folder, or its manifest is unreadable.
            NotYoursError: the folder or a file belongs to another user.
            InputChangedError: the input is another file now.
        """
        check_name(Path(path))
        folder = open_work(Path(path))
        manifest = manifest_in(folder)
        if manifest.uid != folder.uid:
            raise NotYoursError(
                f"{folder.path} belongs to user {folder.uid}, its batch to user {manifest.uid}; a batch uses "
                "files of its own user only"
            )
        opened = cls(folder, manifest, disk, resumed=resumed)
        try:
            opened.open_input().close()
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def targets(self) -> tuple[Target, Target]:
        """Output and error file."""
        return self.output, self.errors

    def open_input(self) -> BinaryIO:
        """The input, checked to be what the batch was started with. The caller closes it.

        Raises:
            InputUnreadableError, InputChangedError, NotYoursError: see `layout`.
        """
        file = open_input(self.files.input, owner=self.uid, rights=self.folder.rights)
        try:
            with file_errors("cannot read", self.files.input):
                self._identity = check_identity(self.files.input, file, self._identity)
                file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def make_missing(self) -> None:
        """Make the output and error file where they are not there: a start that was cut short. Only for the
        holder of the folder's exclusive lock."""
        for target in self.targets:
            if not target.folder.exists(target.name):
                self._make(target)

    def _claim(self) -> None:
        for target in self.targets:
            claim = take_claim(target.folder, target.name, self.files, self.disk)
            if claim is not None:
                raise busy(target, claim)

    def _make(self, target: Target) -> int:
        """Make an empty output or error file; returns its number."""
        try:
            fd = self.disk.open(target.folder, target.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except BatchFileError as exc:
            if isinstance(exc.__cause__, FileExistsError):
                raise OutputBusyError(
                    f"{target.path}: another batch or program has just made this file; choose another with "
                    f"{target.option}"
                ) from exc
            raise
        try:
            inode = self._made[target.path] = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        self.disk.sync_folder(target.folder)
        return inode

    def lock_shared(self) -> None:
        """Join the pool's workers on this batch.

        Raises:
            OutputBusyError: a run without a store works on it.
            BatchGoneError: it has ended meanwhile.
        """
        if not self._lock.take_batch(shared=True):
            raise OutputBusyError(f"{self.files.output}: a local run works on this batch; wait until it ends")

    def lock_exclusive(self) -> None:
        """Work on this batch alone.

        Raises:
            OutputBusyError: somebody else does.
            BatchGoneError: it has ended meanwhile.
        """
        if not self._lock.take_batch():
            raise OutputBusyError(
                f"{self.files.output}: another run works on this batch; wait until it ends or stop it first"
            )

    def remove(self) -> None:
        """Remove the folder with all in it: the batch has ended. Closes it.

        Only for a holder of the lock, or when nobody else works on the batch.
        """
        self._lock.hold()
        try:
            self.disk.replace(self.folder, MANIFEST, ENDED)
        except BatchFileError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
        for target in self.targets:
            drop_claim(target.folder, target.name, self.files.batch_id, self.disk)
        self._lock.remove_folder()

    def discard(self) -> None:
        """Leave no trace of a batch of which nothing was run."""
        for target in self.targets:
            if self._is_untouched(target):
                self.disk.unlink(target.folder, target.name)
        self.remove()

    def _is_untouched(self, target: Target) -> bool:
        """Whether this object has made the file and nothing was written to it."""
        made = self._made.get(target.path)
        if made is None or not target.folder.exists(target.name):
            return False
        try:
            with file_errors("cannot read", target.path), target.folder.read_file(target.name) as file:
                found = os.fstat(file.fileno())
        except (OutputChangedError, NotYoursError):
            return False
        return found.st_ino == made and found.st_size == 0

    def close(self) -> None:
        """Let go of the folder's lock."""
        self._lock.close()


def _begun_before(files: BatchFiles) -> Path | None:
    """The work folder of the batch whose output this is. Where nobody has claimed that yet there may be
    several: of starts at the same moment, and of such that died."""
    found = find_work(files.output)
    if not found:
        return None
    output = Path(files.output)
    claim = read_claim(Folder.open(output.parent, rights=Rights(os.geteuid())), output.name)
    owner = claim.work if claim is not None else ""
    return min(found, key=lambda path: (str(path) != owner, not (path / STATE).exists()))


@contextmanager
def _gone_is_told(path: Path) -> Iterator[None]:
    """Raise `BatchGoneError` for an error of a work folder that comes of `path` in it being gone."""
    try:
        yield
    except BatchFileError as exc:
        gone = isinstance(exc, FolderGoneError) or isinstance(exc.__cause__, FileNotFoundError)
        if gone and not path.exists():
            raise BatchGoneError(str(exc)) from exc
        raise


def _under_way(files: BatchFiles) -> _AgainError:
    return _AgainError(f"{files.output}: another start of this batch is under way; try again in a moment")
