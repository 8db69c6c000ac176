"""Where a batch's files stand, whose they are, and whether the input is still the same.

Beside OUTPUT stands the work folder `.hybridsched-<batch id>`, which only its owner can enter. It holds what
makes a batch resumable (manifest, state, journals) and goes away when the batch ends. Store and workers know
a batch by that folder alone: input, output and error file are read from the manifest in it, which the user of
the batch wrote, and never from Redis, so whoever can write to Redis cannot point a worker at other files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

import msgspec

from hybridsched.batches.errors import (
    BatchFileError,
    InputChangedError,
    InputUnreadableError,
    NoInputError,
    NotYoursError,
    WrongPathError,
    file_errors,
)
from hybridsched.batches.rights import Rights

WORK_PREFIX = ".hybridsched-"
_PIECE_BYTES = 1 << 20


class BatchFiles(msgspec.Struct, frozen=True):
    """Absolute paths of one batch."""

    batch_id: str
    input: str
    output: str
    errors: str
    work: str


class InputIdentity(msgspec.Struct, frozen=True):
    """What tells that an input is still the file that a batch was started with: its content. The rest only
    says when the content must be read to know."""

    size: int
    digest: str
    """Hash of all of it."""
    mtime_ns: int
    ctime_ns: int
    inode: int


def plan_files(
    source: str | Path, batch_id: str, *, output: str | Path | None = None, errors: str | Path | None = None
) -> BatchFiles:
    """Names of a batch's files. OUTPUT is `<input stem>.output.jsonl` beside the input unless given, and the
    error file `<output stem>.errors.jsonl` beside OUTPUT.

    Raises:
        WrongPathError: two of the three are the same file, or a name is not UTF-8.
    """
    given = Path(source).absolute()
    out = Path(output).absolute() if output is not None else given.with_name(f"{_stem(given)}.output.jsonl")
    err = (
        Path(errors).absolute()
        if errors is not None
        else out.with_name(f"{_stem(out).removesuffix('.output')}.errors.jsonl")
    )
    names = [Path(os.path.normpath(p)) for p in (given, out, err)]
    for name in names:
        if not _is_utf8(str(name)):
            raise WrongPathError(
                f"the path {os.fsencode(name)!r} is not UTF-8, and a batch is written down by its paths; "
                "rename what is not, or link to it under another name"
            )
    if any(same_file(names[i], names[j]) for i, j in ((0, 1), (0, 2), (1, 2))):
        raise WrongPathError(
            f"input {given}, output {out} and error file {err} must be three different files; "
            "choose others with --output and --errors"
        )
    work = names[1].with_name(f"{WORK_PREFIX}{batch_id}")
    return BatchFiles(batch_id, str(names[0]), str(names[1]), str(names[2]), str(work))


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stem(path: Path) -> str:
    return path.name.removesuffix(".jsonl")


def local_batch_id(output: str | Path) -> str:
    """The id of a batch that runs without a store: always the same for the same output."""
    digest = hashlib.blake2b(str(Path(output).absolute()).encode(), digest_size=8).hexdigest()
    return f"run_{digest}"


def open_input(path: str | Path, *, owner: int | None = None, rights: Rights | None = None) -> BinaryIO:
    """Open an input for reading.

    It must be a regular file that belongs to the user of this process, so that a worker never reads one
    user's file with another's rights. Root reads those of `owner`, with that user's rights (`rights`, where
    they are known already), or those of anybody when that is None.

    Raises:
        InputUnreadableError: missing, no regular file, empty, compressed, or not readable.
        NotYoursError: it belongs to somebody else.
        BatchFileError: its file system does not answer now.
    """
    rights = rights or Rights(os.geteuid() if owner is None else owner)
    try:
        with rights:
            # A look first: merely opening a device can do something.
            kind = Path(path).stat().st_mode
            fd = -1 if not stat.S_ISREG(kind) else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NoInputError(f"{path}: no such file") from None
    except PermissionError as exc:
        raise NoInputError(f"{path}: {exc.strerror}") from exc
    except OSError as exc:
        if exc.errno in _OUTAGE:
            raise BatchFileError(f"{path} cannot be read for now: {exc.strerror}") from exc
        raise NoInputError(f"{path}: {exc.strerror}") from exc
    if stat.S_ISDIR(kind):
        raise NoInputError(f"{path} is a folder; give one JSONL file")
    if fd < 0:
        raise NoInputError(_NO_FILE.format(path=path))
    file = os.fdopen(fd, "rb", buffering=1 << 18)
    try:
        with file_errors("cannot read", path):
            _check_input(path, os.fstat(fd), file.read(4), owner)
            file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


_OUTAGE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENFILE, errno.EMFILE, errno.EINTR)
"""What a file server or a machine says on a bad day; it passes."""

_NO_FILE = "{path} is no regular file; a batch reads its input more than once, save it to a file first"


def _check_input(path: str | Path, found: os.stat_result, start: bytes, owner: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NoInputError(_NO_FILE.format(path=path))
    check_owner(path, found.st_uid, owner)
    if found.st_size == 0:
        raise InputUnreadableError(f"{path} is empty; one request a line is expected")
    if start[:2] == b"\x1f\x8b" or start == b"\x28\xb5\x2f\xfd":
        raise InputUnreadableError(f"{path} is compressed; unpack it first")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputUnreadableError(f"{path} is UTF-16; save it as UTF-8")


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two names mean one file, by whatever linked folders; the file itself need not be there."""
    first, second = Path(one), Path(other)
    return first == second or (
        first.name == second.name and os.path.realpath(first.parent) == os.path.realpath(second.parent)
    )


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
    """The identity of an open input. Reads all of it, and leaves the position anywhere."""
    found = os.fstat(file.fileno())
    file.seek(0)
    digest = hashlib.blake2b(digest_size=16)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return InputIdentity(
        found.st_size, digest.hexdigest(), found.st_mtime_ns, found.st_ctime_ns, found.st_ino
    )


def check_identity(path: str | Path, file: BinaryIO, then: InputIdentity) -> InputIdentity:
    """Refuse an input whose content has changed; one that was only touched, renamed or copied is the same.

    Reads the file where its times or its number are others than in `then`. Returns the identity as it is now,
    to be compared with the next time.

    Raises:
        InputChangedError: with what changed.
    """
    found = os.fstat(file.fileno())
    if found.st_size != then.size:
        what = f"it had {then.size:,} bytes and has {found.st_size:,} now"
    elif (found.st_mtime_ns, found.st_ctime_ns, found.st_ino) == (then.mtime_ns, then.ctime_ns, then.inode):
        return then
    else:
        now = identify(file)
        if now.digest == then.digest:
            return now
        what = "its content is another"
    raise InputChangedError(
        f"{path} has changed since the batch started: {what}. Put the old content back and give the same "
        "command again to go on (finished lines are kept), or submit the new file with another output"
    )
