"""How far the policy worker acts by itself."""

from __future__ import annotations

from enum import StrEnum


class Autonomy(StrEnum):
    SUGGEST = "suggest"
    """It says what it would do."""
    APPROVE = "approve"
    """It does what an operator has approved."""
    AUTO = "auto"
