"""The policy in force, made ready for the pool's speed once per change."""

from __future__ import annotations

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.log import get_logger
from hybridsched.store.policy import PolicyError, decode_policy
from hybridsched.workers.policy_checked import check

_log = get_logger("policy-worker")


class PolicySource:
    """Takes up what stands in Redis.

    A bad policy is refused and the last good one stays: somebody wanted a policy, and slipped. One that is
    gone is no longer in force: who deletes it wants no gate open, and a Redis that lost it lost the holds.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._raw: bytes | None = None
        self._read = False
        self.policy: PoolPolicy | None = None
        """In force, at the pool's speed; None while there is none."""
        self.last = PoolPolicy(name="none", kind=PolicyKind.ONLINE_ONLY)
        """The last that was in force. Its cycle, lease and Slurm part count on while there is none."""
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
                check(policy)
        except PolicyError as error:
            self._refuse(str(error))
            return self.policy
        if policy is None:
            self.policy = None
            self._refuse("no policy is set; publish one with `hybridsched pool policy set FILE`")
            return None
        self.problem = ""
        self.policy = self.last = policy.at_speed(self._speed)
        _log.info("A policy is in force.", key="policy_taken", name=policy.name, version=policy.version)
        return self.policy

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        kept = "every gate is closed" if self.policy is None else f"version {self.policy.version} stays"
        _log.warning(f"No policy can be taken up from Redis: {kept}.", key="policy_refused", problem=problem)
