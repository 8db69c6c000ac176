"""MIG without a device: profiles and placements by model, layouts, the least change between two states."""

from __future__ import annotations

from hybridsched.core.mig.layouts import (
    Layout,
    LayoutEntry,
    LayoutFileError,
    export,
    layout_flaws,
    parse_layouts,
    profile_memory_bytes,
    wants,
)
from hybridsched.core.mig.placing import MigRefusalError, fits, place, refusal
from hybridsched.core.mig.plan import back, difference, plan
from hybridsched.core.mig.profiles import MODELS, PCI_IDS, gres_type, model_of, nominal_gb
from hybridsched.core.mig.values import Act, Compute, Gpu, GpuPlan, Instance, Piece, Plan, Profile, Step, Want

__all__ = [
    "MODELS",
    "PCI_IDS",
    "Act",
    "Compute",
    "Gpu",
    "GpuPlan",
    "Instance",
    "Layout",
    "LayoutEntry",
    "LayoutFileError",
    "MigRefusalError",
    "Piece",
    "Plan",
    "Profile",
    "Step",
    "Want",
    "back",
    "difference",
    "export",
    "fits",
    "gres_type",
    "layout_flaws",
    "model_of",
    "nominal_gb",
    "parse_layouts",
    "place",
    "plan",
    "profile_memory_bytes",
    "refusal",
    "wants",
]
