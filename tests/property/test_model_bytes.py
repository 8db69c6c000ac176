"""A model's files may hold anything: what comes is a shape or a sentence, never another error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.engines.architectures import KNOWN
from hybridsched.engines.model_files import ModelFileError, read_model
from hybridsched.engines.safetensors_header import INDEX, read_folder, read_header
from tests.model_kit import TINY, tensors, write_tensors

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "yarn", "linear", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ropes = st.fixed_dictionaries({}, optional={"rope_type": values, "type": values, "factor": values})
FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *(
        "vocab_size",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
    ),
    *("sliding_window_pattern", "torch_dtype", "quantization_config", "tie_word_embeddings", "kv_lora_rank"),
    *("qk_rope_head_dim", "num_experts_per_tok", "moe_intermediate_size", "multi_query", "num_kv_heads"),
)


T = TypeVar("T")


def attempt(read: Callable[[Path], T], folder: Path) -> T | ModelFileError:
    """What comes of it: any other error fails the test."""
    try:
        return read(folder)
    except ModelFileError as refused:
        return refused


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        write_tensors(Path(name) / "model.safetensors", tensors(TINY))
        yield Path(name)


@given(
    architecture=st.sampled_from(sorted(KNOWN)) | values,
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4),
    gone=st.sets(st.sampled_from(FIELDS), max_size=2),
    rope=ropes | values,
)
def test_any_configuration(
    folder: Path, architecture: object, changes: dict[str, Any], gone: set[str], rope: object
) -> None:
    config = TINY | {"architectures": [architecture], "rope_scaling": rope} | changes
    config = {name: value for name, value in config.items() if name not in gone}
    (folder / "config.json").write_text(json.dumps(config))
    shape = attempt(read_model, folder)
    if isinstance(shape, ModelFileError):
        assert str(folder) in str(shape)
        return
    assert shape.layers >= 1
    assert shape.token_bytes(2) >= 1
    assert shape.own_length_tokens >= 1


@given(raw=st.binary(max_size=200), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_as_weights(raw: bytes, length: int | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        file.write_bytes(raw if length is None else length.to_bytes(8, "little") + raw)
        with pytest.raises(ModelFileError, match="download it again"):
            read_header(file)


@given(entry=values, also=values)
def test_any_header(entry: object, also: object) -> None:
    header = json.dumps({"a": entry, "b": {"dtype": "F32", "shape": [1], "data_offsets": also}}).encode()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        with pytest.raises(ModelFileError, match="download it again"):
            read_header(file)


@given(index=values | st.fixed_dictionaries({"weight_map": values | st.dictionaries(st.text(), st.text())}))
def test_any_index(index: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_tensors(Path(name) / "model.safetensors", tensors(TINY))
        (Path(name) / INDEX).write_text(json.dumps(index))
        found = attempt(read_folder, Path(name))
    assert found == [] or (isinstance(found, ModelFileError) and INDEX in str(found))
