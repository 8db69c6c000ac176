"""The verdict on each line of a batch file: a request to run, or an error that says what is wrong with it.

The envelope (`custom_id`, `method`, `url`, `body`) is checked; the body must be JSON that can be read and
written again (no number beyond a double, no nesting beyond `MAX_DEPTH`). Beyond that it stays opaque bytes,
as the engine judges it, but for the few fields that would touch the scheduler or leave the pool:

- `stream` must be absent, null or false: a batch has nobody to stream to;
- fields in `SCHEDULING_FIELDS` are removed from the body before it is sent, so a line can neither raise its
  own priority nor choose its engine's request id; the line itself runs. The same names beside the body are
  ignored, as is every other unknown envelope field;
- `n` greater than 1 is legal and passed through; so is a NUL or any other character in a custom_id.

JSON objects with a repeated key follow the common rule: the last one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from hybridsched.batches.lines import MAX_LINE_BYTES, RawLine, iter_lines
from hybridsched.batches.readable import MAX_DEPTH, is_deep, may_be_deep, nests_deeper, number_place

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""What a line may ask for."""

SCHEDULING_FIELDS = (
    "priority",
    "request_id",
    "kv_transfer_params",
    "data_parallel_rank",
)
"""Body fields of vLLM that steer its scheduler, name the request that the scheduler must be able to end, or
make the engine fetch from elsewhere. They belong to the pool."""

DEFAULT_MAX_TOKENS = 256
"""Output tokens assumed for the size of a chunk when a line sets no `max_tokens`. Only an estimate."""
BYTES_PER_TOKEN = 4
"""Prompt bytes per token assumed when the prompt is text. Only an estimate."""


class BatchLine(msgspec.Struct, frozen=True):
    """A request to run."""

    line: int
    """Physical line number from 1."""
    offset: int
    custom_id: str
    url: str
    """One of `URLS`."""
    body: bytes
    """The JSON object to send, as it stood in the file, without `SCHEDULING_FIELDS`."""
    model: str | None = None
    prompt_tokens: int = 0
    """Estimate."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    n: int = 1
    stripped: tuple[str, ...] = ()
    """Names of the scheduling fields that were removed."""

    @property
    def tokens(self) -> int:
        """Estimated tokens of the line, prompt and output, for the size of a chunk."""
        return self.prompt_tokens + self.max_tokens * self.n


class LineError(msgspec.Struct, frozen=True):
    """A line that cannot run. It ends in the error file under its line number."""

    line: int
    offset: int
    custom_id: str | None
    """None when the line has no readable one."""
    code: str
    """Stable: invalid_json, not_utf8, line_too_long, nested_too_deep, number_out_of_range, not_an_object,
    missing_field, invalid_custom_id, duplicate_custom_id, invalid_method, invalid_url, invalid_body,
    stream_not_allowed, model_not_found or line_not_readable."""
    message: str


class _Envelope(msgspec.Struct):
    """The fast path: a well-formed line decodes into this at once."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_UNSET = msgspec.UNSET
_Raw = msgspec.Raw | msgspec.UnsetType


class _Probe(msgspec.Struct):
    """What the scheduler must see of a body. Large fields stay raw; `UNSET` means absent."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    prompt: _Raw = _UNSET
    messages: _Raw = _UNSET
    input: _Raw = _UNSET
    priority: _Raw = _UNSET
    request_id: _Raw = _UNSET
    kv_transfer_params: _Raw = _UNSET
    data_parallel_rank: _Raw = _UNSET

    def schedules(self) -> bool:
        """Whether any of `SCHEDULING_FIELDS` is there."""
        return (
            self.priority is not _UNSET
            or self.request_id is not _UNSET
            or self.kv_transfer_params is not _UNSET
            or self.data_parallel_rank is not _UNSET
        )


_envelope = msgspec.json.Decoder(_Envelope)
_probe = msgspec.json.Decoder(_Probe)
_whole = msgspec.json.Decoder()


class _Id(msgspec.Struct):
    custom_id: Any = None


_id = msgspec.json.Decoder(_Id)


def check_line(
    raw: RawLine, *, duplicates: Mapping[int, int] | None = None, models: Container[str] | None = None
) -> BatchLine | LineError:
    """The verdict on one line.

    `duplicates` maps the number of a line to the number of the earlier line with the same custom_id.
    `models` are the models that the pool serves, where they are known; otherwise the engine says 404.
    """
    number, offset, length, data = raw
    if data is None:
        what = f"{length:,} bytes; at most {MAX_LINE_BYTES:,} are allowed in one line"
        return _error(raw, None, "line_too_long", what)
    if not data.isascii():
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as exc:
            what = f"byte {exc.start + 1} (0x{data[exc.start]:02x}) is not UTF-8; save the file as UTF-8"
            return _error(raw, None, "not_utf8", what)
    try:
        envelope = _envelope.decode(data)
        body: bytes = bytes(envelope.body)
        probe = _probe.decode(body)
        # Raw fields are only skipped over above: what they hold must be readable when the line is run.
        value = _whole.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _explain(raw, data)
    if may_be_deep(data) and is_deep(value, MAX_DEPTH - 1):
        return _explain(raw, data)
    custom_id = envelope.custom_id
    if not custom_id or envelope.method != "POST" or envelope.url not in URLS:
        return _explain(raw, data)
    if duplicates and number in duplicates:
        what = (
            f"custom_id {_shown(custom_id)} was already used on line {duplicates[number]}; every line needs "
            "its own, only the first one counts"
        )
        return _error(raw, custom_id, "duplicate_custom_id", what)
    if probe.stream is not None and probe.stream is not False:
        what = (
            f"body.stream is {_shown(probe.stream)}; a batch cannot stream, leave it out or set it to false"
        )
        return _error(raw, custom_id, "stream_not_allowed", what)
    model = probe.model if isinstance(probe.model, str) else None
    if models is not None and model is not None and model not in models:
        what = f"body.model {_shown(model)} is not served by this pool"
        return _error(raw, custom_id, "model_not_found", what)
    stripped: tuple[str, ...] = ()
    if probe.schedules():
        stripped = tuple(name for name in SCHEDULING_FIELDS if getattr(probe, name) is not _UNSET)
        body = _without(body, stripped)
    return BatchLine(
        number,
        offset,
        custom_id,
        envelope.url,
        body,
        model,
        _prompt_tokens(probe),
        _output_tokens(probe, envelope.url),
        _count(probe.n, 1),
        stripped,
    )


def read_span(
    file: BinaryIO,
    start: int,
    end: int | None,
    first_line: int,
    duplicates: Mapping[int, int] | None = None,
    *,
    models: Container[str] | None = None,
) -> Iterator[BatchLine | LineError]:
    """The verdicts on the lines from byte `start` to byte `end` (see `iter_lines` and `check_line`)."""
    for raw in iter_lines(file, start=start, end=end, first_line=first_line):
        yield check_line(raw, duplicates=duplicates, models=models)


def _error(raw: RawLine, custom_id: str | None, code: str, what: str) -> LineError:
    return LineError(raw.number, raw.offset, custom_id, code, f"line {raw.number}: {what}")


_BYTE = re.compile(r"\(byte (\d+)\)")


def _explain(raw: RawLine, data: bytes) -> LineError:
    """The slow path: find the first thing that is wrong with a line that did not decode."""
    if may_be_deep(data) and nests_deeper(data, MAX_DEPTH):
        what = f"objects and arrays are nested more than {MAX_DEPTH} deep, which is the most"
        custom_id = None if nests_deeper(data, 2 * MAX_DEPTH) else _id_alone(data)
        return _error(raw, custom_id, "nested_too_deep", what)
    try:
        value: Any = _whole.decode(data)
    except msgspec.ValidationError:  # untyped, so it is a number
        what = (
            f"{number_place(data)} holds a number that is out of range; at most 1.8e308 and 4,300 digits are "
            "allowed"
        )
        return _error(raw, _id_alone(data), "number_out_of_range", what)
    except msgspec.DecodeError as exc:
        reason = str(exc).removeprefix("JSON is malformed: ")
        if reason == "Input data was truncated":
            reason = "it ends in the middle"
        else:  # counted from 1, as where a byte is not UTF-8
            reason = _BYTE.sub(lambda found: f"(byte {int(found[1]) + 1})", reason)
        lenient, odd = _lenient(data)
        if lenient is not None:
            reason = f"{odd} is no JSON"
        what = f"not valid JSON ({reason}); one whole JSON object a line is expected"
        return _error(raw, _readable_id(lenient), "invalid_json", what)
    if not isinstance(value, dict):
        return _error(raw, None, "not_an_object", f"{_kind(value)} where a JSON object is expected")
    custom_id = _readable_id(value)
    for name in ("custom_id", "method", "url", "body"):
        if name not in value:
            what = f"{name!r} is missing; custom_id, method, url and body are needed"
            return _error(raw, custom_id, "missing_field", what)
    if custom_id is None:
        given = value["custom_id"]
        found = "an empty string" if given == "" else f"{_kind(given)} ({_shown(given)})"
        what = f"custom_id is {found}; a string that is not empty is expected"
        return _error(raw, None, "invalid_custom_id", what)
    if value["method"] != "POST":
        what = f"method is {_shown(value['method'])}; only POST is allowed"
        return _error(raw, custom_id, "invalid_method", what)
    url = value["url"]
    if url not in URLS:
        return _error(raw, custom_id, "invalid_url", f"url is {_shown(url)}; {_url_help(url)}")
    what = f"body is {_kind(value['body'])}; an object is expected"
    return _error(raw, custom_id, "invalid_body", what)


def _id_alone(data: bytes) -> str | None:
    try:
        given = _id.decode(data).custom_id
    except msgspec.DecodeError:
        return None
    return given if isinstance(given, str) and given else None


def _lenient(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object by Python's own reader, which takes NaN, Infinity and lone surrogates, and what it took.

    None when it fails as well.
    """
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name.replace("Infinity", "inf"))

    try:
        value = json.loads(data, parse_constant=constant)
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(value, dict):
        return None, ""
    if constants:
        return value, constants[0]
    text = json.dumps(value, ensure_ascii=False)
    lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    return (
        value,
        "NaN, Infinity or a lone surrogate" if lone is None else f"the lone surrogate \\u{ord(lone):04x}",
    )


def _readable_id(value: dict[str, Any] | None) -> str | None:
    given = value.get("custom_id") if value else None
    if not isinstance(given, str) or not given:
        return None
    return given if given.isascii() or not any("\ud800" <= c <= "\udfff" for c in given) else None


def _url_help(url: object) -> str:
    allowed = ", ".join(URLS)
    if isinstance(url, str) and "://" in url:
        return f"give the path alone, the pool chooses the engine; allowed: {allowed}"
    return f"allowed: {allowed}"


def _without(body: bytes, names: tuple[str, ...]) -> bytes:
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in names:
        fields.pop(name, None)
    return msgspec.json.encode(fields)


def _prompt_tokens(probe: _Probe) -> int:
    raw = probe.messages
    if raw is _UNSET:
        raw = probe.prompt if probe.prompt is not _UNSET else probe.input
        if raw is _UNSET:
            return 1
        data = bytes(raw)
        if data[:1] == b"[" and data[1:2] not in (b'"', b"["):
            return data.count(b",") + 1  # a list of token ids
        return max(1, len(data) // BYTES_PER_TOKEN)
    return max(1, len(memoryview(raw)) // BYTES_PER_TOKEN)


def _output_tokens(probe: _Probe, url: str) -> int:
    if url == "/v1/embeddings":
        return 0
    given = probe.max_completion_tokens if probe.max_completion_tokens is not None else probe.max_tokens
    return _count(given, DEFAULT_MAX_TOKENS)


def _count(given: object, default: int) -> int:
    """A positive integer below 10^9; `default` for anything else (the engine judges the value)."""
    return given if type(given) is int and 0 < given < 1_000_000_000 else default


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _shown(value: object, limit: int = 80) -> str:
    """`value` as JSON, shortened: error messages must not copy megabytes."""
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= limit else text[:limit] + "..."
