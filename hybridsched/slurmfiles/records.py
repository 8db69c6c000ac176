"""Slurm's configuration text: read and changed line by line, everything else kept as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_RECORDS = ("nodename", "partitionname", "nodeset", "downnodes", "frontendname", "switchname")
_PAIR = re.compile(r"([A-Za-z][\w]*)\s*=\s*(\"[^\"]*\"|\S*)")


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
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first = number
        logical = _without_comment(lines[number])
        while logical.rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            logical = logical.rstrip()[:-1] + " " + _without_comment(lines[number])
        number += 1
        pairs = [(m.group(1), m.group(2).strip('"')) for m in _PAIR.finditer(logical)]
        if include := re.match(r"\s*include\s+(\S+)", logical, re.IGNORECASE):
            yield Entry(first, number - 1, "Include", include.group(1), {})
        elif pairs:
            yield Entry(first, number - 1, pairs[0][0], pairs[0][1], dict(pairs[1:]))


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
    lines = text.splitlines()
    lines[entry.first : entry.last + 1] = [line]
    return "\n".join(lines) + "\n"


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
