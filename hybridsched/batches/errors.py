"""What can be wrong with a batch's files, each with what to do about it, and the rights that files get."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class BatchFileError(Exception):
    """A batch's files cannot be used as asked. The text says what was found and what to do."""

    code = "batch_file_error"


class InputUnreadableError(BatchFileError):
    """The input is missing, a folder, empty, compressed or not readable."""

    code = "input_unreadable"


class WrongPathError(BatchFileError):
    """A path was given that cannot be meant: of a folder that is not there, or twice the same file."""

    code = "wrong_path"


class NoInputError(InputUnreadableError, WrongPathError):
    """What was given as the input is no file that this user can read."""


class InputChangedError(BatchFileError):
    """The input is not the file that the batch was started with."""

    code = "input_changed"


class NotYoursError(BatchFileError):
    """A file belongs to another user."""

    code = "not_yours"


class OutputBusyError(BatchFileError):
    """Another run works on the same output."""

    code = "output_busy"


class OutputExistsError(BatchFileError):
    """The output or error file is there already and belongs to no unfinished batch."""

    code = "output_exists"


class OutputChangedError(BatchFileError):
    """The output or error file, or the work folder, was changed by someone else while the batch ran."""

    code = "output_changed"


class BatchGoneError(OutputChangedError):
    """The batch has ended, or its start was taken back, after its work folder had been found."""


class FolderGoneError(OutputChangedError):
    """The output's folder or the work folder was removed while the batch ran."""

    code = "folder_gone"


class ResultsLostError(OutputChangedError):
    """Something in the work folder was removed or damaged. The same command goes on from what is left."""

    code = "results_lost"


RESUME = (
    "Give the same command again (same input, same output): finished lines that are left are kept, only the "
    "others run"
)
"""What cures a `ResultsLostError`."""


class DiskFullError(BatchFileError):
    """No space, or no quota, is left. Everything finished so far is intact; free space and run again."""

    code = "disk_full"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def file_errors(what: str, path: str | Path) -> Iterator[None]:
    """Turn an `OSError` into a `BatchFileError` that names the file."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise DiskFullError(
                f"{what} {path}: {exc.strerror}; free some space and run again, finished lines are kept"
            ) from exc
        raise BatchFileError(f"{what} {path}: {exc.strerror or exc}") from exc
