"""Policy files: TOML in, a checked `PoolPolicy` out, and back.

Every mistake of a file is reported at once, each with its key, its line, what was given and what is allowed.
The keys, their units and limits stand once, in `schema`; `dump_toml` writes them as comments, and
docs/policy.md is tested against them.
"""

from __future__ import annotations

from hybridsched.policyfile.files import (
    PRESETS,
    LoadedPolicy,
    PolicyError,
    check_policy,
    dump_toml,
    load_policy,
    parse_policy,
    preset_path,
)
from hybridsched.policyfile.schema import Problem, keys

__all__ = [
    "PRESETS",
    "LoadedPolicy",
    "PolicyError",
    "Problem",
    "check_policy",
    "dump_toml",
    "keys",
    "load_policy",
    "parse_policy",
    "preset_path",
]
