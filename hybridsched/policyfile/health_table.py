"""The table [health] of a policy file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hybridsched.policyfile.fields import Table, why


class HealthTable(Table):
    doubt_ms: float = Field(
        default=5_000.0,
        description="ms: requests held with no counter moving, or metrics unread, this long: it is tested",
        ge=500,
        le=600_000,
        json_schema_extra=why("a long iteration moves no counter; after 10 min nobody waits for an engine"),
    )
    test_ms: float = Field(
        default=10_000.0,
        description="ms: an engine that answers no small request within this, and does nothing else, hangs",
        ge=500,
        le=600_000,
        json_schema_extra=why("the small request waits for iterations that run; after 10 min nobody waits"),
    )
    drain_ms: float = Field(
        default=30_000.0,
        description="ms: what requests in flight get before an engine that works is started again",
        ge=0,
        le=3_600_000,
        json_schema_extra=why("it takes no new request for this long"),
    )
    memory_growth_mib: Annotated[float, Field(gt=0, le=100_000_000)] | None = Field(
        default=None,
        description="MiB: an engine's processes may grow by this much once settled; unset: not looked at",
    )
    settle_ms: float = Field(
        default=60_000.0,
        description="ms: an engine's memory settles for this long after it begins to serve",
        ge=0,
        le=86_400_000,
        json_schema_extra=why("growth is measured from there"),
    )
    restarts: int = Field(
        default=3,
        description="restarts of an engine within an hour, at most; after that it stays out",
        ge=0,
        le=1_000,
        json_schema_extra=why("one that fails again at once is broken, and its log should be read"),
    )
