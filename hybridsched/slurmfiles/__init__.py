"""What Slurm loads for a site: rendered from a TOML file, put in place, and checked on the live cluster."""

from __future__ import annotations

from hybridsched.slurmfiles.checks import Finding, Level, examine, exit_status
from hybridsched.slurmfiles.facts import ClusterFacts, SlurmUnreachableError, gather
from hybridsched.slurmfiles.files import Change, InstallError
from hybridsched.slurmfiles.install import Plan, apply, plan
from hybridsched.slurmfiles.modes import mode_records, records_of
from hybridsched.slurmfiles.render import render
from hybridsched.slurmfiles.site import Site, SiteError, load_site, parse_site

__all__ = [
    "Change",
    "ClusterFacts",
    "Finding",
    "InstallError",
    "Level",
    "Plan",
    "Site",
    "SiteError",
    "SlurmUnreachableError",
    "apply",
    "examine",
    "exit_status",
    "gather",
    "load_site",
    "mode_records",
    "parse_site",
    "plan",
    "records_of",
    "render",
]
