"""Models read from their files: shapes, weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridsched.core.engine_plan import EnginePlan, Wish, plan_engine
from hybridsched.core.model_shape import Attention, LayerGroup
from hybridsched.engines.architectures import KNOWN
from hybridsched.engines.model_files import ModelFileError, read_model
from hybridsched.engines.safetensors_header import read_folder, read_header
from tests.model_kit import LLAMA_8B, TINY, tensors, write_model, write_tensors


def one_group(folder: Path, dtype: str = "auto") -> LayerGroup:
    (group,) = read_model(folder, dtype=dtype).groups
    return group


def test_llama_3_8b_has_the_published_size(tmp_path: Path) -> None:
    """vLLM's log of it: "model weights take 14.96GiB", 128 KiB of KV cache for a token."""
    shape = read_model(write_model(tmp_path / "m", LLAMA_8B, shards=3))
    assert round(shape.weights.total_bytes / 2**30, 2) == 14.96
    assert shape.weights.tensors == 3 + 32 * 9
    assert shape.token_bytes(2) == 128 * 1024
    assert (shape.attention_heads, shape.kv_heads, shape.layers) == (32, 8, 32)
    assert shape.own_length_tokens == 8192


def test_weights_are_spread_by_what_they_are(tmp_path: Path) -> None:
    shape = read_model(write_model(tmp_path / "m", TINY))
    weights = shape.weights
    assert weights.copied_bytes == 5 * 64 * 2
    assert weights.kv_divided_bytes == 2 * 2 * 64 * 64 * 2
    stored = write_tensors(tmp_path / "x", tensors(TINY))
    assert weights.total_bytes == stored


@pytest.mark.parametrize(
    ("dtype", "held", "number"),
    [("auto", "bfloat16", 2), ("float32", "float32", 4), ("float16", "float16", 2)],
)
def test_float32_is_held_as_vllm_holds_it(tmp_path: Path, dtype: str, held: str, number: int) -> None:
    config = TINY | {"torch_dtype": "float32"}
    folder = write_model(tmp_path / "m", config, tensors(config, "F32"))
    shape = read_model(folder, dtype=dtype)
    assert shape.dtype == held
    assert shape.weights.total_bytes == sum(one.numbers for one in read_folder(folder)) * number


def test_a_tied_output_layer_counts_once(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    without = read_model(write_model(tmp_path / "a", tied))
    beside = read_model(write_model(tmp_path / "b", tied, tensors(TINY)))
    assert without.weights == beside.weights
    untied = read_model(write_model(tmp_path / "c", TINY))
    assert untied.weights.total_bytes - without.weights.total_bytes == 512 * 64 * 2
    assert any("not loaded" in note for note in beside.notes)


def test_quantized_weights_count_as_stored(tmp_path: Path) -> None:
    config = TINY | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    rows = {
        "model.embed_tokens.weight": ("F16", (512, 64)),
        "model.layers.0.self_attn.q_proj.qweight": ("I32", (64, 8)),
        "model.layers.0.self_attn.q_proj.scales": ("F16", (1, 64)),
        "model.layers.0.mlp.up_proj.weight_scale": ("F32", (1,)),
    }
    folder = write_model(tmp_path / "m", config, rows)
    weights = read_model(folder).weights
    assert weights.quantized == "awq"
    assert weights.total_bytes == 512 * 64 * 2 + 64 * 8 * 4 + 64 * 2 + 4


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "awq"}, None),
    ],
)
def test_the_checkpoint_may_say_the_type_of_the_kv_cache(
    tmp_path: Path, quantization: dict[str, Any], kv_dtype: str | None
) -> None:
    folder = write_model(tmp_path / "m", TINY | {"quantization_config": quantization})
    shape = read_model(folder)
    assert shape.kv_dtype == kv_dtype
    plan = plan_engine(shape, Wish(device=None, kv_space_bytes=2**30))
    assert isinstance(plan, EnginePlan)
    assert plan.kv_dtype == (kv_dtype or "bfloat16")
    assert plan.kv_bytes_per_token == 2 * 2 * 64 * (1 if kv_dtype else 2)


def test_a_type_of_kv_cache_that_is_not_known(tmp_path: Path) -> None:
    config = TINY | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}
    with pytest.raises(ModelFileError, match="KV cache of 'NVFP4'"):
        read_model(write_model(tmp_path / "m", config))


def test_layers_for_drafting_and_rotary_tables_are_not_loaded(tmp_path: Path) -> None:
    rows = tensors(TINY) | {
        "model.layers.2.self_attn.q_proj.weight": ("BF16", (64, 64)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (16,)),
    }
    more = read_model(write_model(tmp_path / "m", TINY, rows))
    assert more.weights == read_model(write_model(tmp_path / "n", TINY)).weights


def test_latent_attention(tmp_path: Path) -> None:
    config = TINY | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
    }
    rows = tensors(TINY) | {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("BF16", (576, 64))}
    shape = read_model(write_model(tmp_path / "m", config, rows))
    assert shape.groups == (
        LayerGroup(attention=Attention.LATENT, layers=2, kv_heads=1, key_size=576, value_size=0),
    )
    assert shape.mlp_width == 8 * 2048
    assert shape.weights.copied_bytes == 5 * 64 * 2 + 576 * 64 * 2


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, {"sliding": 6}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"full": 6}),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 4096}, {"full": 6}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False},
            {"full": 6},
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096, "head_dim": 64},
            {"full": 3, "sliding": 3},
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": 512,
                "head_dim": 64,
                "sliding_window_pattern": 6,
            },
            {"full": 1, "sliding": 5},
        ),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "sliding_window": 128,
                "head_dim": 64,
                "num_experts_per_tok": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
            {"full": 3, "sliding": 3},
        ),
    ],
)
def test_windows(tmp_path: Path, change: dict[str, Any], kinds: dict[str, int]) -> None:
    config = TINY | {"num_hidden_layers": 6} | change
    shape = read_model(write_model(tmp_path / "m", config))
    assert {group.attention.value: group.layers for group in shape.groups} == kinds
    for group in shape.groups:
        windowed = group.attention is Attention.SLIDING
        assert group.window_tokens == (config["sliding_window"] if windowed else None)


def test_other_names_of_fields(tmp_path: Path) -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 2,
        "n_positions": 1024,
        "n_inner": None,
        "vocab_size": 512,
        "torch_dtype": "float16",
    }
    shape = read_model(write_model(tmp_path / "m", config, tensors(TINY)))
    assert (shape.own_length_tokens, shape.mlp_width) == (1024, 3072)
    assert one_group(tmp_path / "m").token_bytes(2) == 12 * 128 * 2
    falcon = TINY | {"architectures": ["FalconForCausalLM"], "multi_query": True}
    assert one_group(write_model(tmp_path / "f", falcon)).kv_heads == 1


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "linear", "factor": None}, 4096),
        ({"rope_type": "linear", "factor": 1e308}, 4096),
    ],
)
def test_stretched_lengths(tmp_path: Path, rope: dict[str, Any] | None, length: int) -> None:
    folder = write_model(tmp_path / "m", TINY | {"rope_scaling": rope})
    assert read_model(folder).own_length_tokens == length


def test_a_length_that_is_stretched_to_nothing_is_refused(tmp_path: Path) -> None:
    """It ended in a division by zero."""
    folder = write_model(tmp_path / "m", TINY | {"rope_scaling": {"rope_type": "linear", "factor": 1e-9}})
    with pytest.raises(ModelFileError, match="rope_scaling has factor 1e-09"):
        read_model(folder)


@pytest.mark.parametrize(("limit", "length"), [(2048, 2048), (10**30, 4096), ("x", 4096)])
def test_the_tokenizers_limit(tmp_path: Path, limit: object, length: int) -> None:
    folder = write_model(tmp_path / "m", TINY)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    assert read_model(folder).own_length_tokens == length


def test_a_missing_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    config = {name: value for name, value in TINY.items() if name != "torch_dtype"}
    shape = read_model(write_model(tmp_path / "m", config, tensors(TINY, "F16")))
    assert shape.dtype == "float16"
    assert any("dtype is not in config.json" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM, which is not known here"),
        ({"architectures": []}, "no field architectures"),
        ({"architectures": None}, "no field architectures"),
        ({"hidden_size": None}, "has no hidden_size, and LlamaForCausalLM needs it"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; a whole number from 1 to"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**6}, "at most 10000"),
        ({"vocab_size": 2**70}, "a whole number from 1 to 100,000,000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None},
            "has no num_key_value_heads, and MistralForCausalLM needs it",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "has no head_dim, and Qwen3ForCausalLM needs it"),
        ({"num_key_value_heads": 3}, "2 heads cannot share 3"),
        ({"num_attention_heads": 3}, "head_dim is missing"),
        ({"torch_dtype": "float8"}, "give --dtype"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 9, "layer_types": ["mamba"] * 2},
            "layers of the kind 'mamba'",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 9, "layer_types": ["full_attention"]},
            "a kind for each of 2 layers",
        ),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "has no kv_lora_rank"),
        ({"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "sliding_window": 9}, "sliding_window_pat"),
    ],
)
def test_what_is_not_known_is_named_and_not_guessed(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    folder = write_model(tmp_path / "m", TINY | change, tensors(TINY))
    with pytest.raises(ModelFileError, match=says) as refused:
        read_model(folder)
    assert str(folder) in str(refused.value)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is no folder"):
        read_model(tmp_path / "none")
    with pytest.raises(ModelFileError, match=r"config.json does not exist"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelFileError, match="cannot be read as a JSON object"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelFileError, match=r"holds no \*.safetensors"):
        read_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin is another format"):
        read_model(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    file = write_model(tmp_path / "m", TINY) / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - cut)
    with pytest.raises(
        ModelFileError,
        match=r"model.safetensors is truncated: it has [0-9,]+ " r"bytes and its header speaks of",
    ):
        read_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is no safetensors file"),
        (b"\x05\0\0", "is no safetensors file"),
        (b"<html>not found</html>", "is no safetensors file"),
        ((50).to_bytes(8, "little") + b"{}", "is truncated"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((4).to_bytes(8, "little") + b"{..}", "no JSON object"),
        ((11).to_bytes(8, "little") + b'{"a":"odd"}', "tensor 'a' cannot be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, raw: bytes, says: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw)
    with pytest.raises(ModelFileError, match=says):
        read_header(file)


def test_a_tensor_whose_room_is_wrong(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelFileError, match="should have 8 bytes and has 4"):
        read_header(file)


def test_types_newer_than_the_table_count_as_stored(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    assert read_header(file)[0].stored_bytes == 6


def test_an_index_decides_which_files_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", TINY, shards=3)
    write_tensors(folder / "consolidated.safetensors", tensors(TINY))
    assert read_model(folder).weights == read_model(write_model(tmp_path / "n", TINY)).weights
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"names model-00001-of-00003.safetensors, which is not there"):
        read_folder(folder)
    for text, says in (
        ('{"weight_map": {"a": "../b.safetensors"}}', "no .*safetensors in the same folder"),
        (json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}), "in the same folder"),
        ('{"weight_map": 3}', "must hold weight_map"),
        ("{}", "must hold weight_map"),
        ("nonsense", "must hold weight_map"),
        ('{"weight_map": {"a": "model-00000-of-00003.safetensors"}}', "tensor 'a' .1 in all., which is not"),
    ):
        index.write_text(text)
        with pytest.raises(ModelFileError, match=says):
            read_folder(folder)


def test_mistrals_own_format_beside_the_usual_one_is_not_counted_twice(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", TINY)
    before = read_model(folder).weights
    write_tensors(folder / "consolidated.safetensors", tensors(TINY))
    assert read_model(folder).weights == before


def test_every_known_architecture_is_one_of_vllms_names() -> None:
    assert all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in KNOWN)


def test_a_download_that_broke_off_before_its_index_is_refused(tmp_path: Path) -> None:
    """It was planned for as a smaller model, which fits where the whole one does not."""
    folder = write_model(tmp_path / "m", LLAMA_8B, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    whole = read_model(folder).weights.total_bytes
    assert round(whole / 2**30, 2) == 14.96
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ModelFileError, match="has 2 of 3"):
        read_model(folder)


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"(?i)name too long"):
        read_model(Path("a" * 5000))
