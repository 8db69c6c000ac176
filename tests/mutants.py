"""Breaks the core on purpose, one invariant at a time, and runs the tests that must notice.

    python -m tests.mutants [-k WORD] [--list]

Each mutant is one change of one place, in a copy of the tree; the working tree is never touched. One that no
test notices lives: the exit status is 1 then. `tests/unit/test_mutants.py` checks that every place is still
there, so a mutant cannot rot unseen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("hybridsched", "tests", "policies", "slurm", "workers", "docs", "pyproject.toml", "README.md")
PATIENCE_S = 240.0


class Mutant(NamedTuple):
    """One broken invariant."""

    name: str
    path: str
    """Below the project's root."""
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """What must fail; pytest's arguments."""


IDLE = ("tests/unit/test_core_idle.py", "tests/unit/test_core_decide.py", "tests/property/test_policies.py")
GATE = ("tests/unit/test_core_gate.py", "tests/property/test_gate_machine.py")
LANE = ("tests/unit/test_core_lane.py", "tests/property/test_lane_machine.py")
FILL = ("tests/unit/test_core_fill.py", "tests/property/test_fill_machine.py")
REPLICAS = ("tests/unit/test_core_replicas.py", "tests/property/test_replicas_machine.py")
SWITCH = ("tests/property/test_switch_machine.py",)
QUEUE = ("tests/property/test_online_queue_machine.py", "tests/contract/test_store_online_scripts.py")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a stale number counts as known",
        "hybridsched/core/values.py",
        "if value is None or age is None or not 0.0 <= age <= max_age_ms or value - value != 0.0:",
        "if value is None or age is None or value - value != 0.0:",
        IDLE,
    ),
    Mutant(
        "a number that is none (NaN) counts as known",
        "hybridsched/core/values.py",
        "if value is None or age is None or not 0.0 <= age <= max_age_ms or value - value != 0.0:",
        "if value is None or age is None or not 0.0 <= age <= max_age_ms:",
        IDLE,
    ),
    Mutant(
        "a frozen engine opens",
        "hybridsched/core/idle.py",
        "if frozen >= policy.frozen_after_ms:",
        "if frozen < 0.0:",
        IDLE,
    ),
    Mutant(
        "online in flight is overlooked",
        "hybridsched/core/idle.py",
        "    if online > 0:\n",
        "    if online > 1:\n",
        IDLE,
    ),
    Mutant(
        "a gate that online closed opens on a record from before",
        "hybridsched/core/idle.py",
        "    if recorded_ms > gate.at_ms:\n",
        "    if recorded_ms <= gate.at_ms:\n",
        IDLE,
    ),
    Mutant(
        "an unknown queue is an empty one",
        "hybridsched/core/idle.py",
        '        return _no(Reason.QUEUE_UNKNOWN, {"queue_depth": None, "model": model})\n',
        "        return None\n",
        IDLE,
    ),
    Mutant(
        "foreign requests count as our own",
        "hybridsched/core/idle.py",
        "    return max(0.0, held - _offline_bound(replica, lane, policy))\n",
        "    return 0.0\n",
        IDLE,
    ),
    Mutant(
        "the idle window is not waited for",
        "hybridsched/core/idle.py",
        "    if idle_for < policy.window_ms:\n",
        "    if idle_for < 0.0:\n",
        IDLE,
    ),
    Mutant(
        "the floor is ignored",
        "hybridsched/core/decide.py",
        "        if len(taken) < allowed:\n",
        "        if True:\n",
        IDLE,
    ),
    Mutant(
        "the floor counts engines whose health is not known",
        "hybridsched/core/decide.py",
        "        if view.engine_healthy.known(age) and (view.engine_healthy.value or 0.0) >= 1.0\n",
        "        if True\n",
        IDLE,
    ),
    Mutant(
        "a hold is ignored",
        "hybridsched/core/decide.py",
        "        if hold.stands(snapshot.now_ms):\n",
        "        if False:\n",
        IDLE,
    ),
    Mutant(
        "a policy that may only suggest opens",
        "hybridsched/core/decide.py",
        "    if policy.autonomy is not Autonomy.AUTO:\n",
        "    if False:\n",
        IDLE,
    ),
    Mutant(
        "an opening of an older epoch is believed",
        "hybridsched/core/gate.py",
        "    if gate.epoch < seat.epoch:\n        return seat, (_refused(",
        "    if False:\n        return seat, (_refused(",
        GATE,
    ),
    Mutant(
        "an open gate outlives its lease",
        "hybridsched/core/gate.py",
        "        return self.state is SeatState.OPEN and at_ms < self.until_ms\n",
        "        return self.state is SeatState.OPEN\n",
        GATE,
    ),
    Mutant(
        "a lane opens on an older epoch",
        "hybridsched/core/lane.py",
        "    if state.stopping or gate.epoch < state.epoch:\n",
        "    if state.stopping:\n",
        LANE,
    ),
    Mutant(
        "a lane that stops opens again",
        "hybridsched/core/lane.py",
        "    if state.stopping or gate.epoch < state.epoch:\n",
        "    if gate.epoch < state.epoch:\n",
        LANE,
    ),
    Mutant(
        "a pause stops an engine that online uses too",
        "hybridsched/core/lane_values.py",
        "        return self.own and Rung.ITERATION in self.ladder and not self.cannot_hold\n",
        "        return Rung.ITERATION in self.ladder and not self.cannot_hold\n",
        LANE,
    ),
    Mutant(
        "an engine that has slept gets work without a check",
        "hybridsched/core/lane.py",
        "    check = state.unproven or (state.sleeps and not state.proved)\n",
        "    check = state.sleeps and not state.proved\n",
        LANE,
    ),
    Mutant(
        "work that was told to end is not ended",
        "hybridsched/core/lane.py",
        "    out: tuple[Instruction, ...] = (AbortInflight(pause=state.pause),)\n",
        "    out: tuple[Instruction, ...] = ()\n",
        LANE,
    ),
    Mutant(
        "offline fills online's sequence slots",
        "hybridsched/core/admission.py",
        "    return max(0, max_num_seqs - slots_for_online - online_inflight)\n",
        "    return max(0, max_num_seqs - online_inflight)\n",
        ("tests/unit/test_core_admission.py",),
    ),
    Mutant(
        "an unknown KV cache is room",
        "hybridsched/core/admission.py",
        "            return Admission(ok=False, reason=Denial.CAPACITY_UNKNOWN)\n",
        "            return Admission(ok=True, slots_left=1)\n",
        ("tests/unit/test_core_admission.py",),
    ),
    Mutant(
        "query heads are counted in place of KV heads",
        "hybridsched/core/admission.py",
        "    return 2 * model.layers * model.kv_heads * model.head_dim * model.kv_bytes\n",
        "    return 2 * model.layers * 4 * model.kv_heads * model.head_dim * model.kv_bytes\n",
        ("tests/unit/test_core_admission.py",),
    ),
    Mutant(
        "Slurm's floor is ignored",
        "hybridsched/core/fill.py",
        "    room = max(0, len(view.lanes) - view.floor)\n",
        "    room = len(view.lanes)\n",
        FILL,
    ),
    Mutant(
        "an old reading of a node steers its count",
        "hybridsched/core/fill.py",
        "view.now_ms - node.seen_ms > policy.max_age_ms:\n        return 0, FillWhy.LIVE_UNKNOWN",
        "False:\n        return 0, FillWhy.LIVE_UNKNOWN",
        FILL,
    ),
    Mutant(
        "a job is requeued before its time",
        "hybridsched/core/fill.py",
        "    if view.now_ms - job.started_ms < policy.requeue_after_ms:\n",
        "    if False:\n",
        FILL,
    ),
    Mutant(
        "a request is run after its deadline",
        "hybridsched/store/lua/claim.lua",
        "      elseif tonumber(fields.deadline_ms) <= now then\n",
        "      elseif false then\n",
        QUEUE,
    ),
    Mutant(
        "a deadline is compared with another clock",
        "hybridsched/store/lua/claim.lua",
        "      elseif tonumber(fields.deadline_ms) <= now then\n",
        "      elseif tonumber(fields.deadline_ms) <= now - 3600000 then\n",
        QUEUE,
    ),
    Mutant(
        "a claim leaves the gate open",
        "hybridsched/store/lua/claim.lua",
        "if live > 0 and ARGV[12] == '1' then\n",
        "if false then\n",
        QUEUE,
    ),
    Mutant(
        "somebody else's answer counts",
        "hybridsched/store/lua/finish.lua",
        "  if not held_by(keys.stream, entry, consumer, 0) then\n",
        "  if false then\n",
        QUEUE,
    ),
    Mutant(
        "a replica leaves before its successor serves",
        "hybridsched/core/replicas.py",
        "        for job in elders[: max(0, len(elders) - needed)]:\n",
        "        for job in elders:\n",
        REPLICAS,
    ),
    Mutant(
        "more replicas than the surge allows",
        "hybridsched/core/replicas.py",
        "    n = min(missing, room)\n",
        "    n = missing\n",
        REPLICAS,
    ),
    Mutant(
        "more hosts change at once than the policy allows",
        "hybridsched/core/switch.py",
        "        if len(away) >= self.policy.max_unavailable:\n",
        "        if False:\n",
        SWITCH,
    ),
    Mutant(
        "a change of mode breaks online's floor",
        "hybridsched/core/switch_floor.py",
        "    return tuple(lack for lack in found if min(lack.serving, lack.wanted) < lack.floor)\n",
        "    return tuple(lack for lack in found if False)\n",
        SWITCH,
    ),
    Mutant(
        "a pack order outlives its lease",
        "hybridsched/core/values.py",
        "        return 0.0 <= now_ms - self.at_ms <= lease_ms\n",
        "        return True\n",
        (
            "tests/unit/test_core_packing.py",
            "tests/unit/test_core_decide.py",
            "tests/property/test_policies.py",
        ),
    ),
)


def problem(mutant: Mutant) -> str:
    """Why a mutant cannot be made; empty when it can."""
    text = (ROOT / mutant.path).read_text()
    found = text.count(mutant.old) if mutant.old else 0
    return "" if found == 1 else f"its place stands {found} times in {mutant.path}"


def lives(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests pass with the mutant in `tree`, which is as before afterwards."""
    path = tree / mutant.path
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main(words: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "-k", dest="word", default="", help="only mutants with this word in their name or path"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    asked = parser.parse_args(words)
    chosen = [m for m in MUTANTS if asked.word in m.name or asked.word in m.path]
    if asked.list:
        print("\n".join(f"{m.path}: {m.name}" for m in chosen))
        return 0
    if not chosen:
        parser.error(f"no mutant has {asked.word!r} in its name or path; --list shows them")
    alive = 0
    with tempfile.TemporaryDirectory(prefix="hs-mutants-") as folder:
        tree = Path(folder)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / part)
        for mutant in chosen:
            began = time.monotonic()
            survived = lives(mutant, tree)
            alive += survived
            word = "LIVES" if survived else "noticed"
            print(f"{word:8}{time.monotonic() - began:6.1f} s  {mutant.path}: {mutant.name}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
