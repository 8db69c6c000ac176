"""How far the output and error files of a batch are, read from the files themselves.

For the case that `state.json` is gone, or that the files were put back as copies. Every result has an id made
of the batch and the number of its line, so the files say which lines they hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from hybridsched.batches.errors import OutputChangedError, file_errors
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.progress import Progress
from hybridsched.batches.records import record_id
from hybridsched.batches.targets import Target
from hybridsched.batches.work import WorkFolder


class _Result(msgspec.Struct):
    id: str = ""


_decoder = msgspec.json.Decoder(_Result)


def recover_progress(work: WorkFolder, noted: Progress | None) -> Progress:
    """The place up to which every line of the input stands in one of the two files, in order.

    What stands behind it is cut off when the batch goes on, and runs again. `noted` is what was known before:
    the files must hold that much.

    Raises:
        OutputChangedError: a file is gone, lacks results, or holds something that is none of the batch.
        BatchFileError: a file cannot be read.
    """
    out, err = _Walk(work.output), _Walk(work.errors)
    place = None
    end_offset, end_line = 0, 1
    with work.open_input() as file:
        for raw in iter_lines(file):
            wanted = record_id(work.files.batch_id, raw.number)
            if out.take(wanted) or err.take(wanted):
                if place is None:
                    end_offset, end_line = raw.offset + raw.length, raw.number + 1
            elif place is None:
                place = _place(out, err, raw.offset, raw.number)
    for walk in (out, err):
        if walk.has_more:
            raise OutputChangedError(
                f"{walk.path} holds something that is no result of this batch: somebody has changed it. Put "
                "it back, or start the batch anew with another --output"
            )
    if place is None:
        place = msgspec.structs.replace(_place(out, err, end_offset, end_line), at_end=True)
    if noted is not None and (
        place.output_bytes < noted.output_bytes or place.error_bytes < noted.error_bytes
    ):
        raise OutputChangedError(
            f"{work.files.output} and {work.files.errors} hold {place.done + place.failed:,} results in "
            f"order, {noted.done + noted.failed:,} were written to them: somebody has changed them. Put them "
            "back, or remove the work folder and start the batch anew"
        )
    return place


def _place(out: _Walk, err: _Walk, offset: int, line: int) -> Progress:
    return Progress(
        offset=offset,
        line=line,
        done=out.count,
        failed=err.count,
        output_bytes=out.bytes,
        error_bytes=err.bytes,
        output_inode=out.inode,
        error_inode=err.inode,
    )


class _Walk:
    """One of the files, result by result."""

    def __init__(self, target: Target) -> None:
        self.path = target.path
        self.count = 0
        """Results taken."""
        self.bytes = 0
        """Up to the end of the last one."""
        with file_errors("cannot read", self.path):
            self._file = target.folder.read_file(target.name)
        self.inode = os.fstat(self._file.fileno()).st_ino
        self._results = self._read()
        self._next = next(self._results, None)

    def take(self, wanted: str) -> bool:
        """Go past the next result if it has this id."""
        if self._next is None or self._next[0] != wanted:
            return False
        self.bytes += self._next[1]
        self.count += 1
        self._next = next(self._results, None)
        return True

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def _read(self) -> Iterator[tuple[str, int]]:
        """(id, bytes) of each whole line; a last one without an end was cut short by a crash."""
        with file_errors("cannot read", self.path), self._file as file:
            for text in file:
                if not text.endswith(b"\n"):
                    return
                try:
                    yield _decoder.decode(text).id, len(text)
                except (msgspec.MsgspecError, RecursionError):
                    yield "", len(text)
