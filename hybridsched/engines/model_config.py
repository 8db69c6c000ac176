"""The fields of config.json that decide about the KV cache, as each known architecture means them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.core.model_shape import Attention, LayerGroup
from hybridsched.engines.architectures import KNOWN, Architecture, Windows, known_list
from hybridsched.engines.safetensors_header import ModelFileError

MOST = 100_000_000
"""Largest number that a field may hold: ten times the longest context of any model."""

_MOST_LAYERS = 10_000
_MOST_STRETCH = 10_000


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A config.json whose architecture is known."""

    path: Path
    architecture: str
    rules: Architecture
    fields: dict[str, Any]
    """With the usual names, whatever the architecture calls them."""

    @classmethod
    def of(cls, path: Path, fields: dict[str, Any]) -> Config:
        """Raises ModelFileError: it names no architecture, or one that is not known."""
        named = fields.get("architectures")
        if not isinstance(named, list) or not named or not isinstance(named[0], str):
            raise ModelFileError(
                f"{path} has no field architectures, so nobody can say how its KV cache is made"
            )
        rules = KNOWN.get(named[0])
        if rules is None:
            raise ModelFileError(
                f"{path} is of the architecture {named[0]}, which is not known here, and its "
                "memory is not guessed. "
                f"Known are {known_list()}. Start it by hand: vLLM says its 'KV cache size'"
            )
        renamed = {rules.names.get(name, name): value for name, value in fields.items()}
        return cls(path=path, architecture=named[0], rules=rules, fields=renamed)

    def count(self, name: str) -> int:
        """A field that must be a whole number of 1 or more."""
        value = self.fields.get(name, self.rules.defaults.get(name))
        if value is None:
            raise ModelFileError(f"{self.path} has no {self.called(name)}, and {self.architecture} needs it")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise ModelFileError(
                f"{self.path}: {self.called(name)} is {value!r}; a whole number from 1 to {MOST:,} is needed"
            )
        return value

    def called(self, name: str) -> str:
        """What this architecture calls the field."""
        return next((own for own, usual in self.rules.names.items() if usual == name), name)


def layer_groups(config: Config, notes: list[str]) -> tuple[LayerGroup, ...]:
    """The layers with attention, by kind. Adds to `notes` what was not simply read.

    Raises:
        ModelFileError: a field is missing or cannot be, or a layer is of a kind that is not known.
    """
    layers = config.count("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelFileError(
            f"{config.path}: num_hidden_layers is {layers}; at most {_MOST_LAYERS} are allowed"
        )
    if config.rules.latent:
        rank, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        return (
            LayerGroup(
                attention=Attention.LATENT, layers=layers, kv_heads=1, key_size=rank + rotary, value_size=0
            ),
        )
    heads, kv_heads, size = _heads(config, notes)
    window = _window(config)
    kinds = _kinds(config, layers, window is not None, notes)
    groups = []
    for kind, count in sorted(Counter(kinds).items()):
        if kind is Attention.SLIDING and window is None:
            raise ModelFileError(f"{config.path} has sliding layers and no sliding_window")
        groups.append(
            LayerGroup(
                attention=kind,
                layers=count,
                kv_heads=kv_heads,
                key_size=size,
                value_size=size,
                window_tokens=window if kind is Attention.SLIDING else None,
            )
        )
    if heads % kv_heads:
        raise ModelFileError(
            f"{config.path}: {heads} heads cannot share {kv_heads} heads of keys and values evenly"
        )
    return tuple(groups)


def _heads(config: Config, notes: list[str]) -> tuple[int, int, int]:
    """Heads, heads of keys and values, numbers in a head."""
    heads = config.count("num_attention_heads")
    if config.rules.falcon:
        kv_heads = _falcon_kv_heads(config, heads)
    elif config.fields.get("num_key_value_heads") is None and config.rules.one_kv_head_each:
        kv_heads = heads
        notes.append(
            f"num_key_value_heads is not in config.json: {config.architecture} then has one for each head"
        )
    else:
        kv_heads = config.count("num_key_value_heads")
    if config.fields.get("head_dim") is not None or config.rules.head_dim_needed:
        return heads, kv_heads, config.count("head_dim")
    hidden = config.count("hidden_size")
    if hidden % heads:
        raise ModelFileError(
            f"{config.path}: hidden_size {hidden} cannot be divided by {heads} heads; head_dim is missing"
        )
    notes.append(f"head_dim is not in config.json: hidden_size {hidden} / {heads} heads = {hidden // heads}")
    return heads, kv_heads, hidden // heads


def _falcon_kv_heads(config: Config, heads: int) -> int:
    """Falcon's three ways: grouped in the new architecture, else one for all, else one each."""
    if config.fields.get("new_decoder_architecture") is True:
        return config.count("num_kv_heads")
    return 1 if config.fields.get("multi_query", True) is True else heads


def _window(config: Config) -> int | None:
    if config.rules.windows is Windows.NONE:
        return None
    if config.rules.windows is Windows.SWITCHED and config.fields.get("use_sliding_window") is not True:
        return None
    return None if config.fields.get("sliding_window") is None else config.count("sliding_window")


def _kinds(config: Config, layers: int, windowed: bool, notes: list[str]) -> list[Attention]:
    """The kind of each layer."""
    listed = config.fields.get("layer_types")
    if listed is not None and config.rules.windows is not Windows.NONE:
        if not isinstance(listed, list) or len(listed) != layers:
            raise ModelFileError(f"{config.path}: layer_types must list a kind for each of {layers} layers")
        return [_kind(config, str(one), windowed) for one in listed]
    if not windowed:
        return [Attention.FULL] * layers
    match config.rules.windows:
        case Windows.EVERY:
            return [Attention.SLIDING] * layers
        case Windows.PATTERN:
            pattern = config.count("sliding_window_pattern")
            notes.append(f"layer_types is not in config.json: every {pattern}th layer has full attention")
            return [Attention.SLIDING if (at + 1) % pattern else Attention.FULL for at in range(layers)]
        case _:
            raise ModelFileError(
                f"{config.path} has a sliding_window and no layer_types to say which layers have it"
            )


def _kind(config: Config, name: str, windowed: bool) -> Attention:
    if name == "full_attention":
        return Attention.FULL
    if name == "sliding_attention":
        return Attention.SLIDING if windowed else Attention.FULL
    raise ModelFileError(
        f"{config.path} has layers of the kind {name!r}; full_attention and sliding_attention are known. "
        "Start it by hand: vLLM says its 'KV cache size'"
    )


def mlp_width(config: Config) -> int:
    """Numbers of a token between the two halves of a feed-forward layer, of all its experts together."""
    dense = None
    if config.fields.get("intermediate_size") is not None:
        dense = config.count("intermediate_size")
    elif config.rules.mlp_of_hidden is not None:
        dense = config.rules.mlp_of_hidden * config.count("hidden_size")
    if not config.rules.experts_used:
        return config.count("intermediate_size") if dense is None else dense
    apart = config.fields.get("moe_intermediate_size") is not None
    width = config.count("moe_intermediate_size" if apart else "intermediate_size")
    width *= config.count(config.rules.experts_used)
    if config.fields.get("shared_expert_intermediate_size"):
        width += config.count("shared_expert_intermediate_size")
    # Some layers of such models have no experts.
    return max(width, dense or 0)


def own_length(config: Config, tokenizer_tokens: int | None, notes: list[str]) -> int:
    """The longest sequence, as vLLM finds it (ModelConfig, max_model_len)."""
    length = config.count("max_position_embeddings")
    rope = config.fields.get("rope_scaling") or config.fields.get("rope_parameters")
    if isinstance(rope, dict) and not config.rules.length_is_stretched:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        factor = rope.get("factor")
        # With the others of vLLM's kinds the field has the stretched length already.
        if (
            kind in ("linear", "dynamic", "ntk")
            and isinstance(factor, int | float)
            and 0 < factor <= _MOST_STRETCH
        ):
            length = int(length * factor)
            if length < 1:
                raise ModelFileError(
                    f"{config.path}: rope_scaling has factor {factor!r}, which leaves no token of "
                    f"{config.called('max_position_embeddings')}; 1 or more is usual"
                )
            notes.append(f"rope_scaling {kind} stretches the length to {length:,} tokens")
    if tokenizer_tokens is not None and tokenizer_tokens < length:
        notes.append(f"tokenizer_config.json allows {tokenizer_tokens:,} tokens")
        return tokenizer_tokens
    return length
