"""What of a model decides how much memory its engine needs, and the sums over it.

Sizes are those of vLLM's KV cache: blocks of tokens, all of one size in bytes, shared by groups of layers
of one kind (vLLM, docs/design/hybrid_kv_cache_manager.md; v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.values import Value

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of one number, by vLLM's names of types."""


class Attention(StrEnum):
    """How the layers of a group keep their past."""

    FULL = "full"
    SLIDING = "sliding"
    """Only the last `window_tokens`."""
    LATENT = "latent"
    """Multi-head latent attention (DeepSeek-V2): one compressed vector a token, the same on every GPU."""


class LayerGroup(Value, frozen=True, kw_only=True):
    """Layers of one kind."""

    attention: Attention
    layers: int
    kv_heads: int
    """1 for latent attention."""
    key_size: int
    """Numbers in a head's key; for latent attention in the whole vector."""
    value_size: int
    """Numbers in a head's value; 0 for latent attention."""
    window_tokens: int | None = None
    """Of sliding attention."""

    def token_bytes(self, kv_number_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes that one layer keeps of one token on one of the GPUs.

        Heads are spread over the GPUs; where there are more GPUs than heads each GPU has one.
        """
        if self.attention is Attention.LATENT:
            return self.key_size * kv_number_bytes
        heads = max(1, self.kv_heads // tensor_parallel)
        return heads * (self.key_size + self.value_size) * kv_number_bytes

    def sequence_blocks(self, tokens: int, block_tokens: int, in_flight_tokens: int) -> int:
        """Blocks of a request with `tokens`, while the engine computes `in_flight_tokens` ahead.

        A window keeps itself and what is in flight, and may begin in the middle of a block, for which vLLM
        counts one more (SlidingWindowSpec.max_admission_blocks_per_request).
        """
        if self.window_tokens is None:
            return _ceil(tokens, block_tokens)
        return _ceil(min(self.window_tokens - 1 + in_flight_tokens, tokens), block_tokens) + 1


class Weights(Value, frozen=True, kw_only=True):
    """Bytes of the weights in the engine's memory, by how tensor parallelism spreads them."""

    divided_bytes: int
    """Matrices, of which each GPU has its part."""
    kv_divided_bytes: int
    """Projections to keys and values: a part each, while there are as many heads as GPUs."""
    copied_bytes: int
    """Norms, biases, routers, projections into the latent space: on every GPU whole."""
    tensors: int
    quantized: str | None = None
    """Name of the method, such as `awq`; None: as they were trained."""

    @property
    def total_bytes(self) -> int:
        """On one GPU that has them all."""
        return self.divided_bytes + self.kv_divided_bytes + self.copied_bytes

    def gpu_bytes(self, tensor_parallel: int, kv_heads: int) -> int:
        """On each of `tensor_parallel` GPUs."""
        return (
            _ceil(self.divided_bytes, tensor_parallel)
            + _ceil(self.kv_divided_bytes, min(tensor_parallel, kv_heads))
            + self.copied_bytes
        )


class ModelShape(Value, frozen=True, kw_only=True):
    """A model, as far as memory goes."""

    architecture: str
    dtype: str
    """Of the weights and activations as the engine holds them."""
    kv_dtype: str | None = None
    """Of the KV cache, where the checkpoint says it; None: as `dtype`."""
    hidden_size: int
    mlp_width: int
    """Numbers of a token inside a feed-forward layer; of its experts together where there are some."""
    vocab_size: int
    attention_heads: int
    groups: tuple[LayerGroup, ...]
    own_length_tokens: int
    """The longest sequence that the model takes by its configuration."""
    weights: Weights
    notes: tuple[str, ...] = ()
    """How what stands in no field of config.json was found."""

    @property
    def layers(self) -> int:
        """With attention of any kind."""
        return sum(group.layers for group in self.groups)

    @property
    def kv_heads(self) -> int:
        """The fewest of any layer."""
        return min(group.kv_heads for group in self.groups)

    def token_bytes(self, kv_number_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes of one token in all layers on one of the GPUs, windows left aside."""
        return sum(
            group.layers * group.token_bytes(kv_number_bytes, tensor_parallel) for group in self.groups
        )

    def divides(self, tensor_parallel: int) -> bool:
        """Whether vLLM can spread the heads over so many GPUs."""
        return self.attention_heads % tensor_parallel == 0 and all(
            group.attention is Attention.LATENT
            or group.kv_heads % tensor_parallel == 0
            or tensor_parallel % group.kv_heads == 0
            for group in self.groups
        )


class KvPool(Value, frozen=True, kw_only=True):
    """How a KV cache is cut into blocks."""

    block_tokens: int
    block_bytes: int
    parts: tuple[tuple[LayerGroup, int], ...]
    """Each kind of layers, and how many blocks of it one block of tokens takes."""

    def capacity_tokens(self, kv_bytes: int, length_tokens: int, in_flight_tokens: int) -> int:
        """Tokens as vLLM counts them ("KV cache size"): requests of `length_tokens` at once, times that.

        Windows count as what they spare at that length; without them it is all blocks' tokens.
        """
        blocks = max(0, kv_bytes) // self.block_bytes
        return blocks * length_tokens // self.sequence_blocks(length_tokens, in_flight_tokens)

    def sequence_blocks(self, tokens: int, in_flight_tokens: int) -> int:
        """Blocks of one request with `tokens`; see `LayerGroup.sequence_blocks`."""
        return sum(
            count * group.sequence_blocks(tokens, self.block_tokens, in_flight_tokens)
            for group, count in self.parts
        )

    def sequence_bytes(self, tokens: int, in_flight_tokens: int) -> int:
        """The same in bytes."""
        return self.sequence_blocks(tokens, in_flight_tokens) * self.block_bytes


def kv_pool(
    shape: ModelShape, kv_number_bytes: int, tensor_parallel: int, block_tokens: int, *, hybrid: bool = True
) -> KvPool:
    """The blocks of one GPU.

    Models of one kind of layer have one block for a block of tokens, through all layers. In others vLLM
    cuts the layers into groups of one size, that of the rarest kind (of the most frequent one, where they
    differ by less than half), and pads the last: a block is one group's. Where it cannot (`hybrid` False: on
    CPUs) layers with a window keep everything.
    """
    groups = shape.groups
    if not hybrid and len(groups) > 1:
        widest = max(groups, key=lambda group: group.token_bytes(kv_number_bytes, tensor_parallel))
        together = msgspec.structs.replace(
            widest, attention=Attention.FULL, layers=shape.layers, window_tokens=None
        )
        groups = (together,)
    counts = [group.layers for group in groups]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    width = max(group.token_bytes(kv_number_bytes, tensor_parallel) for group in groups)
    return KvPool(
        block_tokens=block_tokens,
        block_bytes=size * width * block_tokens,
        parts=tuple((group, _ceil(group.layers, size)) for group in groups),
    )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
