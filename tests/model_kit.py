"""Models for tests: config.json and weights of the right sizes, with no numbers in them (sparse files)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4, "U8": 1}

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""Meta-Llama-3-8B, whose figures vLLM's developers have published."""

TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

Rows = Mapping[str, tuple[str, Sequence[int]]]
"""Tensor -> type and shape."""


def tensors(config: Mapping[str, Any], dtype: str = "BF16") -> dict[str, tuple[str, Sequence[int]]]:
    """Llama's tensors for this configuration."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    rows: dict[str, tuple[str, Sequence[int]]] = {
        "model.embed_tokens.weight": (dtype, (config["vocab_size"], hidden)),
        "model.norm.weight": (dtype, (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        rows["lm_head.weight"] = (dtype, (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        rows |= {
            f"{at}self_attn.q_proj.weight": (dtype, (queries, hidden)),
            f"{at}self_attn.k_proj.weight": (dtype, (keys, hidden)),
            f"{at}self_attn.v_proj.weight": (dtype, (keys, hidden)),
            f"{at}self_attn.o_proj.weight": (dtype, (hidden, queries)),
            f"{at}mlp.gate_proj.weight": (dtype, (inner, hidden)),
            f"{at}mlp.up_proj.weight": (dtype, (inner, hidden)),
            f"{at}mlp.down_proj.weight": (dtype, (hidden, inner)),
            f"{at}input_layernorm.weight": (dtype, (hidden,)),
            f"{at}post_attention_layernorm.weight": (dtype, (hidden,)),
        }
    return rows


def write_tensors(file: Path, rows: Rows) -> int:
    """A safetensors file; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in rows.items():
        end = at + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + at)
    return at


def write_model(
    folder: Path, config: Mapping[str, Any], rows: Rows | None = None, *, shards: int = 1
) -> Path:
    """A model's folder; with more than one shard it has an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rows = tensors(config) if rows is None else rows
    if shards == 1:
        write_tensors(folder / "model.safetensors", rows)
        return folder
    placed = {name: f"model-{at % shards:05}-of-{shards:05}.safetensors" for at, name in enumerate(rows)}
    for file in set(placed.values()):
        write_tensors(folder / file, {name: row for name, row in rows.items() if placed[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder
