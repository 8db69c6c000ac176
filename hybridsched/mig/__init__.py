"""Cutting GPUs into MIG instances: one protocol; NVML, the mig-parted command, and a fake."""

from __future__ import annotations

from hybridsched.mig.protocol import MigDriver, MigError, Outcome, StepReport, carry_out

__all__ = ["MigDriver", "MigError", "Outcome", "StepReport", "carry_out"]
