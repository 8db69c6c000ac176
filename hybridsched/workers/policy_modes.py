"""The policy worker's modes, beside its other Slurm work: look, decide, write the journal, act.

`core.mode_plan` says what is wanted of each host, `core.switch` what to do about it. The journal is written,
fenced by the leader's token, before anything is done: whoever leads next goes on from there. Acts run as
tasks of their own, one a host, and their results come back at the next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from datetime import tzinfo
from zoneinfo import ZoneInfo

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybridsched.cluster.hands import Hands, NoHands
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError, Job, Node
from hybridsched.core.calendar import CUT, DRAIN, LOAD, SLURM, Durations
from hybridsched.core.mode_plan import Decision, decide, moment_s, wanted_replicas
from hybridsched.core.modes import ModesPolicy, node_name, records
from hybridsched.core.policy import PoolPolicy, ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import Move
from hybridsched.core.switch import note, step, taken_over
from hybridsched.core.switch_values import (
    MOVING,
    Finished,
    Instruction,
    Result,
    Seen,
    Step,
    SwitchState,
    counts,
    leaving,
)
from hybridsched.log import get_logger
from hybridsched.store.events import EventLog
from hybridsched.store.keys import Keys
from hybridsched.store.leader import term
from hybridsched.store.modes import ModeStore, Wishes
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import Telemetry
from hybridsched.workers.policy_modes_acts import ModeActs
from hybridsched.workers.policy_modes_clock import GivenClock, ServerClock
from hybridsched.workers.policy_modes_fence import Fence
from hybridsched.workers.policy_modes_troubles import NO_HAND, TroubleLog, troubles_of
from hybridsched.workers.policy_modes_view import ModeStatus, hosts_seen

STATUS_LIFE_MS = 60_000
LOOKED_MS = 10_000.0
"""So often the journal says when somebody looked last, while a host changes: time without a look counts for
no limit, time with one does."""

RESERVED_MIN = 120
"""Length of a reservation, minutes: it is removed when its switch has begun."""

_log = get_logger("policy-modes")


class ModeTask:
    """The modes of one pool. `clock_ms`: a clock of the epoch in place of the Redis server's."""

    def __init__(
        self,
        cluster: Cluster,
        hands: Hands,
        client: Redis,
        events: EventLog,
        *,
        pool: str,
        user: str,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        self._cluster, self._client, self._pool, self._user = cluster, client, pool, user
        self._store = ModeStore(client, pool)
        self._handless = isinstance(hands, NoHands)
        self._clock = ServerClock(client) if clock_ms is None else GivenClock(clock_ms)
        self._acts = ModeActs(cluster, hands, events, self._clock.steady_ms)
        self._status_key = Keys(pool).mode_status
        self._token = ""
        self.state = SwitchState()
        self._written: bytes | None = None
        self._written_ms = 0.0
        self._durations = Durations()
        self._wishes = Wishes()
        self._seen: Seen | None = None
        self._addresses: dict[int, tuple[int, int | None]] = {}
        self._answers: list[tuple[Instruction, Result]] = []
        self._answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reserved: set[str] = set()
        self._reservations_known = False
        self._forgot = ""
        """The term in which hosts at rest were taken out of the journal of a pool without modes."""
        self.decision: Decision | None = None
        self.troubles: dict[str, str] = {}
        self._trouble_log = TroubleLog()

    def now_ms(self) -> float:
        """The clock by which a look begins."""
        return self._clock.steady_ms()

    def replicas(self, policy: PoolPolicy) -> SlurmPolicy:
        """Slurm's part of the policy with the groups of replicas that the modes want now."""
        if policy.modes is None or not self._token:
            return policy.slurm
        groups: tuple[ReplicasPolicy, ...] = wanted_replicas(policy.modes, counts(self.state))
        return msgspec.structs.replace(policy.slurm, replicas=(*policy.slurm.replicas, *groups))

    def leaving_nodes(self, policy: PoolPolicy) -> frozenset[str]:
        """Node records whose jobs are on their way out: what runs there counts for nothing."""
        modes = policy.modes
        if modes is None:
            return frozenset()
        return frozenset(record for host in leaving(self.state) for record in records(modes, host))

    def moves(self, policy: PoolPolicy, nodes: Sequence[Node]) -> tuple[Move, ...]:
        """What has to come to serve off the node records of a host before it can change its mode."""
        modes, room = policy.modes, self.state.room
        if modes is None or room is None or not self._token:
            return ()
        there = {node.name for node in nodes}
        off = tuple(record for record in records(modes, room.host) if record in there)
        return tuple(Move(group=group, count=count, nodes=off) for group, count in room.groups.items())

    def shut_nodes(self, policy: PoolPolicy) -> dict[str, str]:
        """Node records on which no lane may open, with why."""
        modes = policy.modes
        if modes is None:
            return {}
        found: dict[str, str] = {}
        for name, host in self.state.hosts.items():
            mode = modes.named(host.goal)
            if host.step not in (Step.SERVING, Step.WARMING):
                why = f"host {name} changes its mode ({host.step.value})"
                found |= dict.fromkeys(records(modes, name), why)
            elif modes.enabled and mode is not None and not mode.lanes:
                found[node_name(mode, name)] = f"mode {mode.name} has no lanes"
        return found

    async def look(
        self,
        policy: PoolPolicy,
        token: str,
        jobs: Sequence[Job] | None,
        nodes: Sequence[Node],
        telemetry: Telemetry | None,
        began_ms: float | None = None,
    ) -> None:
        """After each look at Slurm, which began at `began_ms` (by `now_ms`; None: now). `jobs` None: Slurm
        could not be read."""
        modes = policy.modes
        if modes is None or not (modes.mode and modes.hosts):
            self._say_left()
            self._token = ""
            await self._forget_rested(token)
            return
        at_ms = self.now_ms() if began_ms is None else began_ms
        try:
            if token != self._token:
                at_ms += await self._take_over(token)
            else:
                await self._clock.look()
            self._wishes = await self._store.wishes()
        except (RedisError, OSError) as error:
            _log.warning(
                "Redis cannot be read, so no host changes its mode for now.",
                key="modes_outage",
                error=str(error),
            )
            return
        seen = Seen(at_ms=at_ms, reachable=False)
        if jobs is not None and telemetry is not None:
            seen = hosts_seen(
                modes,
                self.state,
                jobs,
                nodes,
                telemetry,
                policy.slurm,
                at_ms=at_ms,
                pool=self._pool,
                user=self._user,
            )
        seen = msgspec.structs.replace(seen, cannot=NO_HAND if self._handless else "")
        self._seen, self._addresses = seen, {job.id: job.address for job in jobs or ()}
        await self._go(policy, modes, seen)

    async def chain(self, policy: PoolPolicy) -> bool:
        """After acts have been answered, between two looks: what follows of the last one. Whether a new look
        would show something that is waited for."""
        modes, seen = policy.modes, self._seen
        if modes is None or seen is None or not self._token or not self._answers:
            return False
        await self._go(policy, modes, seen)
        return any(host.step in MOVING and not host.asked for host in self.state.hosts.values())

    async def _go(self, policy: PoolPolicy, modes: ModesPolicy, seen: Seen) -> None:
        token, at_ms = self._token, self._clock.calendar_ms()
        self._take_answers(modes)
        self.decision = self._decide(modes, ZoneInfo(modes.time_zone), at_ms)
        targets = self.decision.targets if modes.enabled else {}
        before = self.state
        self.state, acts = step(before, seen, targets, modes, policy.slurm.stop_ms)
        # Those that are back in service first: it is they who let others begin.
        for host in sorted(self.state.hosts.values(), key=lambda host: host.step is not Step.SERVING):
            self._acts.stepped(before.hosts.get(host.host), host)
        try:
            if not await self._write(token):
                return
            await self._note_spans(acts, token)
            await self._forget_approvals()
            if seen.reachable:
                await self._reserve(modes, at_ms)
            self._trouble_log.say(self.troubles, self.decision)
            await self._publish(at_ms, seen)
        except (RedisError, OSError) as error:
            # Not written, so not done: what was decided is decided again at the next look.
            self.state = before
            _log.warning(
                "The journal cannot be written, so no host changes its mode.",
                key="modes_outage",
                error=str(error),
            )
            return
        for act in acts:
            if not isinstance(act, Finished):
                self._start(act, modes)

    @property
    def moving(self) -> bool:
        """Whether a host changes its mode now."""
        return any(host.step in MOVING for host in self.state.hosts.values())

    async def rest(self, longest_s: float) -> None:
        """Until an act has been answered, at most this long."""
        self._answered.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), longest_s)

    async def close(self) -> None:
        """End what runs. Acts may be repeated, so none needs its end."""
        await end_tasks(*self._tasks)

    async def stand_down(self, token: str) -> None:
        """Another term's token, or none: what was begun in the last one is ended, and is no more ours."""
        if self._token and token != self._token:
            self._token = ""
            self._answers.clear()
            await end_tasks(*self._tasks)

    # -- parts

    async def _take_over(self, token: str) -> float:
        """Begin a term: whatever the last leader began is gone on with. By how much the clock was set."""
        await end_tasks(*self._tasks)
        self._answers.clear()
        shift_ms = await self._clock.begin()
        found = await self._store.journal()
        self.state = taken_over(found) if found is not None else SwitchState()
        self._durations = await self._store.durations()
        self._written, self._reservations_known = None, False
        self._token, self._forgot = token, ""
        self._acts.begin(term(token), Fence(self._client, self._pool, token).check)
        moving = [name for name, host in self.state.hosts.items() if host.step is not Step.SERVING]
        if moving:
            _log.info(
                "Going on with changes of mode that were under way.", key="modes_taken_over", hosts=moving
            )
        return shift_ms

    async def _forget_rested(self, token: str) -> None:
        """Where the policy has no modes, hosts at rest leave the journal; those in the middle stay."""
        if token == self._forgot:
            return
        try:
            found = await self._store.journal()
            hosts = {} if found is None else found.hosts
            middle = {name: host for name, host in hosts.items() if host.step is not Step.SERVING}
            if middle != hosts:
                await self._store.write_journal(SwitchState(hosts=middle), token=token)
        except (RedisError, OSError) as error:
            _log.debug("The journal was not swept.", key="modes_outage", error=str(error))
        else:
            self._forgot = token

    def _say_left(self) -> None:
        """The policy has no modes any more: which hosts nobody carries on."""
        left = [name for name, host in self.state.hosts.items() if host.step is not Step.SERVING]
        if left and self._token:
            _log.warning(
                "The policy has no modes any more, and hosts stand in the middle of a change. Set one that "
                "has them, and they are carried on.",
                key="modes_left",
                hosts=left,
            )

    def _take_answers(self, modes: ModesPolicy) -> None:
        for act, result in self._answers:
            before = self.state
            self.state = note(before, act, result, modes)
            after = self.state.hosts.get(act.host)
            if after is not None:
                self._acts.stepped(before.hosts.get(act.host), after)
        self._answers.clear()

    def _decide(self, modes: ModesPolicy, zone: tzinfo, at_ms: float) -> Decision:
        wishes = self._wishes
        decision = decide(
            modes,
            zone,
            at_ms,
            self.state,
            self._durations,
            orders=wishes.orders,
            approvals=wishes.approvals,
            state_ms=self._clock.steady_ms(),
        )
        self.troubles = troubles_of(modes, self.state, decision, handless=self._handless)
        return decision

    async def _write(self, token: str) -> bool:
        text = msgspec.json.encode(self.state.hosts)
        at_ms = self.state.seen_ms or 0.0
        if text == self._written and not (self.moving and at_ms - self._written_ms >= LOOKED_MS):
            return True
        if not await self._store.write_journal(self.state, token=token):
            _log.warning("Another policy worker leads: nothing is done about modes.", key="modes_fenced")
            self._token = ""
            return False
        self._written, self._written_ms = text, at_ms
        return True

    async def _note_spans(self, acts: Sequence[Instruction], token: str) -> None:
        """Into the table of what switches take."""
        known = self._durations
        for act in acts:
            if isinstance(act, Finished):
                for part, ms in act.spans.items():
                    owner = act.old if part == DRAIN else act.new
                    if part in (DRAIN, CUT, SLURM, LOAD):
                        known = known.with_span(f"{part} {owner}", ms)
        if known is not self._durations:
            self._durations = known
            await self._store.write_durations(known, token=token)

    async def _forget_approvals(self) -> None:
        """An approval is for one change; those before the current one are over."""
        since_s = self.decision.scheduled.at_ms / 1000.0 if self.decision is not None else 0.0
        over = [name for name in self._wishes.approvals if moment_s(name) < since_s]
        await self._store.forget_approvals(over)

    def _start(self, act: Instruction, modes: ModesPolicy) -> None:
        addresses = self._addresses

        async def run() -> None:
            self._answers.append((act, await self._acts.do(act, modes, addresses)))
            self._answered.set()

        task = asyncio.create_task(run(), name=f"mode-{act.word}-{act.host}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve(self, modes: ModesPolicy, at_ms: float) -> None:
        """Keep jobs out of a switch that is near, and let them in again when it has begun."""
        proposal = self.decision.proposal if self.decision is not None else None
        wanted: dict[str, tuple[str, ...]] = {}
        if modes.reservation and proposal is not None and proposal.approved and modes.enabled:
            begin = proposal.begin_ms
            if at_ms < begin <= at_ms + modes.reserve_ahead_ms:
                nodes = tuple(
                    node_name(mode, name)
                    for name, host in self.state.hosts.items()
                    if name in proposal.hosts and (mode := modes.named(host.mode)) is not None
                )
                wanted[f"hs-{self._pool}-{proposal.id.replace('@', '-')}"] = nodes
        try:
            if not self._reservations_known:
                self._reserved |= await self._reserved_before(modes)
                self._reservations_known = True
            for name in self._reserved - set(wanted):
                await self._cluster.unreserve(name)
                self._reserved.discard(name)
            for name, nodes in wanted.items():
                if name not in self._reserved and nodes and proposal is not None:
                    await self._cluster.reserve(name, nodes, proposal.begin_ms, RESERVED_MIN)
                    self._reserved.add(name)
        except ClusterError as error:
            self.troubles["reservation"] = f"no reservation could be made or removed: {error}"[:300]

    async def _reserved_before(self, modes: ModesPolicy) -> set[str]:
        """Reservations of this pool's switches that a policy worker before this one made."""
        names = "|".join(re.escape(mode.name) for mode in modes.mode)
        ours = re.compile(rf"hs-{re.escape(self._pool)}-({names})-\d+")
        return {found.name for found in await self._cluster.reservations() if ours.fullmatch(found.name)}

    async def _publish(self, at_ms: float, seen: Seen) -> None:
        decision = self.decision
        status = ModeStatus(
            at_ms=at_ms,
            state_ms=self._clock.steady_ms(),
            scheduled=decision.scheduled.mode if decision is not None else "",
            since_ms=decision.scheduled.at_ms if decision is not None else 0.0,
            proposal=decision.proposal if decision is not None else None,
            ahead=decision.ahead if decision is not None else None,
            state=self.state,
            seen=seen,
            troubles=self.troubles,
        )
        await self._client.set(self._status_key, msgspec.json.encode(status), px=STATUS_LIFE_MS)
