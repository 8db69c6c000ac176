"""Policies: pure functions from the facts of one lane to a proposal, by the kind that a policy file names."""

from __future__ import annotations

from hybridsched.core.policies import consolidate, headroom, idle_window, online_only, unprotected
from hybridsched.core.policies._proposal import LaneFacts, PolicyFunction, Proposal
from hybridsched.core.policy import PolicyKind

REGISTRY: dict[PolicyKind, PolicyFunction] = {
    PolicyKind.IDLE_WINDOW: idle_window.propose,
    PolicyKind.CONSOLIDATE: consolidate.propose,
    PolicyKind.HEADROOM: headroom.propose,
    PolicyKind.UNPROTECTED: unprotected.propose,
    PolicyKind.ONLINE_ONLY: online_only.propose,
}

__all__ = ["REGISTRY", "LaneFacts", "PolicyFunction", "Proposal"]
