"""A policy that was written to Redis past `pool policy set` keeps to the same limits, or is not taken up."""

from __future__ import annotations

from hybridsched.core.policy import PoolPolicy
from hybridsched.log import get_logger
from hybridsched.policyfile import check_policy
from hybridsched.store.policy import PolicyError

_log = get_logger("policy")


def check(policy: PoolPolicy) -> None:
    """Look whether a policy may be taken up.

    Raises:
        PolicyError: a value is out of its range, or two contradict each other; all of them are named.
    """
    problems = check_policy(policy)
    if problems:
        said = "; ".join(problem.text("").removeprefix(": ") for problem in problems)
        raise PolicyError(f"the policy in Redis cannot be used: {said}")


class PolicyGuard:
    """Says of each policy that a worker finds whether it may be taken up; a bad one is named once."""

    def __init__(self) -> None:
        self._passed: PoolPolicy | None = None
        self._refused: PoolPolicy | None = None

    def passes(self, policy: PoolPolicy) -> bool:
        """Whether it may; if not, the one in force stays."""
        if policy == self._passed:
            return True
        if policy == self._refused:
            return False
        try:
            check(policy)
        except PolicyError as error:
            self._refused = policy
            _log.warning(
                "A policy that was written to Redis is refused; the one in force stays. Publish one with "
                "`hybridsched pool policy set FILE`.",
                key="policy_refused",
                version=policy.version,
                problem=str(error),
            )
            return False
        self._passed = policy
        return True
