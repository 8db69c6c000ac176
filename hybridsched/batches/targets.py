"""The output and the error file of a batch: the folders they stand in, and whether their names are free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hybridsched.batches.claims import Claim, is_void, read_claim
from hybridsched.batches.errors import BatchFileError, OutputBusyError, OutputExistsError, WrongPathError
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import BatchFiles
from hybridsched.batches.rights import Rights


class Target(NamedTuple):
    """The output or the error file."""

    folder: Folder
    name: str
    option: str
    """What chooses another one."""

    @property
    def path(self) -> Path:
        return self.folder.path / self.name


def open_targets(files: BatchFiles, rights: Rights) -> tuple[Target, Target]:
    output, errors = Path(files.output), Path(files.errors)
    place = Folder.open(output.parent, rights=rights)
    other = place if errors.parent == output.parent else Folder.open(errors.parent, rights=rights)
    return Target(place, output.name, "--output"), Target(other, errors.name, "--errors")


def check_folder(path: Path, option: str) -> None:
    if not path.is_dir():
        raise WrongPathError(f"{path} is no folder; make it or choose another place with {option}")


def check_free(target: Target) -> None:
    # Before anything is read; the caller runs with its own rights here.
    if not os.access(target.folder.path, os.W_OK | os.X_OK):
        raise BatchFileError(
            f"{target.folder.path} cannot be written to; choose another place with {target.option}"
        )
    claim = read_claim(target.folder, target.name)
    if claim is not None and not is_void(claim):
        raise busy(target, claim)
    if target.folder.exists(target.name):
        raise OutputExistsError(
            f"{target.path} is there already; choose another with {target.option}, or move it away"
        )


def busy(target: Target, claim: Claim) -> OutputBusyError:
    return OutputBusyError(
        f"{target.path} is the output or the error file of the unfinished batch {claim.batch_id}; wait until "
        f"that one has ended, cancel it, or choose another with {target.option} (of a batch that has failed "
        f"and is not wanted any more, remove the folder {claim.work})"
    )
