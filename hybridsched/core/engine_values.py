"""What an engine is planned from and what comes of it: the values of `core.engine_plan`."""

from __future__ import annotations

from hybridsched.core.gpus import Device
from hybridsched.core.values import Value


class Wish(Value, frozen=True, kw_only=True):
    """What to plan for. None: to be recommended."""

    device: Device | None
    """None: vLLM on the CPU, whose KV cache is `kv_space_bytes`."""
    gpus: int = 1
    """How many such devices one engine may use."""
    kv_dtype: str = "auto"
    """A name of `DTYPE_BYTES`; auto: what the checkpoint says, else as its weights."""
    kv_space_bytes: int | None = None
    """KV cache that is given and not to be worked out (VLLM_CPU_KVCACHE_SPACE)."""
    lengths: tuple[int, ...] = ()
    """Prompt and output tokens of each request of a trace, in ascending order; empty: no trace."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    share: float | None = None
    """gpu_memory_utilization."""


class Step(Value, frozen=True, kw_only=True):
    """One line of the reasoning."""

    name: str
    value: float | int | str
    unit: str
    """bytes, tokens, requests, GPUs or empty."""
    why: str


class EnginePlan(Value, frozen=True, kw_only=True):
    """What to start the engine with, and the sums behind it. Bytes are those of each GPU."""

    device: str
    architecture: str
    dtype: str
    kv_dtype: str
    tensor_parallel: int
    gpu_memory_utilization: float | None
    """None: on the CPU, where the KV cache has a size of its own."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    memory_bytes: int | None
    weights_bytes: int
    activation_bytes: int
    overhead_bytes: int
    """Libraries, graphs, and the buffers between GPUs."""
    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    """As vLLM reports it."""
    full_length_requests: float
    """Requests of `max_model_len` that fit at once."""
    steps: tuple[Step, ...]


class NoFit(Value, frozen=True, kw_only=True):
    """It cannot be started so."""

    why: str
    would_fit: tuple[str, ...]
    """Changes with which it could, each tried by itself."""
    steps: tuple[Step, ...]


class WishError(ValueError):
    """The wish contradicts the model or the device; the message says what is allowed."""
