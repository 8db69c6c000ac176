"""The tensors of a safetensors file or of a folder of them, from the headers alone.

Format (huggingface/safetensors, README): 8 bytes with the header's length, little-endian; the header, a
JSON object name -> {dtype, shape, data_offsets}; then the data. A header has at most 100 MB.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.core.values import Value

MOST_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"

_FILE_NAME = re.compile(r"[^/\\\0]{1,200}\.safetensors")
_SHARD = re.compile(r"-of-(\d{1,6})\.safetensors\Z")
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
"""Bits of a number. Types that are newer than this table are taken by the room that they have in the file."""


class ModelFileError(ValueError):
    """A model cannot be read. The message names the file, what is wrong in it, and what to do."""


class Tensor(Value, frozen=True, kw_only=True):
    """One tensor as it is stored."""

    name: str
    dtype: str
    """In safetensors' words: BF16, F32, I32, ..."""
    shape: tuple[int, ...]
    stored_bytes: int

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def read_folder(folder: Path) -> list[Tensor]:
    """Every tensor of the model in `folder`: of the files that its index names, or of all its *.safetensors.

    Raises:
        ModelFileError: there are none, one that the index names is missing, one is truncated or no such file.
    """
    index = folder / INDEX
    if index.exists():
        return _indexed(folder, index)
    # Mistral's own format lies beside the usual one, with the same weights.
    files = sorted(one for one in folder.glob("*.safetensors") if not one.name.startswith("consolidated"))
    files = files or sorted(folder.glob("*.safetensors"))
    if not files:
        other = next(
            (one.name for one in sorted(folder.iterdir()) if one.suffix in (".bin", ".pt", ".gguf")), None
        )
        found = f"; {other} is another format, convert it to safetensors" if other else ""
        raise ModelFileError(
            f"{folder} holds no *.safetensors, so the size of the weights is not known{found}"
        )
    _check_shards(folder, files)
    return [tensor for file in files for tensor in read_header(file)]


def _check_shards(folder: Path, files: list[Path]) -> None:
    """A download that broke off has neither its index nor all its files, and looks like a smaller model."""
    totals = [int(found[1]) for one in files if (found := _SHARD.search(one.name))]
    for total in set(totals):
        if totals.count(total) < total:
            raise ModelFileError(
                f"{folder} has {totals.count(total)} of {total} *-of-*.safetensors and no {INDEX}, so the "
                "weights are not all there; download the model again"
            )


def _indexed(folder: Path, index: Path) -> list[Tensor]:
    try:
        data = msgspec.json.decode(index.read_bytes())
        placed: dict[str, str] = msgspec.convert(data["weight_map"], dict[str, str])
    except (OSError, msgspec.MsgspecError, RecursionError, KeyError, TypeError) as error:
        raise ModelFileError(
            f"{index} cannot be read ({error}); it must hold weight_map, an object from tensor to "
            "file: download it again"
        ) from None
    tensors: list[Tensor] = []
    for name in sorted(set(placed.values())):
        if not _FILE_NAME.fullmatch(name):
            raise ModelFileError(f"{index} names {name!r}, which is no *.safetensors in the same folder")
        if not (folder / name).exists():
            raise ModelFileError(f"{index} names {name}, which is not there; download it")
        tensors += [one for one in read_header(folder / name) if placed.get(one.name) == name]
    missing = placed.keys() - {one.name for one in tensors}
    if missing:
        raise ModelFileError(
            f"{index} names tensor {min(missing)!r} ({len(missing)} in all), which is not in its "
            "file; download them again"
        )
    return tensors


def read_header(file: Path) -> list[Tensor]:
    """The tensors of one file.

    Raises:
        ModelFileError: it cannot be read, is truncated, or is no safetensors file.
    """
    try:
        with file.open("rb") as source:
            size = file.stat().st_size
            begin = source.read(8)
            length = int.from_bytes(begin, "little")
            if len(begin) == 8 and 2 <= length <= MOST_HEADER_BYTES and size < 8 + length:
                raise ModelFileError(_truncated(file, size, f"its header alone takes {8 + length:,}"))
            if len(begin) < 8 or not 2 <= length <= MOST_HEADER_BYTES:
                raise ModelFileError(f"{file} is no safetensors file ({size:,} bytes); download it again")
            raw = source.read(length)
        header: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(
            f"{file} has a header that is no JSON object ({error}); download it again"
        ) from None
    tensors = [_tensor(file, name, entry) for name, entry in header.items() if name != "__metadata__"]
    end = 8 + length + sum(one.stored_bytes for one in tensors)
    if size < end:
        raise ModelFileError(_truncated(file, size, f"its header speaks of {end:,}"))
    return tensors


def _truncated(file: Path, size: int, why: str) -> str:
    return f"{file} is truncated: it has {size:,} bytes and {why}; download it again"


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _tensor(file: Path, name: str, entry: object) -> Tensor:
    try:
        read = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{file}: tensor {name!r} cannot be read ({error}); download it again") from None
    stored = read.data_offsets[1] - read.data_offsets[0]
    bits = _BITS.get(read.dtype)
    wanted = None if bits is None else -(-math.prod(read.shape) * bits // 8)
    if stored < 0 or min(read.shape, default=0) < 0 or (wanted is not None and wanted != stored):
        raise ModelFileError(
            f"{file}: tensor {name!r} of {read.dtype} {read.shape} should have {wanted} bytes and "
            f"has {stored}; "
            "download it again"
        )
    return Tensor(name=name, dtype=read.dtype, shape=tuple(read.shape), stored_bytes=stored)
