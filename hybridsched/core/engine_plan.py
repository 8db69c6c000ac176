"""How an engine should be started for a model on a device: memory, length, requests at once, GPUs. Pure.

One call: `plan_engine(shape, wish)` gives an `EnginePlan`, or a `NoFit` that says what would fit. Both say in
`steps` how they came to it. The sums are those that vLLM makes when it starts:

    KV cache = memory x gpu_memory_utilization - weights - activations of the largest step - libraries and
    graphs

Weights and KV cache are exact; activations, libraries and graphs are allowances, because they
depend on kernels that only the running engine knows (`core.engine_memory`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from hybridsched.core.engine_memory import Memory, memory_of, memory_steps, step_limits
from hybridsched.core.engine_values import EnginePlan, NoFit, Step, Wish, WishError
from hybridsched.core.gpus import GIB, GPUS, Device, slices, whole
from hybridsched.core.model_shape import DTYPE_BYTES, KvPool, ModelShape, kv_pool

__all__ = ["EnginePlan", "NoFit", "Step", "Wish", "WishError", "percentile_95", "plan_engine"]

_GRAIN_TOKENS = 256
"""Lengths are rounded up to this."""
_OVER = 1.2
"""Room over the 95th percentile of the trace."""
GPU_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
"""Tokens of a block: vLLM's defaults."""
STEPS_IN_FLIGHT = 2
"""vLLM prepares one step while another runs (async scheduling)."""
_MOST_PARALLEL = 8
"""GPUs of one node that are tried when nothing fits."""


def percentile_95(lengths: Sequence[int]) -> int:
    """The 95th percentile (nearest rank) of lengths in ascending order."""
    return lengths[math.ceil(0.95 * len(lengths)) - 1]


def plan_engine(shape: ModelShape, wish: Wish) -> EnginePlan | NoFit:
    """The plan with the fewest GPUs that fits.

    Raises:
        WishError: a length beyond the model's own, slices that should work together, an unknown type.
    """
    _check(shape, wish)
    tried = _try(shape, wish, 1)
    for count in _powers(wish.gpus):
        if isinstance(tried, EnginePlan):
            return tried
        if count > 1 and shape.divides(count):
            tried = _try(shape, wish, count)
    if isinstance(tried, EnginePlan):
        return tried
    return msgspec.structs.replace(tried, would_fit=tuple(_ways_out(shape, wish)))


def _check(shape: ModelShape, wish: Wish) -> None:
    if wish.gpus < 1:
        raise WishError(f"{wish.gpus} GPUs were given; 1 or more are allowed")
    device = wish.device
    if device is None and wish.kv_space_bytes is None:
        raise WishError("on the CPU the size of the KV cache must be given (--kv-gib)")
    if device is None and wish.gpus > 1:
        raise WishError("tensor parallelism is planned for GPUs; on the CPU give 1")
    if device is not None and device.profile is not None and wish.gpus > 1:
        raise WishError(
            f"{wish.gpus} slices {device.name} cannot hold one engine together: a process sees one "
            "slice, and there "
            "is no way from one to another. Give 1, a bigger slice, or whole GPUs"
        )
    if wish.max_model_len is not None and not 1 <= wish.max_model_len <= shape.own_length_tokens:
        raise WishError(
            f"a length of {wish.max_model_len} tokens was given; this model takes 1 to "
            f"{shape.own_length_tokens}"
        )
    if wish.share is not None and not 0.0 < wish.share <= 1.0:
        raise WishError(
            f"a share of {wish.share:g} of the memory was given; more than 0 and at most 1 is allowed"
        )
    if wish.max_num_seqs is not None and wish.max_num_seqs < 1:
        raise WishError(f"{wish.max_num_seqs} requests at once were given; 1 or more are allowed")
    if wish.kv_dtype != "auto" and wish.kv_dtype not in DTYPE_BYTES:
        raise WishError(
            f"{wish.kv_dtype!r} is no type of a KV cache; there are auto, {', '.join(DTYPE_BYTES)}"
        )


def _powers(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _try(shape: ModelShape, wish: Wish, count: int) -> EnginePlan | NoFit:
    """The plan on `count` GPUs."""
    kv_dtype = _kv_dtype(shape, wish)
    block_tokens = CPU_BLOCK_TOKENS if wish.device is None else GPU_BLOCK_TOKENS
    hybrid = wish.device is not None
    pool = kv_pool(shape, DTYPE_BYTES[kv_dtype], count, block_tokens, hybrid=hybrid)
    length, length_step = _length(shape, wish)
    step_tokens, most_seqs = step_limits(wish.device)
    wanted = most_seqs if wish.max_num_seqs is None else wish.max_num_seqs
    # vLLM refuses more requests at once than tokens in a step.
    step_tokens = max(step_tokens, wanted)

    in_flight = STEPS_IN_FLIGHT * step_tokens
    memory = memory_of(shape, wish, count, step_tokens, wanted)
    seqs, seqs_why = _requests(wish, pool, memory.kv_bytes, length, in_flight, wanted)
    # Fewer requests need less for their logits: what that frees is the KV cache's.
    memory = memory_of(shape, wish, count, step_tokens, seqs)
    whole_request = pool.sequence_bytes(length, in_flight)
    kv_tokens = pool.capacity_tokens(memory.kv_bytes, length, in_flight)
    per_token = shape.token_bytes(DTYPE_BYTES[kv_dtype], count)
    steps = [
        *memory_steps(shape, wish, count, memory, step_tokens, seqs),
        Step(name="KV per token", value=per_token, unit="bytes", why=_per_token_why(shape, kv_dtype, count)),
        length_step,
        Step(
            name="one request",
            value=whole_request,
            unit="bytes",
            why=f"of {length:,} tokens in blocks of {block_tokens}{_window_why(pool)}",
        ),
    ]
    if memory.kv_bytes < whole_request:
        return NoFit(why=_why_not(memory, whole_request, length, count), would_fit=(), steps=tuple(steps))
    full = memory.kv_bytes / whole_request
    steps += [
        Step(
            name="KV capacity",
            value=kv_tokens,
            unit="tokens",
            why=f"the KV cache in blocks of {pool.block_bytes:,} bytes; {full:.1f} requests of "
            f"{length:,} tokens",
        ),
        Step(name="max-num-seqs", value=seqs, unit="requests", why=seqs_why),
        Step(name="max-num-batched-tokens", value=step_tokens, unit="tokens", why=_step_why(wish.device)),
        _parallel_step(shape, wish, count),
    ]
    return EnginePlan(
        device="cpu" if wish.device is None else wish.device.name,
        architecture=shape.architecture,
        dtype=shape.dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=count,
        gpu_memory_utilization=memory.share,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=step_tokens,
        block_tokens=block_tokens,
        memory_bytes=memory.memory_bytes,
        weights_bytes=memory.weights_bytes,
        activation_bytes=memory.activation_bytes,
        overhead_bytes=memory.overhead_bytes,
        kv_bytes=memory.kv_bytes,
        kv_bytes_per_token=per_token,
        kv_tokens=kv_tokens,
        full_length_requests=full,
        steps=tuple(steps),
    )


def _kv_dtype(shape: ModelShape, wish: Wish) -> str:
    return wish.kv_dtype if wish.kv_dtype != "auto" else shape.kv_dtype or shape.dtype


def _length(shape: ModelShape, wish: Wish) -> tuple[int, Step]:
    """The longest request to take."""
    own = shape.own_length_tokens
    if wish.max_model_len is not None:
        length, why = wish.max_model_len, "as given"
    elif not wish.lengths:
        length, why = own, "the model's own; a trace (--trace) or --max-model-len makes it shorter"
    else:
        high = percentile_95(wish.lengths)
        rounded = math.ceil(high * _OVER / _GRAIN_TOKENS) * _GRAIN_TOKENS
        length = min(own, rounded)
        why = f"95th percentile of the trace, {high:,} tokens, plus 20 %, rounded up to {_GRAIN_TOKENS}"
        if length < rounded:
            why += f"; not past the model's own {own:,}"
    if wish.lengths:
        longer = len(wish.lengths) - bisect_right(wish.lengths, length)
        if longer:
            why += (
                f"; {longer:,} of {len(wish.lengths):,} requests of the trace are longer, vLLM refuses those"
            )
    return length, Step(name="max-model-len", value=length, unit="tokens", why=why)


def _requests(
    wish: Wish, pool: KvPool, kv_bytes: int, length: int, in_flight: int, most: int
) -> tuple[int, str]:
    """How many requests to run at once, and why."""
    if wish.max_num_seqs is not None:
        return wish.max_num_seqs, "as given"
    if not wish.lengths:
        return most, "vLLM's default for this device: without a trace nobody knows how long requests are"
    taken = [min(one, length) for one in wish.lengths]
    mean = math.ceil(sum(taken) / len(taken))
    room = kv_bytes // pool.sequence_bytes(mean, in_flight)
    if room >= most:
        return (
            most,
            f"vLLM's default for this device; {room:,} requests of the trace's mean, {mean:,} "
            "tokens, would fit",
        )
    return max(1, room), f"so many requests of the trace's mean, {mean:,} tokens, fill the KV cache"


def _per_token_why(shape: ModelShape, kv_dtype: str, count: int) -> str:
    number = DTYPE_BYTES[kv_dtype]
    parts = [
        f"{group.layers} {group.attention.value} layers x {group.token_bytes(number, count):,}"
        for group in shape.groups
    ]
    return f"{' + '.join(parts)} bytes, numbers of {number} bytes ({kv_dtype})"


def _window_why(pool: KvPool) -> str:
    windows = sorted({group.window_tokens for group, _ in pool.parts if group.window_tokens is not None})
    if not windows:
        return ""
    sizes = ", ".join(f"{one:,}" for one in windows)
    return f"; layers with a window keep it ({sizes} tokens) and {STEPS_IN_FLIGHT} steps"


def _step_why(device: Device | None) -> str:
    return "vLLM's default for " + ("the CPU" if device is None else "this device")


def _parallel_step(shape: ModelShape, wish: Wish, count: int) -> Step:
    if count > 1:
        why = f"the fewest GPUs that fit; {shape.attention_heads} heads can be divided by it"
    elif wish.device is not None and wish.device.profile is not None:
        why = "a slice works alone"
    else:
        why = "it fits on one"
    return Step(name="tensor-parallel-size", value=count, unit="GPUs", why=why)


def _why_not(memory: Memory, whole_request: int, length: int, count: int) -> str:
    where = "" if count == 1 else f" on each of {count} GPUs"
    if memory.kv_bytes <= 0:
        return (
            f"the weights need {_gib(memory.weights_bytes)} and the rest "
            f"{_gib(memory.activation_bytes + memory.overhead_bytes)}{where}, which is "
            f"{_gib(-memory.kv_bytes)} more than there is, before any KV cache"
        )
    return (
        f"one request of {length:,} tokens needs a KV cache of {_gib(whole_request)}{where}, "
        f"and {_gib(memory.kv_bytes)} is left for it"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _ways_out(shape: ModelShape, wish: Wish) -> Iterator[str]:
    """Changes that would make it fit; each is tried."""
    change = msgspec.structs.replace
    device = wish.device
    if wish.share is not None and _fits(shape, change(wish, share=None)):
        yield "a larger share of the memory: leave --gpu-memory-utilization out"
    if (shorter := _longest(shape, wish)) is not None:
        yield f"a shorter length: --max-model-len {shorter}"
    kv_dtype = _kv_dtype(shape, wish)
    # Storing it as fp8 is of use where the attention kernels read it: from 8.9 on.
    native = device is not None and device.compute_capability >= (8, 9)
    if native and DTYPE_BYTES[kv_dtype] > 1 and _fits(shape, change(wish, kv_dtype="fp8")):
        yield "a KV cache of half the size: --kv-cache-dtype fp8"
    if device is None:
        return
    if shape.weights.quantized is None and DTYPE_BYTES[shape.dtype] > 1:
        halved = change(
            shape.weights,
            divided_bytes=shape.weights.divided_bytes // DTYPE_BYTES[shape.dtype],
            kv_divided_bytes=shape.weights.kv_divided_bytes // DTYPE_BYTES[shape.dtype],
        )
        if _fits(change(shape, weights=halved), wish):
            yield "weights quantized to fp8"
    if device.profile is None:
        for count in _powers(_MOST_PARALLEL):
            more = change(wish, gpus=count)
            if count > wish.gpus and shape.divides(count) and _fits(shape, more, exactly=count):
                yield f"tensor parallelism: --gpus {count}"
                break
    for other in _larger(device):
        if _fits(shape, change(wish, device=other, gpus=1)):
            yield f"a larger device: --gpu {other.name}"
            break


def _larger(device: Device) -> Iterator[Device]:
    """Devices with more memory: slices of the same GPU, the GPU itself, then other GPUs."""
    own = next(gpu for gpu in GPUS if gpu.name == device.gpu)
    near = () if device.profile is None else (*slices(own), whole(own))
    others = (whole(gpu) for gpu in GPUS if gpu is not own)
    yield from (one for one in (*near, *others) if one.memory_bytes > device.memory_bytes)


def _fits(shape: ModelShape, wish: Wish, *, exactly: int | None = None) -> bool:
    counts = [exactly] if exactly is not None else list(_powers(wish.gpus))
    return any(shape.divides(count) and isinstance(_try(shape, wish, count), EnginePlan) for count in counts)


def _longest(shape: ModelShape, wish: Wish) -> int | None:
    """The longest length that fits, in whole grains; None: not even one grain does."""
    low, high = 0, _length(shape, wish)[0] // _GRAIN_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(shape, msgspec.structs.replace(wish, max_model_len=middle * _GRAIN_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return low * _GRAIN_TOKENS or None
