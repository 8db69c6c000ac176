"""The lines of the output and error files (OpenAI Batch format), as bytes without a newline."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class _Error(msgspec.Struct):
    code: str
    message: str
    line: int


class _Record(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_encode = msgspec.json.Encoder().encode


def record_id(batch_id: str, line: int) -> str:
    """The id of a line's result. The same line of the same batch always gets the same one."""
    digest = hashlib.blake2b(f"{batch_id}:{line}".encode(), digest_size=12).hexdigest()
    return f"batch_req_{digest}"


def output_record(
    batch_id: str,
    line: int,
    custom_id: str,
    *,
    status_code: int,
    request_id: str,
    body: dict[str, Any] | bytes,
) -> bytes:
    """A line of the output file: the engine's answer."""
    return _encode(
        _Record(
            record_id(batch_id, line), custom_id, _Response(status_code, request_id, _one_line(body)), None
        )
    )


def error_record(
    batch_id: str,
    line: int,
    custom_id: str | None,
    *,
    code: str,
    message: str,
    status_code: int | None = None,
    request_id: str = "",
    body: dict[str, Any] | bytes | None = None,
) -> bytes:
    """A line of the error file. `status_code` and `body` are the engine's answer where there was one."""
    response = None if status_code is None else _Response(status_code, request_id, _one_line(body))
    return _encode(_Record(record_id(batch_id, line), custom_id, response, _Error(code, message, line)))


def _one_line(body: dict[str, Any] | bytes | None) -> Any:
    if not isinstance(body, bytes):
        return body
    return msgspec.json.decode(body) if b"\n" in body or b"\r" in body else msgspec.Raw(body)
