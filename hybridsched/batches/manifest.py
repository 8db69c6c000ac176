"""The manifest of a batch: what it is, written once by its user, in its work folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hybridsched.batches.errors import BatchFileError, BatchGoneError, OutputChangedError, file_errors
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import WORK_PREFIX, BatchFiles, InputIdentity, plan_files, same_file
from hybridsched.batches.scan import InputIndex

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True):
    """What a batch is, written once by its user."""

    version: int
    files: BatchFiles
    identity: InputIdentity
    index: InputIndex
    uid: int


def find_work(output: str | Path) -> list[Path]:
    """Work folders of unfinished batches with this output, in the order of their names."""
    target = Path(output).absolute()
    found = []
    for path in sorted(target.parent.glob(f"{WORK_PREFIX}*")):
        try:
            manifest = read_manifest(path)
        except BatchFileError:
            continue  # half made or half removed, or somebody else's: no unfinished batch
        if same_file(manifest.files.output, target):
            found.append(Path(manifest.files.work))
    return found


def read_manifest(path: Path) -> Manifest:
    """The manifest of a work folder, checked against where it stands.

    Raises:
        BatchFileError: missing, unreadable, or of another place.
    """
    check_name(path)
    return manifest_in(open_work(path))


def check_name(path: Path) -> None:
    """Refuse a path that is no work folder by its name.

    Raises:
        BatchFileError: it is not.
    """
    if not path.name.startswith(WORK_PREFIX) or path.is_symlink():
        raise BatchFileError(f"{path} is no work folder of a batch")


def open_work(path: Path) -> Folder:
    """Open a work folder.

    Raises:
        BatchFileError: it is not there, or cannot be used by this process.
    """
    try:
        return Folder.open(path)
    except BatchFileError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            raise BatchFileError(
                f"{path}: no batch is there (any more); it ended, or this machine does not see its file "
                "system"
            ) from exc.__cause__
        raise


def manifest_in(folder: Folder) -> Manifest:
    """The manifest of an open work folder; see `read_manifest`."""
    path = folder.path / MANIFEST
    try:
        with file_errors("cannot read", path), folder.read_file(MANIFEST) as file:
            text = file.read()
        manifest = msgspec.json.decode(text, type=Manifest)
    except BatchFileError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            raise BatchGoneError(
                f"{folder.path}: no batch is there (any more): its manifest is gone. What is in the output "
                "stays there; submit the input with another --output"
            ) from exc
        raise
    except msgspec.MsgspecError as exc:
        raise OutputChangedError(f"{path} is damaged: {exc}") from exc
    files = manifest.files
    expected = plan_files(files.input, files.batch_id, output=files.output, errors=files.errors)
    if expected.work != files.work or not same_file(files.work, folder.path):
        raise BatchFileError(
            f"{folder.path} was moved from {files.work}; move it back, its output stands there"
        )
    return manifest
