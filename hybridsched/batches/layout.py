"""Where a batch's files stand, whose they are, and whether the input is still the same.

Beside OUTPUT stands the work folder `.hybridsched-<batch id>`, which only its owner can enter. It holds what
makes a batch resumable (manifest, state, journals) and goes away when the batch ends. Store and workers know
a batch by that folder alone: input, output and error file are read from the manifest in it, which the user of
the batch wrote, and never from Redis, so whoever can write to Redis cannot point a worker at other files.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

import msgspec

from hybridsched.batches.files import (
    BatchFileError,
    InputChangedError,
    InputUnreadableError,
    NotYoursError,
)

WORK_PREFIX = ".hybridsched-"
_PROBE_BYTES = 64 * 1024


class BatchFiles(msgspec.Struct, frozen=True):
    """Absolute paths of one batch."""

    batch_id: str
    input: str
    output: str
    errors: str
    work: str


class InputIdentity(msgspec.Struct, frozen=True):
    """What tells that an input is still the file that a batch was started with."""

    size: int
    mtime_ns: int
    inode: int
    head: str
    """Hash of the first 64 KiB."""
    tail: str
    """Hash of the last 64 KiB."""


def plan_files(
    source: str | Path, batch_id: str, *, output: str | Path | None = None, errors: str | Path | None = None
) -> BatchFiles:
    """Names of a batch's files. OUTPUT is `<input stem>.output.jsonl` beside the input unless given, and the
    error file `<output stem>.errors.jsonl` beside OUTPUT.

    Raises:
        BatchFileError: two of the three are the same file.
    """
    given = Path(source).absolute()
    out = Path(output).absolute() if output is not None else given.with_name(f"{_stem(given)}.output.jsonl")
    err = (
        Path(errors).absolute()
        if errors is not None
        else out.with_name(f"{_stem(out).removesuffix('.output')}.errors.jsonl")
    )
    names = [Path(os.path.normpath(p)) for p in (given, out, err)]
    if len(set(names)) < 3:
        raise BatchFileError(
            f"input {given}, output {out} and error file {err} must be three different files; "
            "choose others with --output and --errors"
        )
    work = names[1].with_name(f"{WORK_PREFIX}{batch_id}")
    return BatchFiles(batch_id, str(names[0]), str(names[1]), str(names[2]), str(work))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".jsonl")


def local_batch_id(output: str | Path) -> str:
    """The id of a batch that runs without a store: always the same for the same output."""
    digest = hashlib.blake2b(str(Path(output).absolute()).encode(), digest_size=8).hexdigest()
    return f"run_{digest}"


def open_input(path: str | Path, *, owner: int | None = None) -> BinaryIO:
    """Open an input for reading.

    It must be a regular file that belongs to the user of this process, so that a worker never reads one
    user's file with another's rights. Root reads those of `owner`, or of anybody when that is None.

    Raises:
        InputUnreadableError: missing, no regular file, empty, compressed, or not readable.
        NotYoursError: it belongs to somebody else.
    """
    if Path(path).is_dir():
        raise InputUnreadableError(f"{path} is a folder; give one JSONL file")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise InputUnreadableError(f"{path}: no such file") from None
    except OSError as exc:
        raise InputUnreadableError(f"{path}: {exc.strerror}") from exc
    file = os.fdopen(fd, "rb", buffering=1 << 18)
    try:
        _check_input(path, os.fstat(fd), file.read(4), owner)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _check_input(path: str | Path, found: os.stat_result, start: bytes, owner: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InputUnreadableError(
            f"{path} is no regular file; a batch reads its input more than once, save it to a file first"
        )
    check_owner(path, found.st_uid, owner)
    if found.st_size == 0:
        raise InputUnreadableError(f"{path} is empty; one request a line is expected")
    if start[:2] == b"\x1f\x8b" or start == b"\x28\xb5\x2f\xfd":
        raise InputUnreadableError(f"{path} is compressed; unpack it first")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputUnreadableError(f"{path} is UTF-16; save it as UTF-8")


def check_owner(path: str | Path, uid: int, owner: int | None) -> None:
    """Refuse a file of user `uid` unless this process is that user, or root acting for `owner`.

    With `owner` None root may use anybody's file.

    Raises:
        NotYoursError: it belongs to somebody else.
    """
    me = os.geteuid()
    if uid == me and owner in (None, uid):
        return
    if me == 0 and owner in (None, uid):
        return
    raise NotYoursError(
        f"{path} belongs to user {uid}, the batch to user {me if owner is None else owner} and this process "
        f"runs as user {me}; a batch uses files of its own user only"
    )


def identify(file: BinaryIO) -> InputIdentity:
    """The identity of an open input. Leaves the position anywhere."""
    found = os.fstat(file.fileno())
    file.seek(0)
    head = file.read(_PROBE_BYTES)
    file.seek(max(0, found.st_size - _PROBE_BYTES))
    tail = file.read(_PROBE_BYTES)
    return InputIdentity(found.st_size, found.st_mtime_ns, found.st_ino, _hash(head), _hash(tail))


def check_identity(path: str | Path, now: InputIdentity, then: InputIdentity) -> None:
    """Refuse an input that has changed.

    Raises:
        InputChangedError: with what changed.
    """
    if now == then:
        return
    if now.size != then.size:
        what = f"it had {then.size:,} bytes and has {now.size:,} now"
    elif (now.head, now.tail) != (then.head, then.tail):
        what = "its content is another"
    elif now.inode != then.inode:
        what = "it was replaced by another file"
    else:
        what = "it was written to"
    raise InputChangedError(
        f"{path} has changed since the batch started: {what}. Put the old file back to go on, or cancel the "
        "batch and submit the new file with another output"
    )


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
