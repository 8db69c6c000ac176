"""What is published without a policy, and the words for what came of publishing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateDecision, GateState, Hold, Snapshot
from hybridsched.store.gates import Outcome


def all_closed(snapshot: Snapshot) -> tuple[GateDecision, ...]:
    """Without a policy nothing opens."""
    return tuple(
        GateDecision(
            lane=lane.lane,
            state=GateState.CLOSED,
            reason=Reason.POLICY_MISSING,
            epoch=lane.epoch or 0,
        )
        for lane in snapshot.lanes
    )


def outcome_text(outcome: Outcome | None) -> str:
    """The word for the decision log; None: the gate stood so and was not published."""
    return "stands" if outcome is None else outcome.name.lower()


def shut_lanes(snapshot: Snapshot, shut: Mapping[str, str]) -> Snapshot:
    """The snapshot with a hold for each lane on a node where the modes let none open. `shut`: node -> why.

    As holds they stand in the decision log, so the cycle replays without anything known of modes.
    """
    nodes = {view.replica: view.node for view in snapshot.replicas}
    holds = [
        Hold(lane=lane.lane, by="modes", why=why, id="modes")
        for lane in snapshot.lanes
        if (why := shut.get(nodes.get(lane.replica, ""))) is not None
    ]
    return msgspec.structs.replace(snapshot, holds=(*snapshot.holds, *holds)) if holds else snapshot
