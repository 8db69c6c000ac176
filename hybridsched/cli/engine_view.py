"""Plans and profiles of engines as text and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.core.engine_values import EnginePlan, NoFit, Step
from hybridsched.core.gpus import GIB, MIB

if TYPE_CHECKING:
    from hybridsched.core.model_shape import ModelShape
    from hybridsched.engines.devices import Choice
    from hybridsched.engines.vllm_command import EngineCommand
    from hybridsched.store.engine_profiles import EngineProfile

SCHEMA = 1
"""Of the JSON of `engine plan`."""


def refused(found: EnginePlan | NoFit) -> bool:
    return isinstance(found, NoFit)


def as_json(shape: ModelShape, found: EnginePlan | NoFit) -> str:
    """`fits`, the model's notes, and the plan or the refusal."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "fits": not refused(found),
            "notes": list(shape.notes),
            ("plan" if isinstance(found, EnginePlan) else "refusal"): msgspec.to_builtins(found),
        },
        indent=2,
    )


def as_text(shape: ModelShape, found: EnginePlan | NoFit) -> str:
    """One line for each step, then what follows."""
    lines = [f"{shape.architecture}, {shape.layers} layers, {shape.dtype}"]
    lines += [f"  {note}" for note in shape.notes]
    values = [_value(step) for step in found.steps]
    wide = max(len(step.name) for step in found.steps)
    long = max(len(value) for value in values)
    lines += [
        f"{step.name:<{wide}}  {value:>{long}}  {step.why}".rstrip()
        for step, value in zip(found.steps, values, strict=True)
    ]
    if isinstance(found, NoFit):
        lines += ["", refusal(found)]
    return "\n".join(lines)


def refusal(found: NoFit) -> str:
    """Why not, and what would."""
    lines = [f"It does not fit: {found.why}."]
    if found.would_fit:
        lines += ["It would fit with one of:", *(f"  {one}" for one in found.would_fit)]
    else:
        lines.append(
            "No single change makes it fit: a smaller model, or several of a shorter length, more GPUs, fp8."
        )
    return "\n".join(lines)


def command_text(command: EngineCommand) -> str:
    """As it could be typed into a shell."""
    setting = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.environment.items())]
    return " ".join([*setting, shlex.join(command.argv)])


def launch_notes(command: EngineCommand, choice: Choice | None) -> list[str]:
    """What the operator should know before the start."""
    notes = []
    if command.yours:
        notes.append(f"Your own {', '.join(command.yours)} are taken; the figures above are with the plan's.")
    if choice is not None and choice.note:
        notes.append(choice.note)
    return notes


def profiles_json(profiles: Sequence[EngineProfile]) -> str:
    rows: list[dict[str, Any]] = [msgspec.to_builtins(one) for one in profiles]
    return json.dumps(rows, indent=2)


def profiles_text(profiles: Sequence[EngineProfile]) -> str:
    """A table."""
    heads = ("model", "device", "GPUs", "load", "KV per token", "KV tokens", "planned", "output tokens/s")
    rows = [heads, *(_row(one) for one in profiles)]
    wide = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    left = 2  # model and device are words, the rest numbers
    return "\n".join(
        "  ".join(
            cell.ljust(size) if at < left else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(one: EngineProfile) -> tuple[str, ...]:
    return (
        one.model,
        one.device,
        str(one.tensor_parallel),
        f"{one.load_s:.1f} s",
        f"{one.kv_bytes_per_token:,} B",
        "unknown" if one.kv_tokens is None else f"{one.kv_tokens:,}",
        f"{one.kv_tokens_planned:,}",
        "-" if one.throughput is None else f"{one.throughput.output_tokens_per_s:,.0f}",
    )


def _value(step: Step) -> str:
    value = step.value
    if isinstance(value, str):
        return value
    if step.unit == "bytes":
        for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
            if abs(value) >= size:
                return f"{value / size:,.2f} {unit}"
        return f"{value:,} bytes"
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return f"{text} {step.unit}".rstrip() if step.unit in ("tokens",) else text
