"""Slurm's configuration text: read and changed line by line, everything else kept as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_RECORDS = ("nodename", "partitionname", "nodeset", "downnodes", "frontendname", "switchname")
_PAIR = re.compile(r"([A-Za-z][\w]*)\s*=\s*(\"[^\"]*\"|\S*)", re.ASCII)
"""As Slurm's own: blanks may stand round the sign. Only what is blank in ASCII is blank."""


@dataclass(frozen=True)
class Entry:
    """One logical line (with its continuations) that sets something: lines `first` to `last`, from 0."""

    first: int
    last: int
    key: str
    value: str
    """Of a record (NodeName=..., PartitionName=...) the name."""
    fields: Mapping[str, str]


def entries(text: str) -> Iterator[Entry]:
    """The settings and records of a slurm.conf or gres.conf. Keys are Slurm's, which know no case."""
    for first, last, logical in _logical_lines(text):
        pairs = [(m.group(1), m.group(2).strip('"')) for m in _PAIR.finditer(logical)]
        if include := re.match(r"\s*include\s+(\S+)", logical, re.IGNORECASE | re.ASCII):
            yield Entry(first, last, "Include", include.group(1), {})
        elif pairs:
            yield Entry(first, last, pairs[0][0], pairs[0][1], dict(pairs[1:]))


def _logical_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """First and last line, and the text without comments. Only a line feed ends a line, as for Slurm: a form
    feed or a separator of Unicode in a comment leaves what follows in the comment."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first = number
        logical = _without_comment(lines[number])
        while logical.rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            logical = logical.rstrip()[:-1] + " " + _without_comment(lines[number])
        number += 1
        yield first, number - 1, logical


def leftovers(text: str) -> list[str]:
    """What stands in the lines and is neither `key=value` nor an Include: Slurm ends at it."""
    found = []
    for _, _, logical in _logical_lines(text):
        if re.match(r"\s*include\s+\S+\s*$", logical, re.IGNORECASE | re.ASCII):
            continue
        if rest := _PAIR.sub(" ", logical).strip():
            found.append(rest)
    return found


def with_fields(text: str, entry: Entry, fields: Mapping[str, Callable[[str], str]]) -> str:
    """The lines of `entry` as one, with the value of each of `fields` made of the one that stands there.

    In place where there is one; the old value is empty where there is none.
    """
    lines = text.split("\n")[entry.first : entry.last + 1]
    (_, _, line), *_ = _logical_lines("\n".join(lines))
    line = line.strip()
    for key, made in fields.items():
        found = next((m for m in _PAIR.finditer(line) if m.group(1).lower() == key.lower()), None)
        if found is None:
            line = f"{line} {key}={made('')}"
        else:
            value = made(found.group(2).strip('"'))
            line = f"{line[: found.start()]}{found.group(1)}={value}{line[found.end() :]}"
    remarks = [part[len(_without_comment(part)) :].rstrip() for part in lines]
    return "  ".join([line, *filter(None, remarks)])


def _without_comment(line: str) -> str:
    return re.split(r"(?<!\\)#", line, maxsplit=1)[0]


def settings(text: str) -> dict[str, Entry]:
    """The settings that are no records, by key in small letters; the last one counts, as for Slurm."""
    return {e.key.lower(): e for e in entries(text) if e.key.lower() not in (*_RECORDS, "include")}


def record(text: str, kind: str, name: str) -> Entry | None:
    """The record `kind` (NodeName, PartitionName) of exactly this name."""
    for entry in entries(text):
        if entry.key.lower() == kind.lower() and entry.value == name:
            return entry
    return None


def put(text: str, entry: Entry, line: str) -> str:
    """The text with the lines of `entry` replaced by `line`."""
    lines = text.split("\n")
    lines[entry.first : entry.last + 1] = [line]
    changed = "\n".join(lines)
    return changed if changed.endswith("\n") else changed + "\n"


def add_words(value: str, words: str) -> str:
    """A comma list with the words of another added: `a,b` + `b,c=1` = `a,b,c=1`. `c=2` gives way to `c=1`."""
    have = [word for word in value.split(",") if word and word != "(null)"]
    for word in words.split(","):
        name = word.partition("=")[0]
        have = [old for old in have if not ("=" in word and old.partition("=")[0] == name)]
        if word not in have:
            have.append(word)
    return ",".join(have)


def words(value: str) -> frozenset[str]:
    """The words of a comma list in small letters, without what follows `=`."""
    return frozenset(word.partition("=")[0].strip().lower() for word in value.split(",") if word.strip())


def parse_fields(line: str) -> dict[str, str]:
    """`Key=value Key=value` as `scontrol -o` prints it, where a value may hold blanks."""
    found = re.finditer(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|$)", line.strip())
    return {match.group(1): match.group(2).strip() for match in found}


def gres_not_consumed(text: str) -> frozenset[str]:
    """The names in a Gres= of slurm.conf that say `no_consume`: `hsfill:no_consume:8` -> hsfill."""
    parts = [part.strip().split(":") for part in re.sub(r"\([^)]*\)", "", text).split(",")]
    return frozenset(name for name, *rest in parts if "no_consume" in [word.lower() for word in rest])


def gres_counts(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),hsfill:8` -> {"gpu": 4, "hsfill": 8}. A count may end in K, M or G."""
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = part.strip().split(":")
        number = re.fullmatch(r"(\d+)([KMG]?)", rest[-1], re.IGNORECASE) if rest else None
        if name and name != "null":
            scale = 1024 ** " KMG".index(number.group(2).upper() or " ") if number else 1
            counts[name] = counts.get(name, 0) + (int(number.group(1)) * scale if number else 1)
    return counts
