"""A site's slurm.conf with what it includes: read in Slurm's order, each line changed where it stands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hybridsched.slurmfiles.records import Entry, entries, leftovers, put

_DEEPEST = 3
"""Files that include files that include files; a circle ends here too."""


class Conf:
    """The texts by file. `ours` are names of included files that are written whole, and so not read."""

    def __init__(self, main: Path, read: Callable[[Path], str], ours: Collection[str]) -> None:
        self.main = main
        self.before: dict[Path, str] = {}
        self._ours = ours
        self._load(main, read, 0)
        self.texts = dict(self.before)

    def _load(self, path: Path, read: Callable[[Path], str], depth: int) -> None:
        if path in self.before or depth > _DEEPEST:
            return
        self.before[path] = text = read(path)
        for entry in entries(text):
            if entry.key == "Include" and (below := self._included(entry)) is not None:
                self._load(below, read, depth + 1)

    def _included(self, entry: Entry) -> Path | None:
        path = self.main.parent / entry.value
        return None if path.name in self._ours else path

    def walk(self) -> Iterator[tuple[Path, Entry]]:
        """Each setting and record with its file, in the order in which Slurm meets them."""
        yield from self._walk(self.main, 0)

    def _walk(self, path: Path, depth: int) -> Iterator[tuple[Path, Entry]]:
        for entry in entries(self.texts[path]):
            yield path, entry
            below = self._included(entry) if entry.key == "Include" else None
            if below in self.texts and depth < _DEEPEST:
                yield from self._walk(below, depth + 1)

    def setting(self, key: str) -> tuple[Path, Entry] | None:
        """A setting that is no record; the last one counts, as for Slurm."""
        return next((f for f in reversed(list(self.walk())) if f[1].key.lower() == key.lower()), None)

    def record(self, kind: str, name: str) -> tuple[Path, Entry] | None:
        """The record `kind` (NodeName, PartitionName) of exactly this name."""
        for path, entry in self.walk():
            if entry.key.lower() == kind.lower() and entry.value == name:
                return path, entry
        return None

    def put(self, path: Path, entry: Entry, line: str) -> None:
        """The lines of `entry` replaced by `line`."""
        self.texts[path] = put(self.texts[path], entry, line)

    def damage(self, changed: Mapping[str, Collection[str]]) -> str | None:
        """What has changed beside what was meant to, in a sentence; None: nothing.

        `changed` are the keys that may change or be new, in small letters, each with the fields of its
        records that may. No record may go, and no line may hold what is no `key=value`.
        """
        for path, before in self.before.items():
            after = self.texts[path]
            if torn := set(leftovers(after)) - set(leftovers(before)):
                return f"{path} would hold {sorted(torn)[0]!r}, which Slurm cannot read"
            was, now = list(entries(before)), list(entries(after))
            for old, new in zip(was, now, strict=False):
                key = old.key.lower()
                if (key, _but(old, changed)) != (new.key.lower(), _but(new, changed)):
                    what = f"{path} line {old.first + 1}, {old.key}={old.value},"
                    return f"{what} would change beside what is meant"
            if len(now) < len(was):
                return f"{path} would lose {was[len(now)].key}={was[len(now)].value}"
            for entry in now[len(was) :]:
                if entry.key.lower() not in changed:
                    return f"{path} would newly set {entry.key}={entry.value}"
        return None


def _but(entry: Entry, changed: Mapping[str, Collection[str]]) -> tuple[object, ...]:
    """What of an entry must stay."""
    free = changed.get(entry.key.lower())
    if free is not None and not entry.fields and not free:
        return ()
    kept = {k.lower(): v for k, v in entry.fields.items() if k.lower() not in (free or ())}
    return entry.value, tuple(sorted(kept.items()))
