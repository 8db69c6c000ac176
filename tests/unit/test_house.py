"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VLLM_CHILD = ROOT / "hybridsched" / "engines" / "in_process" / "child.py"
"""Run by the Python of vLLM's own environment, and imported by nothing."""
SOURCES = sorted((ROOT / "hybridsched").rglob("*.py"))


def test_there_are_sources() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_is_small_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_has_a_docstring_and_no_pickle(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), "a module says what it is for"
    imported = {name.split(".")[0] for name in _imports(tree)}
    assert not imported & {"pickle", "marshal", "shelve"}
    assert not imported & {"vllm", "torch"} or path == VLLM_CHILD
    assert not any("in_process.child" in name for name in _imports(tree))


def test_what_runs_in_vllms_own_environment_needs_nothing_of_ours() -> None:
    imported = set(_imports(ast.parse(VLLM_CHILD.read_text())))
    assert "vllm" in imported
    assert not [name for name in imported if name.startswith("hybridsched")]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", sorted((ROOT / "hybridsched").rglob("*.lua")), ids=lambda p: p.name)
def test_lua_script_documents_its_keys(path: Path) -> None:
    header = "\n".join(line for line in path.read_text().splitlines()[:40] if line.startswith("--"))
    assert "KEYS" in header
    assert "ARGV" in header
    assert re.search(r"[Rr]eturn", header)
