"""Words that Slurm uses in every output: GRES lists, states, spans, node lists that need no expansion."""

from __future__ import annotations

import re

from hybridsched.cluster.values import JOB_FLAGS, ClusterError, Gres

NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "(none)", "none"})
"""What Slurm writes where there is nothing."""

_SUFFIX = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_COUNT = re.compile(r"([+-]?[0-9]{1,18})([KMGTP]?)")
"""Slurm takes a sign in a job's request and keeps it as it was written."""

_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINT",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""One-character suffixes of a node state, from sinfo(1)."""

_SHORT = {"ALLOC": "ALLOCATED", "MIX": "MIXED", "COMP": "COMPLETING", "DRNG": "DRAINING", "RESV": "RESERVED"}


def unreadable(what: str, text: object) -> ClusterError:
    """The error for an answer that is not understood."""
    shown = str(text)
    shown = shown if len(shown) <= 200 else shown[:200] + "…"
    return ClusterError(
        f"Slurm's answer was not understood: {what}, in {shown!r}; please report it with the Slurm version",
        code="unreadable",
        retryable=False,
    )


def nothing(text: str | None) -> str:
    """The text, or the empty string where Slurm wrote one of its words for nothing."""
    return "" if text is None or text.strip() in NOTHING else text.strip()


def split_outside(text: str, separator: str) -> list[str]:
    """Split at separators that do not stand within (), [] or {}."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth = max(0, depth - 1)
        elif c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def parse_gres(text: str | None) -> tuple[Gres, ...]:
    """A GRES list in any of the ways Slurm writes it.

    `gpu:a100:4(S:0-1),hsfill:2`, `gpu:(null):4(IDX:0-3)`, `gres:gpu:1`, `gres/gpu:a100=2`, `gpu:0(IDX:N/A)`,
    `hsfill(CNT:1)`, `bandwidth:no_consume:4G`. Entries of trackable resources that are no GRES
    (`cpu=4,gres/gpu=1`) are passed over. Raises `ClusterError("unreadable")` for anything else.
    """
    found, bad = read_gres(text)
    if bad:
        raise unreadable("a GRES is written name[:type][:count]", bad[0])
    return found


def read_gres(text: str | None) -> tuple[tuple[Gres, ...], tuple[str, ...]]:
    """The entries of a GRES list, as `parse_gres`, and those that cannot be read. Never raises."""
    found: list[Gres] = []
    bad: list[str] = []
    for item in split_outside(nothing(text), ","):
        try:
            if nothing(item) and (one := _one_gres(item.strip())):
                found.append(one)
        except ClusterError:
            bad.append(item)
    return tuple(found), tuple(bad)


def _one_gres(item: str) -> Gres | None:
    if "=" in item:  # a trackable resource: gres/gpu:a100=2
        if not item.startswith("gres/"):
            return None
        item = item.replace("=", ":", 1)
    item = item.removeprefix("gres:").removeprefix("gres/")
    if not nothing(item):  # `gres:`, which Slurm leaves of a job whose GRES its owner has set to none
        return None
    index, count = None, None
    note = re.search(r"\((IDX|CNT|S):([^)]*)\)$", item)
    if note:
        item = item[: note.start()]
        if note[1] == "IDX":
            index = nothing(note[2]) or None
        elif note[1] == "CNT":
            count = _count(note[2])
    parts = [p for p in item.split(":") if p != "no_consume"]
    if len(parts) > 1 and (last := _count(parts[-1])) is not None:
        count = last
        parts.pop()
    if not parts or not parts[0] or len(parts) > 2:
        raise unreadable("a GRES is written name[:type][:count]", item)
    kind = nothing(parts[1]) if len(parts) == 2 else ""
    return Gres(name=parts[0], type=kind or None, count=1 if count is None else count, index=index)


def _count(text: str) -> int | None:
    found = _COUNT.fullmatch(text)
    return max(0, int(found[1])) * _SUFFIX.get(found[2], 1) if found else None


def with_count(gres: tuple[Gres, ...], name: str, count: int) -> str:
    """The list for `gres=` that has `name` at `count`, not consumed, and repeats every other entry unchanged.

    Slurm never shows `no_consume`. It keeps the word for an entry that is repeated without it (seen on 22.05;
    its parser only ever sets it), so a site's own GRES of that kind stay what they are.
    """
    kept = [g.spec() for g in gres if g.name != name]
    return ",".join([*kept, f"{name}:no_consume:{count}"])


def node_states(text: str) -> tuple[str, ...]:
    """`IDLE+DRAIN`, `idle*`, `MIXED+CLOUD`, `DOWN*+DRAIN` as base and flags in capitals."""
    states: list[str] = []
    for word in text.upper().split("+"):
        bare = word.strip().rstrip("".join(_MARKS))
        marks = word.strip()[len(bare) :]
        if bare:
            states.append(_SHORT.get(bare, bare))
        states.extend(_MARKS[m] for m in marks)
    return tuple(dict.fromkeys(states))


def job_state(words: list[str]) -> tuple[str, tuple[str, ...]]:
    """Base state and flags. A lone flag (Slurm before 23.02) stands as the state itself."""
    upper = [w.strip().upper() for w in words if w.strip()]
    if not upper:
        raise unreadable("a job without a state", words)
    base = next((w for w in upper if w not in JOB_FLAGS), upper[0])
    return base, tuple(w for w in upper if w != base)


def minutes_ms(text: str) -> float | None:
    """A time limit as squeue and scontrol write it (`10:00`, `1-02:00:00`, `UNLIMITED`) in milliseconds.

    None for no limit. Raises `ClusterError("unreadable")`.
    """
    word = nothing(text)
    if not word or word.upper() in ("UNLIMITED", "INFINITE", "PARTITION_LIMIT", "NOT_SET", "INVALID"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+)(?::(\d+))?", word)
    if not found:
        raise unreadable("a span is written [days-][hours:]minutes:seconds", text)
    days, first, second, third = found.groups()
    if third is None and first is not None and days is None:  # minutes:seconds
        hours, minutes, seconds = 0, int(first), int(second)
    elif first is None:  # bare minutes, or days-hours
        hours, minutes, seconds = (int(second), 0, 0) if days else (0, int(second), 0)
    elif third is None:  # days-hours:minutes
        hours, minutes, seconds = int(first), int(second), 0
    else:
        hours, minutes, seconds = int(first), int(second), int(third)
    return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000.0


def epoch_ms(text: str) -> float | None:
    """A time printed under `SLURM_TIME_FORMAT=%s`; None for Slurm's words for no time."""
    seconds = whole(text)
    return seconds * 1000.0 if seconds else None


def whole(text: str | None) -> int | None:
    """A plain whole number; None for anything else. (`isdigit` is also true of `²`, which is no number.)"""
    word = nothing(text)
    return int(word) if re.fullmatch("[0-9]{1,18}", word) else None


def single_host(nodes: str) -> bool:
    """Whether a node list is one plain name, so that nothing needs expanding."""
    return not re.search(r"[\[\],\s]", nodes)
