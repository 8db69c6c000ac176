"""A day of the calendar in minutes: four hosts of a real Slurm, two modes, a day's trace, batches that wait.

The calendar's clock runs `SPEED` times faster than the wall. The evening, the night and the day after take as
long as `SPANS_S` says; the trace's hours are stretched to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.hands import CommandHands
from hybridsched.core.calendar import Durations
from hybridsched.core.modes import ModesPolicy, Window
from hybridsched.core.switch_values import Step
from hybridsched.store.connection import async_client
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyStore
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.policy import PolicyWorker
from hybridsched.workers.policy_modes_acts import layout
from hybridsched.workers.policy_slurm import SlurmSide
from tests.integration.modes_rig import (
    HAND,
    ROOT,
    SLURM,
    WHOLE,
    ModesPool,
    ModesTestbed,
    two_modes,
    windows,
)
from tests.integration.online_rig import MODEL, POOL, Service
from tests.integration.policy_pool import policy
from tests.nvml_double import Double, build

HOSTS = 4
SPEED = 3.0
MINUTE_S = 60.0 / SPEED
"""One minute of the calendar, on the wall."""

EVENING, NIGHT, DAY = 1, 6, 1
"""How long each lasts, in minutes of the calendar."""

STARTS = datetime(2026, 11, 30, 21, 59, tzinfo=UTC)
TRACE = Path(__file__).resolve().parent.parent / "data" / "servegen_day.csv"
HOURS = ((0.0, 3.0), (3.0, 12.0), (12.0, 24.0))
"""Hours of the trace, from 19:00, that belong to each."""

LINES = 24
SETTLE_S = 120.0
"""After the day: until the switch that is under way must have ended."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one moment."""

    at_s: float
    """Since the day's start, wall clock."""
    serving: int
    states: dict[str, str]
    """Host -> `MODE STEP`."""


class DayReport(msgspec.Struct, kw_only=True):
    """What came of the day."""

    floor: int
    samples: list[Sample] = msgspec.field(default_factory=list)
    nodes: set[str] = msgspec.field(default_factory=set)
    """Every state that a node was seen in."""
    online: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests of the trace by how they ended."""
    batches: dict[int, str] = msgspec.field(default_factory=dict)
    """Job -> its state at the end."""
    answers: dict[int, int] = msgspec.field(default_factory=dict)
    """Job -> lines of its batch that were answered."""
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    night_s: float = 0.0
    day_s: float = 0.0
    """When the windows began."""
    late_said_s: float | None = None
    """When it was first said that the day would be late."""
    day_served_s: float | None = None
    """When every host served by day again."""
    cut: dict[str, str] = msgspec.field(default_factory=dict)
    """Host -> in what its GPUs differ from its mode's layout at the end."""
    parts: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)

    def least(self) -> int:
        """The fewest replicas that served at once, from when the pool had come up."""
        up = next(i for i, sample in enumerate(self.samples) if sample.serving >= HOSTS)
        return min(sample.serving for sample in self.samples[up:])

    def timeline(self) -> list[str]:
        """One line for each change of a host."""
        lines, before = [], dict[str, str]()
        for sample in self.samples:
            for host, state in sample.states.items():
                if before.get(host) != state:
                    lines.append(f"{sample.at_s:7.1f} s  {host}  {state:<22} {sample.serving} serve")
                    before[host] = state
        return lines


def day_modes() -> ModesPolicy:
    """By day slices without lanes, at night whole GPUs with them."""
    modes = two_modes(HOSTS, max_unavailable=2, act_ms=120_000.0, drain_ms=120_000.0)
    night = Window(start="22:00", end=f"22:{NIGHT:02d}")
    modes = windows(modes, night=night, day=Window(start=night.end, end=night.start))
    engines = [
        msgspec.structs.replace(mode.engines[0], floor=1, warm_ms=75_000.0, time_limit_s=86_400)
        for mode in modes.mode
    ]
    return msgspec.structs.replace(
        modes,
        mode=tuple(
            msgspec.structs.replace(mode, engines=(engine,), lanes=mode.name == "night")
            for mode, engine in zip(modes.mode, engines, strict=True)
        ),
    )


def measured_before() -> Durations:
    """What a pool that has switched before would know, in ms of the calendar's clock."""
    known = Durations()
    for kind, s in (("drain night", 4.0), ("cut day", 1.0), ("slurm day", 3.0), ("load day", 10.0)):
        known = known.with_span(kind, s * 1000.0 * SPEED)
    return known


def arrivals() -> list[tuple[float, int, int]]:
    """When each request comes (s since the day's start) and how long it is (tokens, in and out)."""
    spans = [EVENING * MINUTE_S, NIGHT * MINUTE_S, DAY * MINUTE_S]
    found = []
    for row in csv.DictReader(TRACE.read_text(encoding="utf-8").splitlines()):
        hour = float(row["arrival_s"]) / 3600.0
        at = 0.0
        for (first, last), span_s in zip(HOURS, spans, strict=True):
            if hour < last:
                at += (hour - first) / (last - first) * span_s
                break
            at += span_s
        found.append((at, min(512, int(row["prompt_tokens"])), min(64, int(row["output_tokens"]))))
    return found


class Day:
    """The day as it runs."""

    def __init__(self, pool: ModesPool, clock: Clock) -> None:
        self.pool, self.clock = pool, clock
        self.report = DayReport(floor=1)
        self.report.night_s = EVENING * MINUTE_S
        self.report.day_s = (EVENING + NIGHT) * MINUTE_S

    async def watch(self) -> None:
        """Twice a second: who serves, where each host stands; every other second what Slurm says."""
        looks = 0
        while True:
            serving = await self.pool.serving()
            hosts = (await self.pool.state()).hosts
            said = await self.pool.client.get(Keys(POOL).mode_status)
            late = b"late: " in (said or b"")
            at = self.clock.at_s
            if late and self.report.late_said_s is None and at < self.report.day_s:
                self.report.late_said_s = at
            states = {name: f"{host.mode} {host.step.value}" for name, host in sorted(hosts.items())}
            self.report.samples.append(Sample(at_s=at, serving=len(serving), states=states))
            by_day = [h for h in hosts.values() if h.mode == "day" and h.step is Step.SERVING]
            back = at > self.report.night_s + MINUTE_S and len(by_day) == HOSTS and len(serving) >= HOSTS
            if back and self.report.day_served_s is None:
                self.report.day_served_s = at
            if looks % 4 == 0:
                shown = await asyncio.to_thread(self.pool.slurm.states)
                self.report.nodes |= set(shown.values())
            looks += 1
            await asyncio.sleep(0.5)

    async def online(self, service: Service) -> None:
        """The trace, and how each of its requests ended."""
        asked = []
        for at, prompt, tokens in arrivals():
            await asyncio.sleep(max(0.0, at - self.clock.at_s))
            asked.append(await service.ask(prompt=prompt, tokens=tokens, stream=False, timeout_ms=60_000))
        for request in asked:
            end = await service.end(request, timeout_s=90)
            self.report.online[end.status] = self.report.online.get(end.status, 0) + 1

    async def batches(self) -> list[tuple[int, Path]]:
        """Three short ones, queued in the evening."""
        folder = self.pool.slurm.state / "batches"
        folder.mkdir(exist_ok=True)
        out = self.pool.slurm.state / "out"
        out.mkdir(exist_ok=True, mode=0o1777)
        made = []
        for n in range(3):
            source = folder / f"{self.clock.began:.0f}-{n}.jsonl"
            body = {"model": MODEL, "prompt": [1, 2, 3 + n], "max_tokens": 32, "ignore_eos": True}
            lines = [
                {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
                for i in range(LINES)
            ]
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            given = [f"{key}={self.pool.environment[key]}" for key in ("HYBRIDSCHED_BIN", "PYTHONPATH")]
            said = await asyncio.to_thread(
                self.pool.slurm.run,
                *("env", *given, f"HYBRIDSCHED_REDIS_URL={self.pool.url}", f"HYBRIDSCHED_POOL={POOL}"),
                *("sbatch", "--parsable", f"--output={out}/%j.out"),
                *(str(ROOT / "workers" / "offline.sbatch"), str(source)),
            )
            made.append((int(said.strip()), source))
        return made

    async def run(self) -> DayReport:
        report = self.report
        service = Service(self.pool.url)
        watching = asyncio.create_task(self.watch(), name="watch")
        try:
            await self.up()
            self.clock.start()
            report.samples.clear()
            jobs = await self.batches()
            await self.online(service)
            deadline = time.monotonic() + SETTLE_S
            while time.monotonic() < deadline and report.day_served_s is None:
                await asyncio.sleep(0.5)
            for job, source in jobs:
                report.batches[job] = self.pool.slurm.job(job).get("JobState", "forgotten")
                answers = source.with_name(source.name.replace(".jsonl", ".output.jsonl"))
                report.answers[job] = len(answers.read_text().splitlines()) if answers.exists() else 0
        finally:
            await end_tasks(watching)
            await service.close()
        report.events = await self.pool.events("mode", "mode_act", "slurm")
        report.cut = {host: await self.cut(host) for host in self.pool.slurm.nodes}
        report.parts = parts_of(report.events)
        return report

    async def cut(self, host: str) -> str:
        """Empty: a host's GPUs are cut as its mode wants it. Else what `hybridsched mode assert` says."""
        mode = (await self.pool.state()).hosts[host].mode
        hands = CommandHands(HAND, environment=self.pool.environment)
        return await hands.differs(host, layout(day_modes(), mode))

    async def up(self) -> None:
        """Until the pool serves by day. The calendar stands still meanwhile."""
        deadline = time.monotonic() + 120
        while len(await self.pool.serving()) < HOSTS:
            assert time.monotonic() < deadline, "the pool did not come up"
            await asyncio.sleep(0.2)


class Clock:
    """The calendar's: it stands at the day's start until it is started."""

    def __init__(self) -> None:
        self.began = time.time()
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.monotonic()

    @property
    def at_s(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def ms(self) -> float:
        return (STARTS.timestamp() + self.at_s * SPEED) * 1000.0


def parts_of(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Host and change -> seconds out of service, and what of them was needed: the acts' own time, the jobs'
    way out from their signal, and the way from a replica's submission to the end of warming."""
    found: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    marks: dict[str, dict[str, float]] = {}
    submitted = [e["mono_s"] for e in events if e["t"] == "slurm" and e.get("act") == "submit"]
    for event in events:
        host = event.get("host")
        if host is None:
            continue
        at = event["mono_s"]
        if event["t"] == "mode":
            if event["step"] == "draining" and not event["back"]:
                names[host] = f"{host} {event['mode']} to {event['goal']}"
                marks[host] = {"draining": at}
                found[names[host]] = {"acts": 0.0}
            if host not in names:
                continue
            marks[host][event["step"]] = at
            row = found[names[host]]
            if event["step"] == "empty":
                row["leave"] = at - marks[host].get("told", at)
            if event["step"] == "serving":
                began = min((s for s in submitted if s >= marks[host].get("warming", at) - 1.0), default=at)
                row["load"] = max(0.0, at - began)
                row["away"] = at - marks[host]["draining"]
                names.pop(host)
        elif event["t"] == "mode_act" and host in names:
            if event["act"] == "tell_job":
                marks[host].setdefault("told", at)
            else:
                found[names[host]]["acts"] += event["took_s"]
    return {name: row for name, row in found.items() if "away" in row}


@asynccontextmanager
async def day_of(slurm: ModesTestbed, url: str, folder: Path) -> AsyncIterator[Day]:
    """The pool with its policy worker in this process, on the calendar's own clock."""
    clock = Clock()
    client = async_client(url)
    modes = day_modes()
    given = msgspec.structs.replace(SLURM, stop_ms=30_000.0)
    await PolicyStore(client, POOL).set(policy(slurm=given, modes=modes))
    await client.set(Keys(POOL).mode_durations, msgspec.json.encode(measured_before()))
    pool = ModesPool(slurm, client, url, folder)
    # What the hand cuts: the real nvidia-ml-py on its test double, one state file for each host.
    pool.environment["LD_LIBRARY_PATH"] = str(build())
    for host in slurm.nodes:
        state = slurm.state / "mig" / f"{host}.nvml"
        state.parent.mkdir(exist_ok=True)
        Double(state).new(["h100-80gb"] * WHOLE)
    side = SlurmSide(
        url,
        POOL,
        scripts=ROOT,
        cluster=lambda: CommandCluster(environment=pool.environment),
        hands=CommandHands(HAND, environment=pool.environment),
        clock_ms=clock.ms,
    )
    worker = PolicyWorker(client, POOL, slurm=side)
    stop = asyncio.Event()
    with contextlib.chdir(folder):  # where the replicas' jobs write
        task = asyncio.create_task(worker.run(stop))
        try:
            yield Day(pool, clock)
        finally:
            stop.set()
            await asyncio.wait_for(task, 20)
            await asyncio.to_thread(side.end)
            await asyncio.to_thread(slurm.by_day)
            shutil.rmtree(slurm.state / "mig")
            await client.aclose()


def invalid(states: set[str]) -> set[str]:
    """Node states that no node may ever be in."""
    return {state for state in states if re.search("inval|fail|error", state)}
