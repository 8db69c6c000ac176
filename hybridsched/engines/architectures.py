"""Which architectures are read, and what is special in the fields of each. Data.

From the configuration classes of transformers (names and defaults of fields) and the models of vLLM (which
layers keep a window). Models with images, sound, state-space or linear layers are not in it: their memory
is more than weights and a KV cache.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Windows(StrEnum):
    """How an architecture says which layers keep a window only."""

    NONE = "none"
    """None of them does, whatever stands in the file."""
    EVERY = "every"
    """All, where sliding_window is set; or by layer_types."""
    SWITCHED = "switched"
    """By layer_types, where use_sliding_window is true."""
    PATTERN = "pattern"
    """By layer_types, or all but every sliding_window_pattern-th."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one."""

    names: dict[str, str] = {}
    """Its own names of fields -> the usual ones."""
    defaults: dict[str, int] = {}
    """Values that hold when the field is missing, by the architecture's definition."""
    one_kv_head_each: bool = False
    """Without num_key_value_heads every head has its own keys and values."""
    head_dim_needed: bool = False
    """A head's size is not hidden_size / heads, so head_dim must be there."""
    windows: Windows = Windows.NONE
    length_is_stretched: bool = False
    """max_position_embeddings holds what rope_scaling makes of it, whatever its kind."""
    latent: bool = False
    falcon: bool = False
    mlp_of_hidden: int | None = None
    """Without intermediate_size a feed-forward layer is so many times as wide as hidden_size."""
    experts_used: str = ""
    """Field with the number of experts of a token."""


_PLAIN = Architecture(one_kv_head_each=True)
_GROUPED = Architecture()
_GPT2 = Architecture(
    names={"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
           "n_positions": "max_position_embeddings", "n_inner": "intermediate_size"},
    one_kv_head_each=True,
    mlp_of_hidden=4,
)  # fmt: skip

KNOWN: dict[str, Architecture] = {
    "CohereForCausalLM": _PLAIN,
    "Cohere2ForCausalLM": Architecture(windows=Windows.PATTERN),
    "DeepseekForCausalLM": Architecture(experts_used="num_experts_per_tok"),
    "DeepseekV2ForCausalLM": Architecture(latent=True, experts_used="num_experts_per_tok"),
    "DeepseekV3ForCausalLM": Architecture(latent=True, experts_used="num_experts_per_tok"),
    "FalconForCausalLM": Architecture(
        falcon=True, names={"ffn_hidden_size": "intermediate_size"}, mlp_of_hidden=4
    ),
    "GPT2LMHeadModel": _GPT2,
    "GPTNeoXForCausalLM": _PLAIN,
    "GemmaForCausalLM": Architecture(head_dim_needed=True),
    "Gemma2ForCausalLM": Architecture(
        head_dim_needed=True, windows=Windows.PATTERN, defaults={"sliding_window_pattern": 2}
    ),
    "Gemma3ForCausalLM": Architecture(
        head_dim_needed=True, windows=Windows.PATTERN, length_is_stretched=True
    ),
    "Glm4ForCausalLM": Architecture(head_dim_needed=True),
    "GptOssForCausalLM": Architecture(
        head_dim_needed=True, windows=Windows.PATTERN, experts_used="num_experts_per_tok"
    ),
    "GraniteForCausalLM": _PLAIN,
    "LlamaForCausalLM": _PLAIN,
    "MistralForCausalLM": Architecture(windows=Windows.EVERY),
    "MixtralForCausalLM": Architecture(windows=Windows.EVERY, experts_used="num_experts_per_tok"),
    "OlmoForCausalLM": _PLAIN,
    "Olmo2ForCausalLM": _PLAIN,
    "OPTForCausalLM": Architecture(one_kv_head_each=True, names={"ffn_dim": "intermediate_size"}),
    "PhiForCausalLM": _PLAIN,
    "Phi3ForCausalLM": Architecture(one_kv_head_each=True, windows=Windows.EVERY),
    "Qwen2ForCausalLM": Architecture(windows=Windows.SWITCHED),
    "Qwen2MoeForCausalLM": Architecture(windows=Windows.SWITCHED, experts_used="num_experts_per_tok"),
    "Qwen3ForCausalLM": Architecture(head_dim_needed=True, windows=Windows.SWITCHED),
    "Qwen3MoeForCausalLM": Architecture(
        head_dim_needed=True, windows=Windows.SWITCHED, experts_used="num_experts_per_tok"
    ),
    "StableLmForCausalLM": _GROUPED,
    "Starcoder2ForCausalLM": Architecture(windows=Windows.EVERY),
}


def known_list() -> str:
    """All names, for a message."""
    return ", ".join(KNOWN)
