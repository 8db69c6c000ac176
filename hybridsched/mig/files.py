"""Layout files: YAML (JSON is YAML) in mig-parted's format, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import yaml

from hybridsched.core.mig import Layout, LayoutFileError, parse_layouts

SELECTED = "selected"
"""A document for one node may say which of its layouts is meant."""


class _Strict(yaml.SafeLoader):
    """Plain values only, and no key twice: YAML would let the last one win unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_layouts(source: str, stdin: TextIO) -> tuple[dict[str, Layout], str | None]:
    """The layouts of a file (`-`: of `stdin`), and the label that the document selects itself.

    Raises `LayoutFileError` with every mistake.
    """
    name = "from standard input" if source == "-" else f"file {source}"
    try:
        text = stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutFileError(name, [("", f"cannot be read: {error}")]) from error
    return parse_text(text, source=name)


def parse_text(text: str, *, source: str = "text") -> tuple[dict[str, Layout], str | None]:
    """The same of a text. Raises `LayoutFileError`."""
    try:
        document = yaml.load(text, Loader=_Strict)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise LayoutFileError(source, [("", f"is not valid YAML: {' '.join(str(error).split())}")]) from error
    selected = document.pop(SELECTED, None) if isinstance(document, dict) else None
    layouts = parse_layouts(document, source=source)
    if selected is not None and selected not in layouts:
        raise LayoutFileError(source, [(SELECTED, f"was given {selected!r}; there are {', '.join(layouts)}")])
    return layouts, selected


def dump(document: dict[str, Any]) -> str:
    """A document as mig-parted prints it."""
    return str(yaml.safe_dump(document, sort_keys=False, default_flow_style=False))
