"""The first reading of an input: what it is, and what is in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from hybridsched.batches.errors import InputUnreadableError, NotYoursError, file_errors
from hybridsched.batches.layout import InputIdentity, check_identity, identify, open_input
from hybridsched.batches.scan import InputIndex, scan


class SeenInput(NamedTuple):
    """What an input was found to be."""

    identity: InputIdentity
    found: InputIndex


def read_input(path: str, progress: Callable[[int], object] | None) -> SeenInput:
    """Read an input, which must be the caller's own: also root's batches run with root's files only.

    `progress` is told the bytes read so far.

    Raises:
        InputUnreadableError, InputChangedError, NotYoursError: see `layout`.
    """
    try:
        file = open_input(path, owner=os.geteuid())
    except NotYoursError as exc:
        raise NotYoursError(f"{exc}: submit it as that user, or a copy of your own") from exc
    with file, file_errors("cannot read", path):
        identity = identify(file)
        found = scan(file, progress=progress)
        check_identity(path, file, identity)
    if found.lines == 0:
        raise InputUnreadableError(f"{path} has only blank lines; one request a line is expected")
    return SeenInput(identity, found)
