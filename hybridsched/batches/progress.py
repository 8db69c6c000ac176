"""`state.json`: how far the output and error files of a batch are assembled."""

from __future__ import annotations

import msgspec

from hybridsched.batches.errors import RESUME, BatchFileError, ResultsLostError, file_errors
from hybridsched.batches.files import Disk
from hybridsched.batches.folder import Folder

STATE = "state.json"


class PartPlace(msgspec.Struct, frozen=True):
    """How far one part of a batch is in the files (see `batches.parts`)."""

    model: str
    next_chunk: int
    """Number of its first chunk of which not every line is in the files."""


class Progress(msgspec.Struct, frozen=True):
    """How far the output and error files are assembled."""

    next_chunk: int = 0
    """Number of the next chunk to append; all before it are in the files. With `parts`: above the number of
    every chunk that is."""
    offset: int = 0
    """Byte of the input up to which lines are in the files."""
    line: int = 1
    """Physical number of the line at `offset`."""
    done: int = 0
    """Lines in the output file."""
    failed: int = 0
    """Lines in the error file."""
    output_bytes: int = 0
    error_bytes: int = 0
    output_inode: int = 0
    """Number of the output file as it was made: no other one in its place is written to. 0: not known."""
    error_inode: int = 0
    closed: str = ""
    """batch_expired or batch_cancelled once the rest was reported as that."""
    cut: int = 0
    """Lines of `failed` that were reported so: they had not run."""
    at_end: bool = False
    """Whether every line is in one of the files."""
    parts: tuple[PartPlace, ...] = ()
    """Empty, or the batch is cut by the models of its lines: a chunk's part is its number modulo how many."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models of the parts."""
        return tuple(part.model for part in self.parts)

    def holds(self, chunk_no: int) -> bool:
        """Whether every line of a chunk is in the files."""
        if not self.parts:
            return chunk_no < self.next_chunk
        return chunk_no < self.parts[chunk_no % len(self.parts)].next_chunk


def read_progress(folder: Folder) -> Progress:
    """What `state.json` in a work folder says.

    Raises:
        ResultsLostError: it is gone or damaged.
        BatchFileError: it cannot be read.
    """
    path = folder.path / STATE
    try:
        with file_errors("cannot read", path), folder.read_file(STATE) as file:
            text = file.read()
        return msgspec.json.decode(text, type=Progress)
    except BatchFileError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            raise ResultsLostError(f"{path} is gone: somebody has removed it. {RESUME}") from exc
        raise
    except msgspec.MsgspecError as exc:
        raise ResultsLostError(f"{path} is damaged: {exc}. {RESUME}") from exc


def write_progress(folder: Folder, progress: Progress, disk: Disk) -> None:
    """Replace `state.json`, atomically and durably."""
    disk.write_whole(folder, STATE, msgspec.json.encode(progress))
