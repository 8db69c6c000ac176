"""The tables of a policy file that say how online is packed."""

from __future__ import annotations

from pydantic import Field

from hybridsched.policyfile.fields import Ms, MsOrZero, Share, Table, why


class PackTable(Table):
    enabled: bool = Field(
        default=False, description="whether online requests are packed onto the fewest replicas"
    )
    max_inflight: int = Field(
        default=32,
        description="requests: online requests of a replica before the next in order is used",
        ge=1,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    max_wait_tokens: float = Field(
        default=4096.0,
        description="tokens: load of a replica before the next in order is used",
        ge=1,
        le=100_000_000,
        json_schema_extra=why("what a request finds ahead of it is counted in prompt tokens"),
    )
    objective_share: Share = Field(
        default=0.7, description="0..1: caps shrink while a mean latency is above this share of its objective"
    )
    least_fill: Share = Field(
        default=0.1, description="0..1: caps never shrink below this share of themselves"
    )
    adjust_ms: Ms = Field(default=5000.0, description="ms: between two looks at the measured latency")
    burst_quantile: Share = Field(
        default=0.99,
        description="0..1: which quarter second of the last minutes is the burst to have room for",
    )
    spare: int = Field(
        default=1,
        description="replicas beyond a burst's reach whose offline iterations stay short too",
        ge=0,
        le=65_536,
        json_schema_extra=why("no pool has more replicas"),
    )
    gap_window_ms: float = Field(
        default=150.0,
        description="ms: idle window of the replicas within a burst's reach",
        ge=1,
        le=3_600_000,
        json_schema_extra=why(
            "below 1 ms nothing was observed; kind unprotected is the one that does not look"
        ),
    )
    gap_slice_tokens: int = Field(
        default=64,
        description="tokens: offline prompt tokens per iteration in online's gaps; 0: offline.slice_tokens",
        ge=0,
        le=1_000_000,
        json_schema_extra=why("no engine takes more in one iteration"),
    )
    gap_ms: MsOrZero = Field(
        default=1000.0,
        description="ms: a replica within reach counts as in a gap for this long after online left",
    )
    far_slice_tokens: int = Field(
        default=2048,
        description="tokens: offline prompt tokens per iteration beyond a burst's reach; 0: prompts whole",
        ge=0,
        le=1_000_000,
        json_schema_extra=why("no engine takes more in one iteration"),
    )


class HeadroomTable(Table):
    tpot_share: Share = Field(
        default=0.6, description="0..1: longest iteration with offline work, as a share of slo.tpot_ms"
    )
    peer_share: float = Field(
        default=0.9,
        description="0..: the same as a share of the time per token on the first replica packed; 0: not",
        ge=0,
        le=10,
        json_schema_extra=why("ten times as slow as the fullest replica is no service"),
    )
    decode_share: Share = Field(
        default=0.8, description="0..1: share of that which may be spent without offline prompts"
    )
    calm_share: float = Field(
        default=0.8,
        description="0..1: from this share of an objective on, measured latency takes from the iteration",
        ge=0,
        le=0.99,
        json_schema_extra=why("at the objective itself nothing is left"),
    )
    max_backlog_tokens: float = Field(
        default=2048.0,
        description="tokens: offline leaves while online has more load than this on the replica",
        ge=0,
        le=100_000_000,
        json_schema_extra=why("what a request finds ahead of it is counted in prompt tokens"),
    )
    least_slice_tokens: int = Field(
        default=64,
        description="tokens: with room for less prompt in an iteration no offline request begins",
        ge=16,
        le=1_000_000,
        json_schema_extra=why("a slice is whole KV blocks"),
    )
    max_error: Share = Field(
        default=0.3,
        description="0..1: mean relative error of fitted iteration times that is still believed",
    )
    max_fit_age_ms: Ms = Field(
        default=600_000.0, description="ms: iteration times fitted longer ago are not believed"
    )
