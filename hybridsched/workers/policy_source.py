"""The policy in force: the last good one, made ready for the pool's speed once per change."""

from __future__ import annotations

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.log import get_logger
from hybridsched.store.policy import PolicyError, decode_policy

_log = get_logger("policy-worker")


class PolicySource:
    """Takes up what stands in Redis; keeps the last good policy when that is broken or gone."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._raw: bytes | None = None
        self._read = False
        self.policy: PoolPolicy | None = None
        """In force, at the pool's speed; None until there has been a good one."""
        self.fallback = PoolPolicy(name="none", kind=PolicyKind.ONLINE_ONLY)
        """Its cycle and lease count while there is no policy."""
        self.problem = ""
        """Why what stands in Redis is not in force; empty when it is."""

    def take(self, raw: bytes | None) -> PoolPolicy | None:
        """The policy in force, given the text that stands in Redis now."""
        if self._read and raw == self._raw:
            return self.policy
        self._raw, self._read = raw, True
        try:
            policy = decode_policy(raw)
            if policy is not None:
                _check(policy)
        except PolicyError as error:
            self._refuse(str(error))
            return self.policy
        if policy is None:
            self._refuse("no policy is set; publish one with `hybridsched pool policy set FILE`")
            return self.policy
        self.problem = ""
        self.policy = policy.at_speed(self._speed)
        _log.info("A policy is in force.", key="policy_taken", name=policy.name, version=policy.version)
        return self.policy

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        kept = "every gate stays closed" if self.policy is None else f"version {self.policy.version} stays"
        _log.warning(f"The policy in Redis cannot be used: {kept}.", key="policy_refused", problem=problem)


def _check(policy: PoolPolicy) -> None:
    """What a policy written past `hybridsched pool policy set` could break the worker with."""
    cycle = policy.cycle
    if not (0 < cycle.interval_ms <= cycle.lease_ms):
        raise PolicyError(
            f"the policy in Redis has cycle.interval_ms {cycle.interval_ms:g} and cycle.lease_ms "
            f"{cycle.lease_ms:g}; the interval must be above 0 and no longer than the lease"
        )
