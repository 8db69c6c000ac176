"""Whose output and error file a name is: claims that outlive every process, seen from every machine.

A claim stands beside the file it is for, as a symbolic link that is never followed: making one is a single
step that fails where one stands already, and what it says is there at once. It goes when the batch ends.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from hybridsched.batches.errors import BatchFileError, file_errors
from hybridsched.batches.files import Disk
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import WORK_PREFIX, BatchFiles
from hybridsched.batches.manifest import MANIFEST


class Claim(msgspec.Struct, frozen=True):
    """What a claim says."""

    batch_id: str
    work: str
    """The work folder of the batch; a claim without it is of no batch any more."""


def claim_name(name: str) -> str:
    """The name of the claim on a file of this name."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
    return f"{WORK_PREFIX}claim-{digest}"


def read_claim(folder: Folder, name: str) -> Claim | None:
    """Who has claimed `name` in `folder`; None: nobody."""
    try:
        with file_errors("cannot read", folder.path / claim_name(name)):
            text = folder.read_link(claim_name(name))
    except BatchFileError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return None
        raise
    batch_id, _, work = text.partition(":")
    return Claim(batch_id, work)


def take_claim(folder: Folder, name: str, files: BatchFiles, disk: Disk) -> Claim | None:
    """Claim `name` in `folder` for a batch. Returns the claim that stands in the way, if one does.

    One that this batch has taken before is fine; one of a batch that is no more is replaced.
    """
    wanted = Claim(files.batch_id, files.work)
    for _ in range(2):
        try:
            disk.link(folder, claim_name(name), f"{wanted.batch_id}:{wanted.work}")
        except BatchFileError as exc:
            if not isinstance(exc.__cause__, FileExistsError):
                raise
        else:
            disk.sync_folder(folder)
            return None
        found = read_claim(folder, name)
        if found == wanted:
            return None
        if found is not None and not is_void(found):
            return found
        disk.unlink(folder, claim_name(name))
    return read_claim(folder, name)


def drop_claim(folder: Folder, name: str, batch_id: str, disk: Disk) -> None:
    """Give up the claim of a batch, if it has one."""
    found = read_claim(folder, name)
    if found is not None and found.batch_id == batch_id:
        disk.unlink(folder, claim_name(name))


def is_void(claim: Claim) -> bool:
    """Whether the batch of a claim is no more: its manifest, which stands there before the claim is made, is
    gone. In doubt it still is."""
    try:
        with os.scandir(claim.work) as entries:  # listed, not looked up: a file server is asked anew then
            return all(entry.name != MANIFEST for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
