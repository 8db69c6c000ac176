"""The policy worker: observe, decide, act, record. One leads a pool; others stand by.

The decisions are `hybridsched.core.decide`; this module only says when a cycle runs and carries out what it
decided. Whatever goes wrong here, gates close by themselves: each is a lease of `cycle.lease_ms`.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import msgspec
from redis.exceptions import RedisError

from hybridsched.core.codec import DecisionRecord
from hybridsched.core.decide import decide
from hybridsched.core.packing import packs, same
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.publishing import gate_of, stands
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState, Pack, Snapshot
from hybridsched.log import get_logger
from hybridsched.store.channels import messages
from hybridsched.store.connection import StoreError
from hybridsched.store.decisions import DecisionLog, cut
from hybridsched.store.events import EventLog
from hybridsched.store.found import answer_or
from hybridsched.store.gates import GateStore, Outcome
from hybridsched.store.keys import Keys
from hybridsched.store.leader import LeaderLease
from hybridsched.store.packs import PackStore
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.policy_bursts import Bursts
from hybridsched.workers.policy_gates import all_closed, outcome_text, shut_lanes
from hybridsched.workers.policy_observe import Observation, Observer
from hybridsched.workers.policy_pace import Pace
from hybridsched.workers.policy_slurm import SlurmSide
from hybridsched.workers.policy_source import PolicySource
from hybridsched.workers.policy_stats import CycleStats, WorkerStatus

if TYPE_CHECKING:
    from redis.asyncio import Redis

STANDBY_POLL_S = 0.1
"""How often a standby asks whether it may lead."""

HEARTBEAT_S = 2.0
"""A decision record is written at least this often, also when nothing changed."""

STATUS_S = 0.5
"""How often the worker's own state is published."""

STATUS_LIFE_MS = 60_000
"""Life of that state: long enough for a report that is written after the worker has ended."""

CUT_ABOVE_LANES = 64
"""Pools with more lanes log only the part of a snapshot that changed, and the whole at heartbeats."""

_BACK_OFF_S = (0.05, 1.0)
_log = get_logger("policy-worker")


class PolicyWorkerError(StoreError):
    """The worker may not run: another one leads, by the store's word, and this one may not stand by."""


class PolicyWorker:
    """One policy worker of a pool. `speed`: how many times faster than the wall the pool's engines run.

    `slurm` does what Slurm is told, beside the cycles and never in their way; None: outside Slurm.
    """

    def __init__(
        self,
        client: Redis,
        pool: str,
        *,
        speed: float = 1.0,
        standby: bool = True,
        owner: str | None = None,
        slurm: SlurmSide | None = None,
    ) -> None:
        self._client = client
        self._pool = pool
        self._keys = Keys(pool)
        self._speed = speed
        self._standby = standby
        self._slurm = slurm
        waiting = (lambda: None) if slurm is None else slurm.waiting
        self._observer = Observer(client, pool, waiting=waiting)
        self._gates = GateStore(client, pool)
        self._packs = PackStore(client, pool)
        self._bursts = Bursts(speed)
        self._packs_renewed: dict[str, float] = {}
        self._packs_recorded: dict[str, tuple[object, ...]] = {}
        self._log = DecisionLog(client, pool)
        self.events = EventLog(client, pool)
        self.lease = LeaderLease(client, pool, owner=owner)
        self.policy = PolicySource(speed)
        self.stats = CycleStats()
        self.pace = Pace()
        self._recorded: dict[str, tuple[GateState, Reason]] = {}
        self._announced: dict[str, tuple[GateState, Reason]] = {}
        self._renewed: dict[str, float] = {}
        self._record_due = 0.0
        self._status_due = 0.0
        self._lead_due = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Lead or stand by until `stop` is set; then close the gates and give the leadership up.

        Redis may come and go. Raises `PolicyWorkerError` when another leads and `standby` is off.
        """
        nudges = asyncio.create_task(self._listen(), name="policy-nudges")
        ending = asyncio.create_task(self._wake_at_end(stop), name="policy-stop")
        back_off = _BACK_OFF_S[0]
        reached = True
        try:
            while not stop.is_set():
                try:
                    if await self._lead():
                        await self.cycle()
                        await self.pace.wait(self.stats.last_ms / 1000.0)
                    else:
                        if self._slurm is not None:
                            self._slurm.offer(None, "")
                        await self.pace.sleep(STANDBY_POLL_S)
                    back_off = _BACK_OFF_S[0]
                    reached = True
                except (RedisError, OSError) as error:
                    if reached:
                        reached = False
                        _log.warning(
                            "Redis cannot be used, so no gate is renewed and all close by their lease. "
                            "Check the server; the worker goes on trying.",
                            key="policy_redis_outage",
                            error=str(error),
                        )
                    self._lead_due = 0.0
                    await self.pace.sleep(back_off)
                    back_off = min(back_off * 2, _BACK_OFF_S[1])
                except PolicyWorkerError:
                    raise
                except Exception as error:  # noqa: BLE001 - the outer edge: a pool must not lose its worker
                    _log.error(
                        "A cycle failed, so no gate was renewed and all close by their lease. The worker "
                        "goes on trying; report this as a defect.",
                        key="policy_cycle_failed",
                        error=repr(error)[:300],
                        exc_info=reached,
                    )
                    reached = False
                    await self.pace.sleep(back_off)
                    back_off = min(back_off * 2, _BACK_OFF_S[1])
        finally:
            await end_tasks(nudges, ending)
            await self._leave()

    async def _lead(self) -> bool:
        """Hold the leadership, asking no more often than a fifth of its lease."""
        now = time.monotonic()
        if self.lease.token and now < self._lead_due:
            return True
        before = self.lease.token
        leads = await self.lease.acquire()
        self._lead_due = now + self.lease.lease_ms / 5000.0
        if not leads:
            if before:
                _log.warning(
                    "Another policy worker leads the pool now; this one stands by.",
                    key="policy_leadership_lost",
                    leader=self.lease.leader,
                )
            if not self._standby:
                raise PolicyWorkerError(
                    f"pool {self._pool!r} is led by another policy worker ({self.lease.leader}); "
                    f"stop that one, or start this one as a standby"
                )
            return False
        if self.lease.token != before:
            _log.info("Leading the pool.", key="policy_leading", pool=self._pool, token=self.lease.token)
            self._recorded.clear()
            self._announced.clear()
            self._renewed.clear()
            self._packs_renewed.clear()
            self._packs_recorded.clear()
        return True

    async def cycle(self) -> tuple[GateDecision, ...]:
        """One cycle. The worker must lead. Raises what the Redis client raises."""
        wall, cpu = time.perf_counter(), time.thread_time()
        # 1. Observe.
        seen = await self._observer.look()
        if self._slurm is not None and self._slurm.shut:
            seen = msgspec.structs.replace(seen, snapshot=shut_lanes(seen.snapshot, self._slurm.shut))
        policy = self.policy.take(seen.policy)
        if policy is not None and policy.pack.enabled:
            seen = self._bursts.with_bursts(seen, policy)
        # 2. Decide.
        decisions = all_closed(seen.snapshot) if policy is None else decide(seen.snapshot, policy)
        orders = () if policy is None else packs(seen.snapshot, policy)
        # 3. Act.
        outcomes = await self._act(seen, decisions, policy)
        await self._put_in_order(seen, orders)
        if self._slurm is not None:
            # Slurm's part goes on while no policy is in force: its counts follow the gates down.
            self._slurm.offer(self.policy.last, self.lease.token)
        # 4. Record.
        await self._record(seen, decisions, orders, outcomes, policy)
        self.pace.plan(seen, decisions, policy)
        self.stats.add((time.perf_counter() - wall) * 1000.0, (time.thread_time() - cpu) * 1000.0)
        return decisions

    async def _act(
        self, seen: Observation, decisions: tuple[GateDecision, ...], policy: PoolPolicy | None
    ) -> dict[str, Outcome]:
        """Publish the gates that differ from those in Redis, and renew those whose lease is a third over."""
        cycle = self.policy.last.cycle
        version = 0 if policy is None else policy.version
        renew_before = seen.mono_s - cycle.lease_ms / 3000.0
        gates = []
        for lane, decision in zip(seen.snapshot.lanes, decisions, strict=True):
            gate = gate_of(decision, version, self.lease.token)
            fresh = self._renewed.get(decision.lane, 0.0) > renew_before
            if not (fresh and stands(lane.gate, gate)):
                gates.append(gate)
        if not gates:
            return {}
        answers = await self._gates.publish_many(
            gates, leader_token=self.lease.token, lease_ms=cycle.lease_ms
        )
        outcomes = {gate.lane: outcome for gate, outcome in zip(gates, answers, strict=True)}
        mono_s = time.monotonic()
        for gate in gates:
            outcome = outcomes[gate.lane]
            if outcome is Outcome.NOT_LEADER:
                # Fenced out: whatever this process believes, another may lead. Ask before the next cycle.
                self._lead_due = 0.0
            elif outcome is not Outcome.EPOCH_MOVED:
                self._renewed[gate.lane] = seen.mono_s
                self._announce(gate, mono_s)
        return outcomes

    async def _put_in_order(self, seen: Observation, orders: tuple[Pack, ...]) -> None:
        """Publish the pack orders that are new, and renew those whose lease is a third over."""
        lease_ms = self.policy.last.cycle.lease_ms
        renew_before = seen.mono_s - lease_ms / 3000.0
        standing = {pack.model: pack for pack in seen.snapshot.packs}
        for pack in orders:
            if self._packs_renewed.get(pack.model, 0.0) > renew_before and same(
                standing.get(pack.model), pack
            ):
                continue
            order = msgspec.structs.replace(pack, by=self.lease.token)
            if await self._packs.publish(order, leader_token=self.lease.token, lease_ms=lease_ms):
                self._packs_renewed[pack.model] = seen.mono_s
            else:
                self._lead_due = 0.0  # fenced out, as with a gate

    def _announce(self, gate: Gate, mono_s: float) -> None:
        """An event for reports, when the lane's state or reason has changed."""
        if self._announced.get(gate.lane) != (gate.state, gate.reason):
            self._announced[gate.lane] = (gate.state, gate.reason)
            if self._slurm is not None:
                self._slurm.gate(gate.lane, is_open=gate.state is GateState.OPEN)
            self.events.append(
                {"t": "gate", "lane": gate.lane, "state": gate.state, "reason": gate.reason, "mono_s": mono_s}
            )

    async def _record(
        self,
        seen: Observation,
        decisions: tuple[GateDecision, ...],
        orders: tuple[Pack, ...],
        outcomes: dict[str, Outcome],
        policy: PoolPolicy | None,
    ) -> None:
        """Log the decisions on change and as a heartbeat; publish the worker's state. One round trip."""
        now = time.monotonic()
        changed = [d.lane for d in decisions if self._recorded.get(d.lane) != (d.state, d.reason)]
        said: dict[str, tuple[object, ...]] = {p.model: (p.ranks, p.reach, p.fill) for p in orders}
        ordered = said != self._packs_recorded
        heartbeat = now >= self._record_due
        status = now >= self._status_due
        if not (changed or ordered or heartbeat or status):
            return
        pipe = self._client.pipeline(transaction=False)
        if policy is not None and (changed or ordered or heartbeat):
            whole = heartbeat or ordered or len(decisions) <= CUT_ABOVE_LANES or policy.floor_gpus > 0
            lanes = frozenset(changed)
            logged = decisions if whole else tuple(d for d in decisions if d.lane in lanes)
            record = DecisionRecord(
                cycle=self.stats.cycles + 1,
                snapshot=seen.snapshot if whole else cut(seen.snapshot, lanes),
                policy=policy,
                decisions=logged,
                outcomes=tuple(outcome_text(outcomes.get(d.lane)) for d in logged),
                by=self.lease.token,
                packs=orders if whole and policy.pack.enabled else None,
            )
            self._log.queue(pipe, record)
        if status:
            state = msgspec.json.encode(self._status(seen.snapshot, decisions, policy))
            pipe.set(self._keys.policy_worker, state, px=STATUS_LIFE_MS)
        # A log that cannot be written is no reason to leave gates without their next cycle.
        for answer in await pipe.execute(raise_on_error=False) if len(pipe) > 0 else ():
            answer_or(answer, None, self._keys.decisions)
        self._recorded.update((d.lane, (d.state, d.reason)) for d in decisions)
        self._packs_recorded = said
        if heartbeat:
            self._record_due = now + HEARTBEAT_S
        if status:
            self._status_due = now + STATUS_S

    def _status(
        self, snapshot: Snapshot, decisions: tuple[GateDecision, ...], policy: PoolPolicy | None
    ) -> WorkerStatus:
        return WorkerStatus(
            leader=self.lease.token,
            pid=os.getpid(),
            at_ms=snapshot.now_ms,
            cycles=self.stats.cycles,
            cycle_ms=self.stats.wall(),
            cpu_ms=self.stats.cpu(),
            lanes=len(decisions),
            open=sum(decision.state is GateState.OPEN for decision in decisions),
            policy="" if policy is None else policy.name,
            version=0 if policy is None else policy.version,
            speed=self._speed,
            problem=self.policy.problem,
        )

    async def _leave(self) -> None:
        """Close what this worker opened and give the leadership up; when Redis is away the leases do both."""
        if self._slurm is not None:
            self._slurm.offer(None, "")
        try:
            if self.lease.token:
                gates = [
                    Gate(
                        lane=lane,
                        state=GateState.CLOSED,
                        reason=Reason.LEASE_EXPIRED,
                        by="policy worker stopped",
                    )
                    for lane in sorted(self._renewed)
                ]
                if gates:
                    await self._gates.publish_many(
                        gates,
                        leader_token=self.lease.token,
                        lease_ms=self.policy.last.cycle.lease_ms,
                    )
                    mono_s = time.monotonic()
                    for gate in gates:
                        self._announce(gate, mono_s)
                await self.lease.release()
        except (RedisError, OSError) as error:
            _log.warning(
                "Redis cannot be reached at the end; the gates close by their lease.",
                key="policy_leave_outage",
                error=str(error),
            )
        await self.events.close()

    async def _listen(self) -> None:
        """Bring the next cycle forward when a worker or an operator asks for attention."""
        back_off = _BACK_OFF_S[0]
        while True:
            try:
                async for _ in messages(
                    self._client, self._keys.telemetry_channel, self._keys.policy_channel
                ):
                    back_off = _BACK_OFF_S[0]
                    self.pace.nudge()
            except (RedisError, OSError) as error:
                _log.debug(
                    "The channel of nudges was lost; cycles run on their interval meanwhile.",
                    key="policy_nudges_lost",
                    error=str(error),
                )
            except Exception as error:  # noqa: BLE001 - the outer edge: without nudges cycles still run
                _log.error(
                    "Listening for nudges failed; cycles run on their interval meanwhile. Report this as a "
                    "defect.",
                    key="policy_nudges_failed",
                    error=repr(error)[:300],
                )
            await asyncio.sleep(back_off)
            back_off = min(back_off * 2, _BACK_OFF_S[1])

    async def _wake_at_end(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.pace.end()
