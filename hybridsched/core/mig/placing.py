"""Which instances fit on one GPU together, and where. Exhaustive: a GPU has at most eight memory slices."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from hybridsched.core.mig.values import Piece, Profile, names_said

MEDIA = "+me"
"""Only one instance of a GPU can have the media extensions (MIG User Guide, the tables' counts)."""


class MigRefusalError(Exception):
    """A layout cannot be had. The message says what was wanted, why not, and what fits."""


def cells(start: int, size: int) -> int:
    """The memory slices of a placement as bits."""
    return ((1 << size) - 1) << start


def place(profiles: Collection[Profile], pieces: Sequence[Piece], taken: int = 0) -> tuple[Piece, ...] | None:
    """The same pieces with a start each, beside the slices `taken`; None when there is no way.

    Every piece's profile must be in `profiles`. Counts above a profile's `most` are not looked at here.
    """
    by_name = {p.name: p for p in profiles}
    order = sorted(
        range(len(pieces)),
        key=lambda i: (
            pieces[i].start is None,
            -by_name[pieces[i].profile].size,
            len(by_name[pieces[i].profile].starts),
            pieces[i].profile,
        ),
    )
    found: dict[int, int] = {}

    def go(depth: int, used: int) -> bool:
        if depth == len(order):
            return True
        piece = pieces[order[depth]]
        profile = by_name[piece.profile]
        starts: Iterable[int] = profile.starts
        if piece.start is not None:
            starts = (piece.start,) if piece.start in profile.starts else ()
        elif depth and pieces[order[depth - 1]] == piece:
            # Of like pieces the order makes no difference: try one only.
            starts = (s for s in profile.starts if s > found[order[depth - 1]])
        for start in starts:
            bits = cells(start, profile.size)
            if not used & bits:
                found[order[depth]] = start
                if go(depth + 1, used | bits):
                    return True
        return False

    if not go(0, taken):
        return None
    return tuple(Piece(profile=piece.profile, start=found[i]) for i, piece in enumerate(pieces))


def fits(profiles: Collection[Profile], pieces: Sequence[Piece]) -> bool:
    """Whether the pieces can stand on one GPU together. Every profile must be known."""
    counts = Counter(piece.profile for piece in pieces)
    if any(counts[p.name] > p.most for p in profiles):
        return False
    if sum(count for name, count in counts.items() if name.endswith(MEDIA)) > 1:
        return False
    return place(profiles, pieces) is not None


def refusal(profiles: Collection[Profile], pieces: Sequence[Piece]) -> str | None:
    """Why the pieces cannot stand on one GPU together, and what can; None when they fit."""
    by_name = {p.name: p for p in profiles}
    for name in dict.fromkeys(piece.profile for piece in pieces):
        if name not in by_name:
            return _unknown(name, profiles)
    counts = Counter(piece.profile for piece in pieces)
    for name, count in counts.items():
        if count > by_name[name].most:
            return f"{count} x {name} is too many; at most {by_name[name].most} fit"
    if fits(profiles, pieces):
        return None
    largest = sorted(pieces, key=lambda p: (-by_name[p.profile].size, -by_name[p.profile].slices, p.profile))
    kept: list[Piece] = []
    for piece in largest:
        if fits(profiles, [*kept, piece]):
            kept.append(piece)
    left = [p.name for p in profiles if fits(profiles, [*kept, Piece(profile=p.name)])]
    beside = f"; beside them one of {', '.join(left)} fits" if left else "; nothing fits beside them"
    wanted = names_said([p.profile for p in largest])
    return f"{wanted} do not fit together; {names_said([p.profile for p in kept])} fit{beside}"


def _unknown(name: str, profiles: Collection[Profile]) -> str:
    if "c." in name.partition("g.")[0]:
        whole = name.partition(".")[2]
        return f"{name} is part of an instance; only whole instances are supported, such as {whole}"
    has = ", ".join(f"{p.most} x {p.name}" for p in profiles)
    same = [p.name for p in profiles if p.name.partition(".")[0] == name.partition(".")[0]]
    near = (difflib.get_close_matches(name, same, n=1, cutoff=0.9) or same)[:1]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no profile {name}{hint} (at most: {has})"
