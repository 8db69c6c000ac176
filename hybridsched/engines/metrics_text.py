"""The few metrics that decisions use, found in the text of vLLM's /metrics.

A full parser takes tens of milliseconds for the hundreds of lines; this looks for the wanted names only.
Values of several engine cores (data parallel) are added; cache use is their mean. What is absent stays None.
"""

from __future__ import annotations

import math
import re
from typing import Any

from hybridsched.engines.protocol import EngineInfo, EngineStats

_NUMBER = re.compile(r"[0-9]{1,15}")


def _samples(text: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """(labels, value) of each sample called exactly `name`."""
    found: list[tuple[bytes, float]] = []
    needle = b"\n" + name
    at = text.find(needle)
    while at >= 0:
        begin = at + len(needle)
        end = text.find(b"\n", begin)
        line = text[begin : end if end >= 0 else len(text)]
        labels = b""
        if line[:1] == b"{":
            close = line.rfind(b"}")
            labels, line = line[1:close], line[close + 1 :]
        elif line[:1] != b" ":
            at = text.find(needle, begin)
            continue
        fields = line.split()
        if fields:
            try:
                value = float(fields[0])
            except ValueError:
                value = math.nan
            if not math.isnan(value):
                found.append((labels, value))
        at = text.find(needle, begin)
    return found


def _total(text: bytes, name: bytes) -> float | None:
    samples = _samples(text, name)
    return sum(value for _, value in samples) if samples else None


def _mean(text: bytes, name: bytes) -> float | None:
    samples = _samples(text, name)
    return sum(value for _, value in samples) / len(samples) if samples else None


def _label(labels: bytes, name: bytes) -> str | None:
    at = labels.find(name + b'="')
    if at < 0 or (at > 0 and labels[at - 1 : at] not in (b",", b" ")):
        return None
    begin = at + len(name) + 2
    return labels[begin : labels.find(b'"', begin)].decode("utf-8", "replace")


def _buckets(text: bytes, name: bytes) -> tuple[tuple[float, float], ...]:
    """Cumulative counts by upper bound, added over engines and models, in ascending order."""
    sums: dict[float, float] = {}
    for labels, value in _samples(text, name + b"_bucket"):
        upper = _bound(_label(labels, b"le"))
        if upper is not None:
            sums[upper] = sums.get(upper, 0.0) + value
    return tuple(sorted(sums.items()))


def _bound(label: str | None) -> float | None:
    """An upper bound of a bucket; None where there is none that can be read."""
    try:
        upper = float(label or "")
    except ValueError:
        return None
    return None if math.isnan(upper) else upper


def _awake(text: bytes) -> float | None:
    """Whether every engine core is awake."""
    states = [
        value
        for labels, value in _samples(text, b"vllm:engine_sleep_state")
        if _label(labels, b"sleep_state") == "awake"
    ]
    return min(states, default=None)


def engine_stats(raw: bytes) -> EngineStats:
    """What `raw`, the text of /metrics, says."""
    text = b"\n" + raw
    return EngineStats(
        running=_total(text, b"vllm:num_requests_running"),
        waiting=_total(text, b"vllm:num_requests_waiting"),
        kv_use=_mean(text, b"vllm:kv_cache_usage_perc"),
        prompt_tokens_total=_total(text, b"vllm:prompt_tokens_total"),
        generation_tokens_total=_total(text, b"vllm:generation_tokens_total"),
        iterations_total=_total(text, b"vllm:iteration_tokens_total_count"),
        awake=_awake(text),
        cached_tokens_total=_total(text, b"vllm:prompt_tokens_cached_total"),
        iteration_tokens=_total(text, b"vllm:iteration_tokens_total_sum"),
        preemptions_total=_total(text, b"vllm:num_preemptions_total"),
        prefix_queries_total=_total(text, b"vllm:prefix_cache_queries_total"),
        prefix_hits_total=_total(text, b"vllm:prefix_cache_hits_total"),
        ttft_buckets=_buckets(text, b"vllm:time_to_first_token_seconds"),
        tpot_buckets=_buckets(text, b"vllm:request_time_per_output_token_seconds"),
    )


def engine_info(models: dict[str, Any], raw: bytes) -> EngineInfo:
    """The answer of /v1/models and the cache configuration in the text of /metrics."""
    data = models.get("data")
    entries = data if isinstance(data, list) else []
    listed = [m for m in entries if isinstance(m, dict) and isinstance(m.get("id"), str)]
    lengths = [m["max_model_len"] for m in listed if isinstance(m.get("max_model_len"), int)]
    blocks = said = 0
    size: int | None = None
    for labels, _ in _samples(b"\n" + raw, b"vllm:cache_config_info"):
        count, each = _label(labels, b"num_gpu_blocks"), _label(labels, b"block_size")
        if count and each and _NUMBER.fullmatch(count) and _NUMBER.fullmatch(each):
            blocks += int(count)
            size = int(each)
        tokens = _label(labels, b"kv_cache_size_tokens")
        if tokens and _NUMBER.fullmatch(tokens):
            said += int(tokens)
    return EngineInfo(
        models=tuple(m["id"] for m in listed),
        max_model_len=min(lengths) if lengths else None,
        # Where layers keep their past in different ways a token takes several blocks, and vLLM says the sum.
        kv_tokens=said or (blocks * size if size and blocks else None),
        block_size=size,
    )
