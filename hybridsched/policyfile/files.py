"""Policy files: TOML text in, a checked policy out, and back."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.policyfile import modes_schema
from hybridsched.policyfile.contradictions import contradictions
from hybridsched.policyfile.fields import Table
from hybridsched.policyfile.schema import (
    PolicyTable,
    Problem,
    keys,
    limits,
    nested_keys,
    reasons,
    replica_keys,
    to_policy,
)

PRESETS = ("idle-window", "consolidate", "headroom", "unprotected", "online-only")
"""Names of the policies that come with the package."""


class PolicyError(Exception):
    """A policy cannot be used. `problems` holds every mistake that was found, not only the first."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = "\n".join(f"  {problem.text(source)}" for problem in problems)
        if [(problem.key, problem.line) for problem in problems] == [("", None)]:
            # Of the file as a whole: it is not there, is a folder, is no text.
            super().__init__(f"policy {source} cannot be used: {problems[0].message}")
        else:
            super().__init__(f"policy {source} has {count}:\n{lines}")
        self.source = source
        self.problems = problems


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy and where each of its values came from."""

    policy: PoolPolicy
    source: str
    origins: Mapping[str, str]
    """Dotted key -> "FILE:LINE" or "default"."""


def preset_path(name: str) -> Path:
    """The file of a preset: in the installed package, or at the top of a source checkout."""
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "policies", here.parent / "policies"):
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    raise PolicyError(name, (Problem("", f"no such preset; there are {', '.join(PRESETS)}"),))


def load_policy(source: str | Path) -> LoadedPolicy:
    """Load a preset by its name, or a file by its path. Raises `PolicyError`.

    A name without a folder or suffix is a preset, unless a file of that name stands here.
    """
    path = Path(source)
    if not path.exists():
        if str(source) in PRESETS:
            path = preset_path(str(source))
        else:
            raise PolicyError(
                str(source),
                (Problem("", f"no such file, and no preset; the presets are {', '.join(PRESETS)}"),),
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(str(source), (Problem("", f"cannot be read: {error}"),)) from error
    return parse_policy(text, source=path.name if str(source) in PRESETS else str(source))


def parse_policy(text: str, *, source: str = "text") -> LoadedPolicy:
    """Check the TOML `text`. `source` names it in messages. Raises `PolicyError` with every mistake."""
    data = _read(text, source)
    lines = _key_lines(text)
    table, problems = _validate(data)
    bad = {problem.key for problem in problems}
    if table is not None:
        policy = to_policy(table)
        # Tables of the modes go as a whole when one value is wrong: what the rest lacks then says nothing.
        no_modes = any(key.startswith("modes") for key in bad)
        problems += [
            p
            for p, used in contradictions(policy)
            if not (bad.intersection(used) or (no_modes and p.key.startswith("modes")))
        ]
    if table is None or problems:
        placed = [Problem(p.key, p.message, _line_of(p.key, lines)) for p in problems]
        raise PolicyError(source, tuple(sorted(placed, key=lambda p: p.line or 0)))
    origins = {key: f"{source}:{lines[key]}" if key in lines else "default" for key in keys()}
    return LoadedPolicy(policy=policy, source=source, origins=origins)


def check_policy(policy: PoolPolicy) -> tuple[Problem, ...]:
    """The mistakes of a policy that came from no file: one that was written to Redis by other means."""
    values = msgspec.to_builtins(policy)
    values.pop("version", None)
    table, problems = _validate(values)
    if table is not None and not problems:
        problems = [problem for problem, _ in contradictions(policy)]
    return tuple(problems)


def _read(text: str, source: str) -> dict[str, Any]:
    """The tables of the TOML `text`. Raises `PolicyError` for what is none, or can be no policy."""
    if len(text) > LONGEST_TEXT:
        problem = Problem("", f"has {len(text):,} characters; a policy has at most {LONGEST_TEXT:,}")
        raise PolicyError(source, (problem,))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        named = re.search(r"at line (\d+)", str(error))
        line = int(named.group(1)) if named else None
        raise PolicyError(source, (Problem("", f"not valid TOML: {error}", line),)) from error
    except RecursionError as error:
        raise PolicyError(source, (Problem("", _TOO_DEEP),)) from error
    except ValueError as error:  # of int(), beyond the digits that it takes
        raise PolicyError(source, (Problem("", _TOO_LARGE),)) from error
    flaw = _monstrous(list(data.values()))
    if flaw:
        raise PolicyError(source, (Problem("", flaw),))
    return data


LONGEST_TEXT = 1_000_000
"""Characters of a policy file: thousands of replica groups fit."""

DEEPEST = 8
"""Tables and lists within each other. The deepest value there is, an argument of a replica, stands at 4."""

_TOO_DEEP = "is nested too deeply; values stand in tables such as [idle] and [[slurm.replicas]], no deeper"

_TOO_LARGE = "holds a number of hundreds of digits, which no key of a policy takes"


def _monstrous(values: list[Any]) -> str:
    """What makes values unfit to be looked at any closer; empty when nothing does. Without recursion."""
    layer = values
    for _ in range(DEEPEST):
        if any(isinstance(item, int) and item.bit_length() > 1000 for item in layer):
            return _TOO_LARGE
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict | list):
                inner += item.values() if isinstance(item, dict) else item
        layer = inner
        if not layer:
            return ""
    return _TOO_DEEP


def _validate(data: dict[str, Any]) -> tuple[PolicyTable | None, list[Problem]]:
    """The table, and the mistakes. Wrong optional values are left out, so that the rest can be compared."""
    try:
        return PolicyTable.model_validate(data), []
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        inside = {detail["loc"][:n] for detail in wrong for n in range(len(detail["loc"]))}
        # A list whose only item is wrong counts as empty as well: the item is what there is to say.
        wrong = [d for d in wrong if d["type"] != "too_short" or d["loc"] not in inside]
        problems = [_problem(dict(detail)) for detail in wrong]
        repaired = json.loads(json.dumps(data, default=str))
        for detail in error.errors(include_url=False):
            _remove(repaired, tuple(detail["loc"]))
        repaired.setdefault("name", "unnamed")
        repaired.setdefault("kind", PolicyKind.IDLE_WINDOW.value)
        try:
            return PolicyTable.model_validate(repaired), problems
        except ValidationError:
            return None, problems


def _remove(data: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Take the first wrong value along `loc` out of nested tables (a list goes as a whole)."""
    here: Any = data
    for step in loc[:-1]:
        inner = here.get(step) if isinstance(here, dict) else None
        if not isinstance(inner, dict):
            break
        here = inner
    else:
        step = loc[-1]
    if isinstance(here, dict):
        here.pop(step, None)


def _problem(detail: dict[str, Any]) -> Problem:
    loc = tuple(part for part in detail["loc"] if isinstance(part, str))
    key, kind, given = _path(detail["loc"]), detail["type"], detail["input"]
    meanings = keys() | nested_keys()
    if kind == "extra_forbidden":
        return Problem(key, _unknown_key(loc))
    if kind == "missing":
        return Problem(key, f"is missing; give the {meanings['.'.join(loc)]}")
    shown = _shown(given)
    if kind in ("model_type", "model_attributes_type"):
        return Problem(key, f"was given {shown}; it must be a table, written [{key}]")
    if kind == "too_short":
        return Problem(key, f"was given {shown}; it must have at least {detail['ctx']['min_length']} item")
    plain = ".".join(loc)
    if kind in ("greater_than_equal", "less_than_equal") and plain in reasons():
        least, most = limits()[plain]
        message = f"was given {shown}; it must be from {least:,.12g} to {most:,.12g} ({meanings[plain]}): "
        return Problem(key, message + reasons()[plain])
    allowed = str(detail["msg"]).removeprefix("Input ").removeprefix("String ").replace("valid tuple", "list")
    meaning = meanings.get(".".join(loc), "")
    return Problem(key, f"was given {shown}; it {allowed}" + (f" ({meaning})" if meaning else ""))


def _shown(given: Any) -> str:
    """What was given, as far as it helps."""
    text = repr(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


SHOWN = 80
"""Characters of a wrong value that a message shows."""


def _path(loc: tuple[int | str, ...]) -> str:
    """The dotted key, with the number of a table in a list of tables: slurm.replicas[0].count."""
    path = ""
    for i, part in enumerate(loc):
        if isinstance(part, str):
            path += f".{part}" if path else part
        elif i + 1 < len(loc):
            path += f"[{part}]"
    return path


def _unknown_key(loc: tuple[str, ...]) -> str:
    if loc == ("version",):
        return "is not for the file: the pool gives a policy its version when it is published"
    prefix = ".".join(loc[:-1])
    depth = len(loc)
    every = [key for key in keys() | nested_keys() if _inside(key, prefix)]
    known = sorted({".".join(key.split(".")[:depth]).rpartition(".")[2] for key in every})
    near = difflib.get_close_matches(loc[-1], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"is not a key of a policy{hint} (allowed here: {', '.join(known)})"


def _inside(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(prefix + ".")


_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\- ]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-]+)\s*=")


def _key_lines(text: str) -> dict[str, int]:
    """Line of each plain key. Quoted keys and inline tables are not found; their problems carry no line."""
    lines: dict[str, int] = {}
    table = ""
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _numbered(header.group(2), seen)
            lines.setdefault(table, number)
            if header.group(1) == "[[":
                seen[table] = seen.get(table, -1) + 1
                table = f"{table}[{seen[table]}]"
                lines[table] = number
        elif key := _KEY.match(line):
            lines.setdefault(f"{table}.{key.group(1)}" if table else key.group(1), number)
    return lines


def _numbered(table: str, seen: Mapping[str, int]) -> str:
    """A header's name with the number of the table in each list above it that it belongs to."""
    path = ""
    for part in table.split("."):
        if path in seen:
            path += f"[{seen[path]}]"
        path += f".{part}" if path else part
    return path


def _line_of(key: str, lines: Mapping[str, int]) -> int | None:
    """The key's line; that of its table where a key of a [[table]] is missing."""
    return lines.get(key) or (lines.get(key.rpartition(".")[0]) if "[" in key else None)


def dump_toml(policy: PoolPolicy) -> str:
    """The policy as a file that `parse_policy` reads back to the same values (the version is left out)."""
    values: dict[str, Any] = msgspec.to_builtins(policy)
    out: list[str] = []
    for name, field in PolicyTable.model_fields.items():
        table = field.annotation
        if name == "modes" and values[name] is not None:
            out += ["", f"# {field.description}", *modes_schema.dump(values[name])]
            continue
        if not (isinstance(table, type) and issubclass(table, Table)):
            out += [f"# {field.description}", _line(name, values[name])]
            continue
        out += ["", f"# {field.description}", f"[{name}]"]
        tables: list[str] = []
        for key, sub in table.model_fields.items():
            value = values[name][key]
            if value and isinstance(value[0] if isinstance(value, list | tuple) else None, dict):
                tables += [line for entry in value for line in _entry(f"{name}.{key}", entry)]
            else:
                out += [f"# {sub.description}", _line(key, value)]
        out += tables
    return "\n".join(out) + "\n"


def _entry(table: str, values: Mapping[str, Any]) -> list[str]:
    """One table of a list of tables."""
    meanings = replica_keys()
    lines = ["", f"[[{table}]]"]
    for key, value in values.items():
        lines += [f"# {meanings[f'{table}.{key}']}", _line(key, value)]
    return lines


def _line(key: str, value: Any) -> str:
    """One TOML line. JSON's strings, numbers, booleans and flat lists are TOML's too."""
    return f"# {key} =" if value is None else f"{key} = {json.dumps(value)}"
