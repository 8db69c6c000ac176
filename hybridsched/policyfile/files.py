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
from hybridsched.policyfile.contradictions import contradictions
from hybridsched.policyfile.schema import PolicyTable, Problem, Table, keys, replica_keys, to_policy

PRESETS = ("idle-window", "unprotected", "online-only")
"""Names of the policies that come with the package."""


class PolicyError(Exception):
    """A policy cannot be used. `problems` holds every mistake that was found, not only the first."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = "\n".join(f"  {problem.text(source)}" for problem in problems)
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
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else None
        raise PolicyError(source, (Problem("", f"not valid TOML: {error}", line),)) from error
    lines = _key_lines(text)
    table, problems = _validate(data)
    bad = {problem.key for problem in problems}
    if table is not None:
        policy = to_policy(table)
        problems += [p for p, used in contradictions(policy) if not bad.intersection(used)]
    if table is None or problems:
        placed = [Problem(p.key, p.message, _line_of(p.key, lines)) for p in problems]
        raise PolicyError(source, tuple(sorted(placed, key=lambda p: p.line or 0)))
    origins = {key: f"{source}:{lines[key]}" if key in lines else "default" for key in keys()}
    return LoadedPolicy(policy=policy, source=source, origins=origins)


def _validate(data: dict[str, Any]) -> tuple[PolicyTable | None, list[Problem]]:
    """The table, and the mistakes. Wrong optional values are left out, so that the rest can be compared."""
    try:
        return PolicyTable.model_validate(data), []
    except ValidationError as error:
        problems = [_problem(dict(detail)) for detail in error.errors(include_url=False)]
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
    meanings = keys() | replica_keys()
    if kind == "extra_forbidden":
        return Problem(key, _unknown_key(loc))
    if kind == "missing":
        return Problem(key, f"is missing; give the {meanings['.'.join(loc)]}")
    if kind in ("model_type", "model_attributes_type"):
        return Problem(key, f"was given {given!r}; it must be a table, written [{key}]")
    limits = str(detail["msg"]).removeprefix("Input ").removeprefix("String ").replace("valid tuple", "list")
    meaning = meanings.get(".".join(loc), "")
    return Problem(key, f"was given {given!r}; it {limits}" + (f" ({meaning})" if meaning else ""))


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
    every = [key for key in keys() | replica_keys() if _inside(key, prefix)]
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
            table = header.group(2)
            lines.setdefault(table, number)
            if header.group(1) == "[[":
                index = seen[table] = seen.get(table, -1) + 1
                table = f"{table}[{index}]"
                lines[table] = number
        elif key := _KEY.match(line):
            lines.setdefault(f"{table}.{key.group(1)}" if table else key.group(1), number)
    return lines


def _line_of(key: str, lines: Mapping[str, int]) -> int | None:
    """The key's line; that of its table where a key of a [[table]] is missing."""
    return lines.get(key) or (lines.get(key.rpartition(".")[0]) if "[" in key else None)


def dump_toml(policy: PoolPolicy) -> str:
    """The policy as a file that `parse_policy` reads back to the same values (the version is left out)."""
    values: dict[str, Any] = msgspec.to_builtins(policy)
    out: list[str] = []
    for name, field in PolicyTable.model_fields.items():
        table = field.annotation
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
