"""Where the memory of one GPU goes when an engine starts: the sums and allowances of `core.engine_plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridsched.core.engine_values import Step, Wish
from hybridsched.core.gpus import GIB, MIB, Device
from hybridsched.core.model_shape import DTYPE_BYTES, ModelShape
from hybridsched.core.values import Value

CONTEXT_BYTES = 640 * MIB
"""The CUDA context and what else is on the GPU before the engine counts: outside of the engine's share."""
MARGIN = 0.02
"""Of the memory, left outside of the engine's share: fragments, and what the driver takes later."""
LIBRARIES_BYTES = 320 * MIB
"""Workspaces of cuBLAS and attention kernels: 0.16 to 0.30 GiB in vLLM's own logs ("non_torch_memory")."""
GRAPHS_BYTES = 512 * MIB
"""CUDA graphs: 0.45 GiB in vLLM's own logs ("Estimated CUDA graph memory")."""
PARALLEL_BYTES = 1536 * MIB
"""NCCL and the buffers of custom all-reduce, with more than one GPU."""
LARGEST_SHARE = 0.95
"""Never more of the memory than this, however large the device is."""

_SAMPLER_COPIES = 3
"""Logits as 32-bit numbers, their sorted copy, and their probabilities."""


class Memory(Value, frozen=True, kw_only=True):
    """Where the memory of one GPU goes."""

    share: float | None
    memory_bytes: int | None
    weights_bytes: int
    activation_bytes: int
    overhead_bytes: int
    kv_bytes: int


def memory_of(shape: ModelShape, wish: Wish, count: int, step_tokens: int, seqs: int) -> Memory:
    weights = shape.weights.gpu_bytes(count, shape.kv_heads)
    number = DTYPE_BYTES[shape.dtype]
    forward = step_tokens * 3 * (shape.hidden_size + -(-shape.mlp_width // count)) * number
    logits = seqs * shape.vocab_size * 4 * _SAMPLER_COPIES
    device = wish.device
    if device is None:
        return Memory(
            share=None,
            memory_bytes=None,
            weights_bytes=weights,
            activation_bytes=forward + logits,
            overhead_bytes=0,
            kv_bytes=wish.kv_space_bytes or 0,
        )
    share = wish.share if wish.share is not None else _share(device)
    overhead = LIBRARIES_BYTES + GRAPHS_BYTES + (PARALLEL_BYTES if count > 1 else 0)
    left = int(device.memory_bytes * share) - weights - forward - logits - overhead
    return Memory(
        share=share,
        memory_bytes=device.memory_bytes,
        weights_bytes=weights,
        activation_bytes=forward + logits,
        overhead_bytes=overhead,
        kv_bytes=left if wish.kv_space_bytes is None else min(left, wish.kv_space_bytes),
    )


def _share(device: Device) -> float:
    """All of the device but its context and a margin, in whole percent."""
    free = 1.0 - CONTEXT_BYTES / device.memory_bytes - MARGIN
    return min(LARGEST_SHARE, math.floor(free * 100) / 100)


def step_limits(device: Device | None) -> tuple[int, int]:
    """vLLM's defaults (EngineArgs.get_batch_defaults, 0.32): tokens of one step, requests at once.

    They are given to vLLM all the same: it reads the memory of a slice from the whole GPU.
    """
    if device is None:
        return 2048, 128
    if device.memory_bytes >= 160 * GIB:
        return 16_384, 1024
    if device.memory_bytes >= 70 * GIB and not device.gpu.startswith("a100"):
        return 8192, 1024
    return 2048, 256


def memory_steps(
    shape: ModelShape, wish: Wish, count: int, memory: Memory, step_tokens: int, seqs: int
) -> Iterator[Step]:
    weights = shape.weights
    how = f"{weights.tensors:,} tensors, {weights.quantized or shape.dtype}"
    parts = "" if count == 1 else f", one of {count} parts; {weights.copied_bytes:,} bytes are on every GPU"
    activation = Step(
        name="activations",
        value=memory.activation_bytes,
        unit="bytes",
        why=f"allowance: a step of {step_tokens:,} tokens, and the logits of {seqs:,} requests",
    )
    weight = Step(name="weights", value=memory.weights_bytes, unit="bytes", why=how + parts)
    if wish.device is None:
        yield weight
        yield activation
        yield Step(
            name="KV cache",
            value=memory.kv_bytes,
            unit="bytes",
            why="as given (VLLM_CPU_KVCACHE_SPACE); the rest is beside it",
        )
        return
    yield Step(name="memory", value=wish.device.memory_bytes, unit="bytes", why=wish.device.name)
    share_why = (
        "as given"
        if wish.share is not None
        else f"leaves {CONTEXT_BYTES // MIB} MiB for the CUDA context and {MARGIN:.0%} for fragments; "
        f"at most {LARGEST_SHARE}"
    )
    yield Step(name="gpu-memory-utilization", value=memory.share or 0.0, unit="", why=share_why)
    yield weight
    yield activation
    yield Step(
        name="libraries and graphs",
        value=memory.overhead_bytes,
        unit="bytes",
        why="allowance: cuBLAS, attention kernels, CUDA graphs" + (", NCCL" if count > 1 else ""),
    )
    yield Step(
        name="KV cache",
        value=memory.kv_bytes,
        unit="bytes",
        why="what is left of the share" if wish.kv_space_bytes is None else "as given, at most what is left",
    )
