"""The table "simulated against real": what both engines answer to each probe, and why where they differ.

    python -m tests.vllm.engine_table           # asks both engines and shows what has changed
    python -m tests.vllm.engine_table --write   # and writes the golden file and the page

The golden file holds the answers and, written by hand, the reasons; the page is made of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from tests.contract.engine_servers import SimulatedServer
from tests.vllm.engine_probes import PROBES, Client, families
from tests.vllm.engine_rigs import REAL_FLAGS, SIMULATED_FLAGS
from tests.vllm.engines import ROOT, RealVllm, make_model, vllm_python

GOLDEN = ROOT / "tests" / "golden" / "engine-probes.json"
PAGE = ROOT / "docs" / "simulated-against-real.md"
_METRIC = "metric "
_HEAD = """\
# Simulated vLLM against the real one

Made by `python -m tests.vllm.engine_table --write`, and compared whole by `make test`. Both engines run with the
same limits ({flags});
the real one is vLLM 0.32.0, CPU build, with a tiny model of random weights. Each row is a question put over plain HTTP,
and what came back without anything that differs from run to run. Every row is equal, or says why not.

The contract suite (tests/vllm/test_engine_contract.py, test_engine_contract_control.py, test_engine_deaths.py) asks for
the meaning: the same tests pass on both, and on a fake and on vLLM in a process of ours.

Of times only this is told here: the real engine answers an abort at once and drops what its iteration in flight still
computes for the request; the simulated one answers at the end of that iteration, and keeps its token. A pause simulated
is therefore longer, by up to one iteration, than a real one.

"""  # noqa: E501 - prose of a page


async def observe(url: str) -> dict[str, str]:
    """The answer to each probe, and each metric's type and labels."""
    seen: dict[str, str] = {}
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=1000)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(session, url)
        for title, probe in PROBES.items():
            await client.running(0)  # or a probe could take the one before, on its way out, for its own
            seen[title] = await probe(client)
        for name, about in (await families(client)).items():
            seen[_METRIC + name] = about
    return seen


def table(golden: dict[str, dict[str, str]]) -> str:
    """The page."""
    flags = " ".join(f for f in REAL_FLAGS)
    equal = sum(row["real"] == row["simulated"] for row in golden.values())
    out = [_HEAD.format(flags=f"`{flags}`"), f"{len(golden)} rows, {equal} of them equal.\n\n"]
    differ = {title: row for title, row in golden.items() if row["real"] != row["simulated"]}
    out.append("## Rows that differ\n\n| question | real | simulated | why |\n|---|---|---|---|\n")
    out += [
        f"| {_cell(title)} | {_cell(row['real'])} | {_cell(row['simulated'])} | {_cell(row['why'])} |\n"
        for title, row in differ.items()
    ]
    out.append("\n## Rows that are equal\n\n| question | both |\n|---|---|\n")
    out += [
        f"| {_cell(title)} | {_cell(row['real'])} |\n" for title, row in golden.items() if title not in differ
    ]
    return "".join(out)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


def read_golden() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return found


def merged(
    old: dict[str, dict[str, str]], real: dict[str, str], simulated: dict[str, str]
) -> dict[str, dict[str, str]]:
    """New answers beside the reasons that were given before; a reason for rows that are equal now is
    dropped."""
    rows = {}
    for title in [*real, *(t for t in simulated if t not in real)]:
        row = {"real": real.get(title, "none"), "simulated": simulated.get(title, "none")}
        row["why"] = old.get(title, {}).get("why", "") if row["real"] != row["simulated"] else ""
        rows[title] = row
    return rows


@contextlib.contextmanager
def _real_engine() -> Iterator[str]:
    python = vllm_python()
    if python is None:
        raise SystemExit("the real vLLM is not there: make vllm-setup")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(python, Path(folder) / "model", "grouped-query")
        server = RealVllm(python, model, *REAL_FLAGS)
        try:
            yield server.url
        finally:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the simulated vLLM with the real one.")
    parser.add_argument("--write", action="store_true", help="write the golden file and the page")
    given = parser.parse_args()
    simulated_server = SimulatedServer(*SIMULATED_FLAGS)
    try:
        simulated = asyncio.run(observe(simulated_server.url))
    finally:
        simulated_server.stop()
    with _real_engine() as url:
        real = asyncio.run(observe(url))
    old = read_golden() if GOLDEN.exists() else {}
    new = merged(old, real, simulated)
    for title, row in new.items():
        if row != old.get(title):
            sys.stdout.write(f"{title}\n")
            sys.stdout.writelines(f"  {name:9} {row[name]}\n" for name in ("real", "simulated", "why"))
    if given.write:
        GOLDEN.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(table(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
