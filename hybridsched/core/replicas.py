"""Online replicas as Slurm jobs: how many are wanted, what is there, what to do about the difference.

`step(fleet, seen, policy)` after each look at Slurm gives a new state and instructions; `note` feeds back
what came of each. Never more jobs than `count + surge` of a group come to be by us. A job *lasts* when it
counts for the time to come: it is not about to reach its time limit, not silent, started with what the policy
says now. Successors of those that do not last are submitted within the surge, and when a successor serves,
its elder is told to stop.

What is not known for certain is remembered: a submission without an answer counts as a job until Slurm, asked
again, has had time to show it. Groups that die soon after their start wait longer and longer.
"""

from __future__ import annotations

import math

import msgspec

from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import (
    MOVED,
    Cancel,
    Drain,
    Fleet,
    Instruction,
    Life,
    Move,
    Order,
    Phase,
    Result,
    Seen,
    SeenJob,
    Stop,
    Submit,
    Trouble,
    Withheld,
    digest,
)

EARLY_S = 60
"""Slurm may send a job's signal up to this long before its time (sbatch(1), --signal)."""

SETTLE_MS = 15_000.0
"""A submission of unknown fate is given up this long after Slurm answered again without showing it."""

ACT_AGAIN_MS = 30_000.0
"""What was asked of Slurm and does not show is asked again after this."""

STEADY_MS = 60_000.0
"""A replica that has served this long was no failure to start."""

BACK_OFF_MS = (5_000.0, 300_000.0)
"""First and longest wait after a quick death; it doubles in between."""

GAP_MS = 30_000.0
"""After a break in looking as long as this, silence is counted anew."""

LAST_RESORT = 5
"""Silence of this many times the limit ends a job also when nothing shows that telemetry works."""

WARM_PATIENCE = 3
"""A replica that has never served is silent after this many times its `warm_ms`."""


def shortest_limit_s(wanted: ReplicasPolicy, policy: SlurmPolicy) -> int:
    """The least time limit with which every replica serves long enough for the successors of all to warm up,
    and as long as its own start and notice take: a place is then replaced about twice within a time limit."""
    overhead_ms = _lead_ms(policy) + wanted.warm_ms
    serves_ms = max(_waves_ms(_waves(wanted.count, wanted), wanted, _wave_ms(wanted, policy)), overhead_ms)
    return math.ceil((overhead_ms + serves_ms) / 1000.0)


def _lead_ms(policy: SlurmPolicy) -> float:
    """How long before its time limit a job's signal may come: its successor serves by then."""
    return (policy.notice_s + EARLY_S) * 1000.0


def _waves(jobs: int, wanted: ReplicasPolicy) -> int:
    """How often `surge` successors must warm up for that many jobs to be replaced."""
    return math.ceil(max(jobs, 1) / wanted.surge)


def _wave_ms(wanted: ReplicasPolicy, policy: SlurmPolicy) -> float:
    """From one wave to the next where there is time: successors warm up, then elders must go."""
    return wanted.warm_ms + policy.stop_ms


def _waves_ms(waves: int, wanted: ReplicasPolicy, wave_ms: float) -> float:
    """How long that many waves take, one each `wave_ms`; nobody waits for the last one's elders."""
    return wanted.warm_ms + (waves - 1) * wave_ms


def step(fleet: Fleet, seen: Seen, policy: SlurmPolicy) -> tuple[Fleet, tuple[Instruction, ...]]:
    """One look at Slurm. Raises nothing for any input."""
    groups = {wanted.group: wanted for wanted in policy.replicas}
    fleet = _settle_orders(fleet, seen)
    fleet = _follow(fleet, seen, policy, groups)
    lives = {life.job: life for life in fleet.lives}
    witnessed = any(job.serving for job in seen.jobs)
    out: list[Instruction] = []
    names = list(groups) + sorted({job.group for job in seen.jobs} - set(groups))
    for name in names:
        live = (Phase.PENDING, Phase.RUNNING)
        jobs = [j for j in seen.jobs if j.group == name and j.phase in live and not j.going]
        wanted = groups.get(name) or ReplicasPolicy(model="", name=name, count=0)
        move = next((move for move in seen.moves if move.group == name), None)
        group = _Group(wanted, policy, seen.at_ms, jobs, lives, witnessed=witnessed, move=move)
        acts = group.dismissals()
        fleet, submits = _submissions(fleet, group)
        out += [*acts, *submits]
    fleet = _remember(fleet, out, seen.at_ms)
    fleet, drains = _drains(fleet, seen, policy)
    return msgspec.structs.replace(fleet, seen_ms=seen.at_ms), tuple(out + drains)


def note(fleet: Fleet, instruction: Instruction, result: Result) -> Fleet:
    """What came of an instruction of the last step."""
    match instruction:
        case Submit(group=group, token=token):
            return _note_submit(fleet, group, token, result)
        case Drain(job=job) if result.ok:
            return msgspec.structs.replace(fleet, settled=(*fleet.settled, job))
        case Stop(job=job) if not result.ok and result.sure:
            lives = tuple(
                msgspec.structs.replace(life, stop_ms=None) if life.job == job else life
                for life in fleet.lives
            )
            return msgspec.structs.replace(fleet, lives=lives)
        case _:
            return fleet


def _note_submit(fleet: Fleet, group: str, token: str, result: Result) -> Fleet:
    if not result.ok and result.sure:
        orders = tuple(order for order in fleet.orders if order.token != token)
        fleet = msgspec.structs.replace(fleet, orders=orders)
        return _died(fleet, group, result.at_ms, f"it could not be submitted: {result.error}")
    change = {"job": result.job, "at_ms": result.at_ms} if result.ok else {"unsure_ms": result.at_ms}
    orders = tuple(
        msgspec.structs.replace(order, **change) if order.token == token else order for order in fleet.orders
    )
    return msgspec.structs.replace(fleet, orders=orders)


# -- what has changed since the last look -------------------------------------------------------------------


def _settle_orders(fleet: Fleet, seen: Seen) -> Fleet:
    """Drop the orders whose jobs are seen, or will not be."""
    tokens, ids = {job.token: job for job in seen.jobs}, {job.job: job for job in seen.jobs}
    kept: list[Order] = []
    lost: list[Order] = []
    for order in fleet.orders:
        job = tokens.get(order.token) or ids.get(order.job or 0)
        if job is not None:
            if job.phase in (Phase.LEAVING, Phase.ENDED):
                lost.append(order)
            continue
        if order.job is not None:
            # Slurm named its number before this look began and does not show it: it has come and gone.
            (kept if seen.at_ms <= order.at_ms else lost).append(order)
            continue
        unsure = order.unsure_ms if order.unsure_ms is not None else order.at_ms
        if seen.at_ms <= unsure:
            kept.append(order)
            continue
        looked = seen.at_ms if order.looked_ms is None else order.looked_ms
        if seen.at_ms - looked < SETTLE_MS:
            kept.append(msgspec.structs.replace(order, looked_ms=looked))
    fleet = msgspec.structs.replace(fleet, orders=tuple(kept))
    for order in lost:
        fleet = _died(fleet, order.group, seen.at_ms, "its job ended at once")
    return fleet


def _follow(fleet: Fleet, seen: Seen, policy: SlurmPolicy, groups: dict[str, ReplicasPolicy]) -> Fleet:
    """Carry on the lives of jobs that are there; note the deaths of those that are not."""
    known = {life.job: life for life in fleet.lives}
    broken = fleet.seen_ms is None or seen.at_ms - fleet.seen_ms > GAP_MS
    lives: list[Life] = []
    recovered: set[str] = set()
    for job in seen.jobs:
        if job.going:
            known.pop(job.job, None)  # its end is no death
            continue
        if job.phase not in (Phase.PENDING, Phase.RUNNING):
            continue
        life = known.pop(job.job, None) or Life(job=job.job, group=job.group)
        silent = life.silent_ms
        if job.phase is Phase.PENDING or job.serving is not False:
            silent = None
        elif silent is None or broken:
            silent = seen.at_ms
        served = life.served_ms
        if job.serving and served is None:
            served = seen.at_ms
        if job.serving and served is not None and seen.at_ms - served >= STEADY_MS:
            recovered.add(job.group)
        ends = job.ends_ms
        lives.append(msgspec.structs.replace(life, ends_ms=ends, silent_ms=silent, served_ms=served))
    troubles = tuple(t for t in fleet.troubles if t.group not in recovered)
    fleet = msgspec.structs.replace(fleet, lives=tuple(lives), troubles=troubles)
    margin = _lead_ms(policy)
    for life in known.values():
        if life.dismissed or life.group not in groups:
            continue
        if life.ends_ms is not None and seen.at_ms >= life.ends_ms - margin:
            continue  # its time was over
        steady = life.served_ms is not None and seen.at_ms - life.served_ms >= STEADY_MS
        if not steady:
            fleet = _died(fleet, life.group, seen.at_ms, f"job {life.job} ended soon after its start")
    return fleet


def _died(fleet: Fleet, group: str, at_ms: float, why: str) -> Fleet:
    """Note a quick death. Several during one wait count as one: they have one cause."""
    old = next((t for t in fleet.troubles if t.group == group), None)
    if old is not None and at_ms < old.until_ms:
        new = msgspec.structs.replace(old, last=why)
    else:
        deaths = 1 if old is None else old.deaths + 1
        wait = min(BACK_OFF_MS[0] * 2.0 ** min(deaths - 1, 16), BACK_OFF_MS[1])
        new = Trouble(group=group, deaths=deaths, until_ms=at_ms + wait, last=why)
    others = tuple(t for t in fleet.troubles if t.group != group)
    return msgspec.structs.replace(fleet, troubles=(*others, new))


# -- one group ----------------------------------------------------------------------------------------------


class _Group:
    """The jobs of one group, sorted by what they are worth."""

    def __init__(
        self,
        wanted: ReplicasPolicy,
        policy: SlurmPolicy,
        at_ms: float,
        jobs: list[SeenJob],
        lives: dict[int, Life],
        *,
        witnessed: bool,
        move: Move | None,
    ) -> None:
        self.wanted, self.at_ms, self.jobs = wanted, at_ms, jobs
        self._policy, self._lives, self._witnessed = policy, lives, witnessed
        self.spec = digest(wanted)
        staying = [job for job in jobs if not lives[job.job].dismissed]
        due = self._due([job for job in staying if job.phase is Phase.RUNNING])
        self.stuck = [job for job in staying if job.stuck]
        self.outdated = [job for job in staying if not job.stuck and job.spec != self.spec]
        fit = [job for job in staying if not job.stuck and job.spec == self.spec]
        self.silent = [job for job in fit if self._silent_for(job) > self._patience(job)]
        fit = [job for job in fit if job not in self.silent]
        self.move = move
        away = frozenset[str]() if move is None else frozenset(move.nodes)
        self.astray = [job for job in fit if job.kept_off and not (away and away <= set(job.excluded))]
        self.off = [job for job in fit if job.kept_off and job not in self.astray]
        fit = [job for job in fit if not job.kept_off]
        here = [job for job in fit if job.phase is Phase.RUNNING and not away.isdisjoint(job.nodes)]
        here.sort(key=lambda job: (job.ends_ms or math.inf, job.job))
        self.moving = here[: move.count] if move is not None else []
        self.due = [job for job in fit if job.job in due or job in self.moving]
        self.lasting = [job for job in fit if job not in self.due]
        self.coming = [
            job
            for job in self.lasting
            if job.phase is Phase.RUNNING and not job.serving and away.isdisjoint(job.nodes)
        ]
        self.unproved = [job for job in staying if lives[job.job].served_ms is None]

    def _due(self, running: list[SeenJob]) -> frozenset[int]:
        """Jobs whose successors must be started now, for each to be warm in time.

        Only `surge` successors warm up at once, so those that end together are replaced in waves, and the
        first wave must begin early enough for the last. Waves come no further apart than leaves room for
        one of each place between a job's start and its successor's: else the newest job, which ends soon
        after its elders, would make the oldest due again and again.
        """
        wanted = self.wanted
        lead = _lead_ms(self._policy)
        round_ms = wanted.time_limit_s * 1000.0 - lead - wanted.warm_ms
        room_ms = round_ms / _waves(wanted.count, wanted)
        wave_ms = min(_wave_ms(wanted, self._policy), max(room_ms, wanted.warm_ms))
        timed = sorted((job.ends_ms, job.job) for job in running if job.ends_ms is not None)
        due: set[int] = set()
        for i, (_, number) in enumerate(timed):
            start = min(
                end - lead - _waves_ms(_waves(j - i + 1, wanted), wanted, wave_ms)
                for j, (end, _) in enumerate(timed)
                if j >= i
            )
            if self.at_ms >= start:
                due.add(number)
        return frozenset(due)

    def _silent_for(self, job: SeenJob) -> float:
        since = self._lives[job.job].silent_ms
        return 0.0 if since is None else self.at_ms - since

    def _patience(self, job: SeenJob) -> float:
        patience = self._policy.silent_ms
        if self._lives[job.job].served_ms is None:
            patience = max(patience, WARM_PATIENCE * self.wanted.warm_ms)
        return patience

    def dismissals(self) -> list[Stop | Cancel]:
        """Which jobs should go, and how."""
        out: list[Stop | Cancel] = []
        for job in self.jobs:
            out += self._overdue(job)
        out += [self._cancel(job, "Slurm could not launch it and holds it") for job in self.stuck]
        out += [self._cancel(job, "it waits for a node off a host that stays") for job in self.astray]
        # Out of date and of no use yet: gone at once. Those that serve wait for their successors.
        out += [self._cancel(job, "the policy changed") for job in self.outdated if not job.serving]
        serving = [job for job in self.lasting if job.serving]
        needed = max(0, self.wanted.count - len(serving))
        elders = [job for job in [*self.outdated, *self.due] if job.serving]
        elders.sort(key=lambda job: (job.spec == self.spec, job.ends_ms or math.inf, job.job))
        for job in elders[: max(0, len(elders) - needed)]:
            why = "the policy changed" if job.spec != self.spec else "its time limit is near"
            why = "its host is to change its mode" if job in self.moving else why
            out.append(self._stop(job, f"{why} and enough others serve"))
        out += self._silences(needed)
        return out + self._surplus()

    def _overdue(self, job: SeenJob) -> list[Stop | Cancel]:
        """A job that was told to stop, or cancelled, and is still there."""
        life = self._lives[job.job]
        if life.cancel_ms is not None:
            if self.at_ms - life.cancel_ms >= ACT_AGAIN_MS:
                return [self._cancel(job, "it was cancelled before and is still there")]
        elif life.stop_ms is not None and self.at_ms - life.stop_ms >= self._policy.stop_ms:
            return [self._cancel(job, "it did not end in time after it was told to stop")]
        return []

    def _silences(self, needed: int) -> list[Stop | Cancel]:
        """Silent jobs go when others do the work. Else their GPUs are needed for successors, and they go one
        at a time; were it telemetry that failed, all replicas would be silent at once."""
        gone = self.silent
        if needed:
            times = 2 if self._witnessed else LAST_RESORT
            gone = [job for job in gone if self._silent_for(job) > times * self._patience(job)][:1]
        return [self._cancel(job, "it runs and does not serve") for job in gone]

    def _surplus(self) -> list[Stop | Cancel]:
        """More than wanted: those that cost least to lose go first."""
        ranked = sorted(
            self.lasting,
            key=lambda job: (
                job.phase is Phase.RUNNING,
                bool(job.serving),
                (job.ends_ms or math.inf) if job.serving else 0.0,
                -job.job,
            ),
        )
        extra = ranked[: max(0, len(self.lasting) - self.wanted.count)]
        why = "more replicas than wanted"
        return [self._stop(job, why) if job.serving else self._cancel(job, why) for job in extra]

    def _stop(self, job: SeenJob, why: str) -> Stop:
        return Stop(job=job.job, group=self.wanted.group, why=why)

    def _cancel(self, job: SeenJob, why: str) -> Cancel:
        return Cancel(job=job.job, group=self.wanted.group, why=why)


def _submissions(fleet: Fleet, group: _Group) -> tuple[Fleet, list[Submit]]:
    """Jobs to submit for a group, as far as the surge and the back-off let us."""
    wanted, at_ms = group.wanted, group.at_ms
    for job in group.stuck:
        fleet = _died(fleet, wanted.group, at_ms, f"job {job.job} could not be launched")
    orders = [order for order in fleet.orders if order.group == wanted.group]
    ordered = len(orders)
    moved = sum(order.moved for order in orders)
    # One that waits for another node stands for the one that it lets go, and for no other: it may wait long.
    off = len(group.off) + moved
    missing = wanted.count - len(group.lasting) - (ordered - moved) - min(off, len(group.moving))
    away = 0 if group.move is None else max(0, group.move.count - off - len(group.coming))
    room = wanted.count + wanted.surge - len(group.jobs) - ordered if wanted.count else 0
    n = min(missing, room)
    trouble = next((t for t in fleet.troubles if t.group == wanted.group), None)
    why = "a replica is missing"
    if trouble is not None:
        # One at a time until one has shown that it can serve.
        n = 0 if at_ms < trouble.until_ms else min(n, 1 - ordered - len(group.unproved))
        why = f"a replica is missing; try {trouble.deaths + 1}, for {trouble.last}"
    elif group.due or group.outdated or group.silent:
        why = "successor of one that does not last"
    submits: list[Submit] = []
    for i in range(n):
        fleet = msgspec.structs.replace(fleet, count=fleet.count + 1)
        token = f"{fleet.born}-{fleet.count}"
        nodes = group.move.nodes if group.move is not None and i < away else ()
        if nodes:
            token, why_so = token + MOVED, "successor of one whose host is to change its mode"
        else:
            why_so = why
        submits.append(Submit(group=wanted.group, token=token, spec=group.spec, why=why_so, excluded=nodes))
        order = Order(group=wanted.group, token=token, at_ms=at_ms, moved=bool(nodes))
        fleet = msgspec.structs.replace(fleet, orders=(*fleet.orders, order))
    return fleet, submits


def _remember(fleet: Fleet, acts: list[Instruction], at_ms: float) -> Fleet:
    """Note on each life that it was told to stop, or cancelled."""
    stops = {act.job for act in acts if isinstance(act, Stop)}
    cancels = {act.job for act in acts if isinstance(act, Cancel)}
    lives = []
    for life in fleet.lives:
        if life.job in cancels:
            life = msgspec.structs.replace(life, cancel_ms=at_ms)
        elif life.job in stops and life.stop_ms is None:
            life = msgspec.structs.replace(life, stop_ms=at_ms)
        lives.append(life)
    return msgspec.structs.replace(fleet, lives=tuple(lives))


def _drains(fleet: Fleet, seen: Seen, policy: SlurmPolicy) -> tuple[Fleet, list[Instruction]]:
    """Nodes to drain for GPUs that are proved gone: once for each report, so that a node which was mended and
    resumed stays in service; and only so many at once."""
    reports = {lost.job for lost in seen.lost}
    asked = {job: at for job, at in fleet.drains.items() if job in reports}
    settled = set(fleet.settled) & reports
    drained = set(seen.drained)
    out: list[Instruction] = []
    for lost in seen.lost:
        last = asked.get(lost.job)
        if lost.job in settled or (last is not None and seen.at_ms - last < ACT_AGAIN_MS):
            continue
        if lost.node in drained:
            settled.add(lost.job)
            continue
        asked[lost.job] = seen.at_ms
        if len(drained) < policy.max_drained_nodes:
            drained.add(lost.node)
            reason = f"hybridsched: job {lost.job}: {lost.why}"
            out.append(Drain(node=lost.node, job=lost.job, reason=reason))
        else:
            settled.add(lost.job)
            limit = policy.max_drained_nodes
            why = f"{lost.why}; slurm.max_drained_nodes is {limit} and as many stand drained"
            out.append(Withheld(node=lost.node, job=lost.job, why=why))
    return msgspec.structs.replace(fleet, drains=asked, settled=tuple(sorted(settled))), out
