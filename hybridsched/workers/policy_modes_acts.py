"""Carrying out what `core.switch` decided: each act with its result, an event, and a line in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from hybridsched.cluster.hands import Hands
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.reshape import ReconfigureWay, RecordsWay, Way, in_service, invalid
from hybridsched.cluster.values import ClusterError
from hybridsched.core.modes import ModesPolicy, node_name, records
from hybridsched.core.switch_rest import REASON, a_persons
from hybridsched.core.switch_values import (
    Check,
    Cut,
    DrainHost,
    EnterRecord,
    Finished,
    HostState,
    Instruction,
    LeaveRecords,
    Result,
    ResumeHost,
    TellJob,
    Verify,
)
from hybridsched.log import get_logger
from hybridsched.store.events import EventLog
from hybridsched.workers.policy_modes_fence import Leading, fenced
from hybridsched.workers.policy_modes_view import lacks
from hybridsched.workers.policy_slurm_acts import LEAVE

_log = get_logger("policy-modes")


Addresses = Mapping[int, tuple[int, int | None]]
"""Job -> how it is named to Slurm: number, and task of an array."""


class ModeActs:
    """Executes acts for one pool. `clock_ms` is the clock of the states."""

    def __init__(
        self, cluster: Cluster, hands: Hands, events: EventLog, clock_ms: Callable[[], float]
    ) -> None:
        self._every_cluster, self._every_hands, self._events = cluster, hands, events
        self._cluster, self._hands = cluster, hands
        self._clock_ms = clock_ms
        self._release = (0, 0)

    def begin(self, number: str, check: Leading) -> None:
        """A term begins, that of the number: from now on `check` is asked before each command."""
        self._cluster = fenced(self._every_cluster, check)
        self._hands = fenced(self._every_hands.in_term(number), check)

    async def do(self, act: Instruction, policy: ModesPolicy, addresses: Addresses) -> Result:
        """One act with its result. `addresses`: how each job is named to Slurm."""
        began = time.monotonic()
        try:
            await self._do(act, policy, addresses)
        except ClusterError as error:
            # What was not answered may have been done: the act is repeated, and that is harmless.
            result = Result(
                at_ms=self._clock_ms(),
                ok=False,
                error=f"{error}"[:300],
                passing=error.retryable,
                differs=error.code == "differs",
            )
            _log.warning(
                "A step of a change of mode did not succeed.",
                key="mode_act_failed",
                act=act.word,
                what=msgspec.to_builtins(act),
                code=error.code,
                error=str(error),
            )
        except Exception as error:  # noqa: BLE001 - an act without an answer would leave its host waiting for ever
            words = f"{type(error).__name__}: {error}"[:300]
            result = Result(at_ms=self._clock_ms(), ok=False, error=words, passing=True)
            _log.exception(
                "A step of a change of mode failed in a way that nobody foresaw; it is tried again.",
                key="mode_act_failed",
                act=act.word,
                what=msgspec.to_builtins(act),
                error=words,
            )
        else:
            result = Result(at_ms=self._clock_ms(), ok=True)
        self._event(act, result, began)
        return result

    async def _do(self, act: Instruction, policy: ModesPolicy, addresses: Addresses) -> None:
        host = act.host
        match act:
            case DrainHost(reason=reason):
                held = reason.startswith(f"{REASON}held")
                for node in await self._cluster.nodes(records(policy, host)):
                    if node.usable or (held and node.reason.startswith(REASON)):
                        await self._cluster.drain(node.name, reason)
            case TellJob(job=job, how=how):
                await self._tell(addresses.get(job, (job, None)), how)
            case LeaveRecords(reason=reason):
                await (await self._way(policy)).leave(host, records(policy, host), reason)
            case Cut(mode=mode):
                await self._hands.cut(host, layout(policy, mode))
                await self._as_cut(policy, host, mode)
            case EnterRecord(mode=mode, reason=reason):
                found = policy.named(mode)
                if found is not None:
                    way = await self._way(policy)
                    await way.enter(host, node_name(found, host), mode, reason)
            case Check(mode=mode):
                await self._as_cut(policy, host, mode, final=True)
            case Verify(mode=mode, standing=standing):
                await self._verify(policy, host, mode, standing=standing)
            case ResumeHost(mode=mode):
                found = policy.named(mode)
                if found is not None:
                    await self._resume(node_name(found, host))
            case Finished():
                pass

    async def _resume(self, name: str) -> None:
        """Not where a person has taken it out of service meanwhile: it stays so, with the person's reason."""
        node = next(iter(await self._cluster.nodes([name])), None)
        if node is None or not (node.shut and a_persons(node.reason)):
            await self._cluster.resume(name)

    async def _tell(self, address: tuple[int, int | None], how: str) -> None:
        number, task = address
        try:
            if how == "leave":
                await self._cluster.signal(number, LEAVE, task=task)
            elif how == "requeue":
                await self._cluster.requeue(number, task=task)
            else:
                await self._cluster.cancel(number)
        except ClusterError as error:
            if error.code != "not_found":  # it has left by itself
                raise

    async def _way(self, policy: ModesPolicy) -> Way:
        if policy.way == "records":
            return RecordsWay(self._cluster, self._hands)
        if self._release == (0, 0):
            try:
                said = (await self._cluster.config(["SLURM_VERSION"])).get("SLURM_VERSION", "0.0")
            except ClusterError:  # not known now: slurmctld is restarted then, which does on every release
                said = "0.0"
            major, minor, *_ = [*said.split("."), "0"]
            self._release = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
        return ReconfigureWay(self._cluster, self._hands, release=lambda: self._release)

    async def _as_cut(self, policy: ModesPolicy, host: str, mode: str, *, final: bool = False) -> None:
        """`final`: a difference will not go by itself."""
        differs = await self._hands.differs(host, layout(policy, mode))
        if differs:
            raise ClusterError(
                f"the GPUs of {host} are not cut as mode {mode} wants them: {differs}",
                code="differs" if final else "no_effect",
                retryable=not final,
            )

    async def _verify(self, policy: ModesPolicy, host: str, mode: str, *, standing: bool) -> None:
        found = policy.named(mode)
        if found is None:
            return
        if found.layout:
            await self._as_cut(policy, host, mode, final=standing)
        name = node_name(found, host)
        node = next(iter(await self._cluster.nodes([name])), None)
        if node is None or not in_service(node):
            raise ClusterError(f"node {name} is not in service", code="no_effect", retryable=True)
        if invalid(node):
            raise ClusterError(
                f"Slurm refuses node {name}: {node.reason}",
                code="differs" if standing else "refused",
                retryable=False,
            )
        missing = lacks(found, node)
        if missing:
            raise ClusterError(missing, code="differs" if standing else "refused", retryable=False)

    def stepped(self, before: HostState | None, after: HostState) -> None:
        """An event when a host has come to another step."""
        if before is not None and (before.step, before.goal) == (after.step, after.goal):
            return
        self._events.append(
            {
                "t": "mode",
                "host": after.host,
                "step": after.step.value,
                "mode": after.mode,
                "goal": after.goal,
                "back": after.back,
                "why": after.why,
                "cause": after.cause,
                "at_ms": self._clock_ms(),
                "mono_s": time.monotonic(),
            }
        )
        _log.info(
            "A host has come to another step of its change of mode.",
            key="mode_step",
            host=after.host,
            step=after.step.value,
            mode=after.mode,
            goal=after.goal,
            why=after.why,
        )

    def _event(self, act: Instruction, result: Result, began: float) -> None:
        what = msgspec.to_builtins(act)
        what.pop("type", None)
        now = time.monotonic()
        outcome = "ok" if result.ok else result.error
        event = {"t": "mode_act", "act": act.word, "outcome": outcome, "mono_s": now, "took_s": now - began}
        self._events.append({**what, **event})


def layout(policy: ModesPolicy, mode: str) -> bytes:
    """The document of a mode's layout, as mig-parted's file has it, with the label to apply as `selected`."""
    found = policy.named(mode)
    label = "" if found is None else found.layout
    entries = []
    for entry in policy.mig_configs.get(label, ()):
        said: dict[str, object] = {
            "devices": "all" if entry.devices is None else list(entry.devices),
            "mig-enabled": entry.mig_enabled,
            "mig-devices": dict(entry.mig_devices),
        }
        if entry.device_filter:
            said["device-filter"] = [f"0x{number:08X}" for number in entry.device_filter]
        entries.append(said)
    return msgspec.json.encode({"version": "v1", "mig-configs": {label: entries}, "selected": label})
