"""What is seen of the hosts, put into the words of `core.switch`; and what is published for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from hybridsched.cluster.reshape import in_service, invalid
from hybridsched.cluster.values import Job, Node, total
from hybridsched.core.mode_plan import Proposal
from hybridsched.core.modes import Mode, ModesPolicy, node_name, records
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import read_tag
from hybridsched.core.switch_rest import NO_REASON, REASON
from hybridsched.core.switch_values import HostJob, HostSeen, HostState, JobKind, Seen, Step, SwitchState
from hybridsched.store.telemetry import Telemetry, replica_view
from hybridsched.workers.policy_slurm_view import HEALTH_AGE_MS, fill_jobs


class ModeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy worker knows of the modes, for `hybridsched mode` (key `mode-status`)."""

    at_ms: float
    """The calendar's clock, ms of the epoch."""
    state_ms: float | None = None
    """The clock of `state` at the same moment; None: the same."""
    scheduled: str
    """The calendar's mode now."""
    since_ms: float
    proposal: Proposal | None
    ahead: Proposal | None = None
    """The change after it."""
    state: SwitchState
    seen: Seen
    troubles: dict[str, str] = msgspec.field(default_factory=dict)
    """By host, or `calendar`: what a person has to know."""


def hosts_seen(
    modes: ModesPolicy,
    state: SwitchState,
    jobs: Sequence[Job],
    nodes: Sequence[Node],
    telemetry: Telemetry | None,
    slurm: SlurmPolicy,
    *,
    at_ms: float,
    pool: str,
    user: str,
) -> Seen:
    """One look. `jobs` are those of every partition: whoever runs on a host has to leave it."""
    by_name = {node.name: node for node in nodes}
    owner = {record: host for host in modes.all_hosts() for record in records(modes, host)}
    serving = _serving(telemetry)
    groups = {r.group: r.model for r in slurm.replicas}
    ours = {mode.group(engine): engine.model for mode in modes.mode for engine in mode.engines}
    groups |= ours
    offline = {job.id for job in fill_jobs(jobs, slurm)}
    here: dict[str, list[HostJob]] = {}
    elsewhere: Counter[str] = Counter()
    strays: Counter[str] = Counter()
    for job in jobs:
        if not job.nodes or not (job.running or job.leaving or job.suspended):
            continue
        seen = _job(job, groups, serving, offline, pool=pool, user=user)
        for host in sorted({owner[node] for node in job.nodes if node in owner}):
            here.setdefault(host, []).append(seen)
        if seen.serving and not any(node in owner for node in job.nodes):
            elsewhere[seen.model] += 1
            if seen.group in ours:
                strays[seen.group] += 1
    hosts = tuple(
        _host(modes, host, state.hosts.get(host), by_name, tuple(here.get(host, ())))
        for host in modes.all_hosts()
    )
    return Seen(at_ms=at_ms, hosts=hosts, elsewhere=dict(elsewhere), strays=dict(strays))


def _job(
    job: Job,
    groups: Mapping[str, str],
    serving: Mapping[str, str],
    offline: set[int],
    *,
    pool: str,
    user: str,
) -> HostJob:
    tag = read_tag(job.comment)
    model = serving.get(str(job.id), "")
    if tag is not None and tag.pool == pool and job.user in ("", user):
        return HostJob(
            job=job.id,
            kind=JobKind.REPLICA,
            model=model or groups.get(tag.group, ""),
            group=tag.group,
            serving=bool(model) and job.running,
        )
    kind = JobKind.OFFLINE if job.id in offline else JobKind.OTHER
    return HostJob(job=job.id, kind=kind, model=model, serving=bool(model) and job.running)


def _serving(telemetry: Telemetry | None) -> dict[str, str]:
    """Job -> model, of the replicas whose engine is healthy."""
    if telemetry is None:
        return {}
    return {
        record.job: record.model
        for record in telemetry.replicas.values()
        if record is not None
        and record.job
        and replica_view(record, telemetry.now_ms).engine_healthy.within(HEALTH_AGE_MS) == 1.0
    }


def _host(
    modes: ModesPolicy,
    host: str,
    known: HostState | None,
    nodes: Mapping[str, Node],
    jobs: tuple[HostJob, ...],
) -> HostSeen:
    there = [nodes[name] for name in records(modes, host) if name in nodes]
    up = [node for node in there if in_service(node)]
    accepts = any(node.usable for node in up)
    if len(up) > 1:
        # A record that was set down may come back for as long as Slurm takes to miss its slurmd
        # (ReturnToService). It stays drained; the record in which the host is remembered to stand counts.
        named = () if known is None else (modes.named(known.goal), modes.named(known.mode))
        if known is not None and known.step in (Step.DRAINING, Step.EMPTY) and not known.left:
            named = named[::-1]
        ours = [node_name(mode, host) for mode in named if mode is not None]
        up = [node for name in ours for node in up if node.name == name][:1] or up
    mode = _mode(modes, host, known, up[0]) if len(up) == 1 else None
    one = up[0] if len(up) == 1 else None
    come = known is not None and known.step in (Step.CONFIGURING, Step.VERIFYING, Step.WARMING)
    remembered = None if known is None else modes.named(known.goal if come else known.mode)
    own = None if remembered is None else nodes.get(node_name(remembered, host))
    down = own is not None and (invalid(own) or not in_service(own))
    return HostSeen(
        host=host,
        mode=mode,
        accepts=accepts,
        invalid=any(invalid(node) for node in up),
        reason=_reason(up or there),
        down=(own.reason or NO_REASON) if own is not None and down else "",
        booted_ms=None if one is None else one.booted_ms,
        started_ms=None if one is None else one.started_ms,
        jobs=jobs,
    )


def _reason(nodes: Sequence[Node]) -> str:
    """Why records are drained or down: ours before what Slurm itself says."""
    said = [node.reason for node in nodes if node.reason]
    return next((reason for reason in said if reason.startswith(REASON)), said[0] if said else "")


def _mode(modes: ModesPolicy, host: str, known: HostState | None, node: Node) -> str | None:
    """The mode that a record in service stands for. Where several have the record, its GRES tell them apart;
    where those are the same too, what is remembered does."""
    could = [mode for mode in modes.mode if node_name(mode, host) == node.name]
    fitting = [mode.name for mode in could if not lacks(mode, node)] or [mode.name for mode in could]
    if known is not None:
        fitting = [name for name in (known.goal, known.mode) if name in fitting] or fitting
    return fitting[0] if fitting else None


def lacks(mode: Mode, node: Node) -> str:
    """What the engines of a mode ask for and the node record does not have; empty: nothing."""
    asked: Counter[tuple[str, str | None]] = Counter()
    for engine in mode.engines:
        name, *rest = engine.gres.split(":")
        count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
        asked[name, rest[0] if rest else None] += count * engine.per_host
    for (name, kind), count in asked.items():
        have = total(node.gres, name, kind)
        if have < count:
            what = f"{name}:{kind}" if kind else name
            return f"node {node.name} has {have} of {what}, and mode {mode.name} needs {count}"
    return ""
