"""A model's folder as a `ModelShape`: its config.json and the headers of its weights, without torch.

Only architectures whose fields are known are read (`architectures.KNOWN`): a field that means something
else, or a default that lives in code, would give a number that looks right. What is missing is named, never
guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hybridsched.core.model_shape import DTYPE_BYTES, ModelShape, Weights
from hybridsched.engines.model_config import Config, layer_groups, mlp_width, own_length
from hybridsched.engines.safetensors_header import ModelFileError, Tensor, read_folder

__all__ = ["ModelFileError", "read_model"]

_FLOATS = {"F64", "F32", "F16", "BF16"}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_COPIED = (
    "q_a_proj.",
    "kv_a_proj_with_mqa.",
    "fused_qkv_a_proj.",
    "mlp.gate.",
    "block_sparse_moe.gate.",
    "router.",
)
"""Matrices that vLLM keeps whole on each GPU: those into the latent space, and the choice of experts."""
_KEYS_VALUES = (".k_proj.", ".v_proj.")


def read_model(folder: Path, *, dtype: str = "auto") -> ModelShape:
    """The model in `folder`.

    `dtype`: how the engine shall hold it, a name of `DTYPE_BYTES`; auto: as its configuration says, but
    float32 as bfloat16, which is what vLLM does (ModelConfig, dtype auto).

    Raises:
        ModelFileError: a file is missing, truncated or unreadable; the architecture is unknown; a field is
        missing.
    """
    config = _config(folder)
    tensors = read_folder(folder)
    notes: list[str] = []
    chosen = _dtype(config, dtype, tensors, notes)
    groups = layer_groups(config, notes)
    return ModelShape(
        architecture=config.architecture,
        dtype=chosen,
        kv_dtype=_kv_dtype(config, notes),
        hidden_size=config.count("hidden_size"),
        mlp_width=mlp_width(config),
        vocab_size=config.count("vocab_size"),
        attention_heads=config.count("num_attention_heads"),
        groups=groups,
        own_length_tokens=own_length(config, _tokenizer_length(folder), notes),
        weights=_weights(config, tensors, chosen, notes),
        notes=tuple(notes),
    )


def _config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        is_folder, is_there = folder.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ModelFileError(f"{folder} cannot be read: {error.strerror}") from None
    if not is_folder:
        raise ModelFileError(
            f"{folder} is no folder; give the one that holds the model's config.json and *.safetensors"
        )
    if not is_there:
        raise ModelFileError(f"{path} does not exist; give the folder that holds the model's config.json")
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read as a JSON object: {error}") from None
    return Config.of(path, fields)


def _tokenizer_length(folder: Path) -> int | None:
    """The tokenizer's own limit, which vLLM takes into account; None: none is given."""
    path = folder / "tokenizer_config.json"
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None  # vLLM itself says what is wrong with a tokenizer
    limit = fields.get("model_max_length")
    # Tokenizers without a limit have 10^30 here.
    return limit if isinstance(limit, int) and 0 < limit < 10**12 else None


def _dtype(config: Config, wanted: str, tensors: list[Tensor], notes: list[str]) -> str:
    if wanted != "auto":
        if wanted not in ("float32", "bfloat16", "float16"):
            raise ModelFileError(
                f"dtype {wanted!r} is not allowed; there are auto, bfloat16, float16, float32"
            )
        return wanted
    named = config.fields.get("dtype") or config.fields.get("torch_dtype")
    if named is None:
        held: dict[str, int] = {}
        for one in tensors:
            if one.dtype in _STORED:
                held[_STORED[one.dtype]] = held.get(_STORED[one.dtype], 0) + one.stored_bytes
        if not held:
            raise ModelFileError(f"{config.path} has no dtype, and no tensor is of one; give --dtype")
        named = max(held, key=lambda name: held[name])
        notes.append(f"dtype is not in config.json: most weights are {named}")
    if named == "float32":
        notes.append("float32 is held as bfloat16, vLLM's choice for dtype auto")
        return "bfloat16"
    if not isinstance(named, str) or named not in DTYPE_BYTES or named.startswith("fp8"):
        raise ModelFileError(
            f"{config.path} has dtype {named!r}; bfloat16, float16 and float32 are known: give --dtype"
        )
    return named


def _kv_dtype(config: Config, notes: list[str]) -> str | None:
    """The KV cache's type by the checkpoint, as vLLM reads it (get_kv_cache_quant_algo_string)."""
    quantization = config.fields.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    inner = quantization.get("quantization")
    places = (inner if isinstance(inner, dict) else {}, quantization)
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    wanted = next((place[name] for name in names for place in places if place.get(name)), None)
    if wanted is None:
        return None
    eight_bits = isinstance(wanted, dict) and wanted.get("num_bits") == 8 and wanted.get("type") == "float"
    if not eight_bits and not (isinstance(wanted, str) and wanted.lower() in ("fp8", "fp8_e4m3")):
        raise ModelFileError(
            f"{config.path} wants a KV cache of {str(wanted)[:80]!r} (quantization_config); fp8 is known. "
            "Start it by hand: vLLM says its 'KV cache size'"
        )
    notes.append("the checkpoint wants a KV cache of fp8")
    return "fp8"


def _weights(config: Config, tensors: list[Tensor], dtype: str, notes: list[str]) -> Weights:
    quantization = config.fields.get("quantization_config")
    method = None
    if quantization is not None:
        name = quantization.get("quant_method") if isinstance(quantization, dict) else None
        method = str(name or "quantized")
    layers = config.count("num_hidden_layers")
    tied = config.fields.get("tie_word_embeddings") is True
    divided = kv = copied = kept = 0
    for one in tensors:
        if _skipped(one.name, layers, tied):
            continue
        kept += 1
        size = one.stored_bytes
        if method is None and one.dtype in _FLOATS:
            size = one.numbers * DTYPE_BYTES[dtype]
        if len(one.shape) < 2 or any(part in one.name for part in _COPIED):
            copied += size
        elif any(part in one.name for part in _KEYS_VALUES):
            kv += size
        else:
            divided += size
    if kept < len(tensors):
        notes.append(
            f"{len(tensors) - kept} tensors are not loaded by vLLM: tied, computed, or of more layers"
        )
    return Weights(
        divided_bytes=divided, kv_divided_bytes=kv, copied_bytes=copied, tensors=kept, quantized=method
    )


def _skipped(name: str, layers: int, tied: bool) -> bool:
    """Tensors that vLLM does not load: a tied output layer, rotary tables, layers for drafting."""
    if tied and name == "lm_head.weight":
        return True
    if name.endswith((".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")):
        return True
    parts = name.split(".")
    return any(
        part == "layers" and parts[at + 1].isdigit() and int(parts[at + 1]) >= layers
        for at, part in enumerate(parts[:-1])
    )
