"""What tables of a policy file are made of: their base, and the kinds of numbers that stand in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Ms = Annotated[float, Field(gt=0, le=86_400_000)]
MsOrZero = Annotated[float, Field(ge=0, le=86_400_000)]
Share = Annotated[float, Field(gt=0, le=1)]


def why(reason: str) -> dict[str, JsonValue]:
    """Why a value is bounded as it is; it stands in the message that refuses another."""
    return {"why": reason}


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
