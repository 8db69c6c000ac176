"""vLLM's metric names and labels, written in the Prometheus text format.

Counted by hand: a registry would cost more per token than the scheduler does. Times are wall-clock seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from hybridsched.engines.simulated.iteration import Iteration, Outcome
from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.engines.simulated.scheduler import Scheduler
from hybridsched.engines.simulated.sequence import Seq

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds as in vLLM's metrics/loggers.py.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
         40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
        80.0)  # fmt: skip
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
            480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50, 100)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, … up to `largest`."""
    bounds: list[int] = []
    scale = 1
    while True:
        for m in (1, 2, 5):
            if m * scale > largest:
                return tuple(bounds)
            bounds.append(m * scale)
        scale *= 10


class Histogram:
    """Counts by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "heads", "help", "name", "total")

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: str) -> None:
        self.name = name
        self.help = about
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.heads = [f'{name}_bucket{{{labels},le="{float(b)}"}} ' for b in bounds]
        self.heads.append(f'{name}_bucket{{{labels},le="+Inf"}} ')

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def write(self, out: list[str], labels: str) -> None:
        out.append(f"# HELP {self.name} {self.help}\n# TYPE {self.name} histogram\n")
        running = 0
        for head, count in zip(self.heads, self.counts, strict=True):
            running += count
            out.append(f"{head}{running}.0\n")
        out.append(f"{self.name}_count{{{labels}}} {running}.0\n{self.name}_sum{{{labels}}} {self.total!r}\n")


class EngineMetrics:
    """Everything that /metrics shows of one engine."""

    def __init__(self, model: str, scheduler: Scheduler, *, profile: str, speed: float) -> None:
        self._scheduler = scheduler
        self._model = f'model_name="{model}"'
        self._labels = f'engine="0",{self._model}'
        self._profile = profile
        self._speed = speed
        limits = scheduler.limits
        sizes = one_two_five(limits.max_model_len)

        def histogram(name: str, about: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", about, bounds, self._labels)

        self.ttft = histogram("time_to_first_token_seconds", "Time to first token in seconds.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", _ITL)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Time per output token in seconds, per request.", _ITL
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "End-to-end request latency in seconds.", _LATENCY
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Time in the WAITING phase, per request.", _LATENCY
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Time in the RUNNING phase, per request.", _LATENCY
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Time in the PREFILL phase, per request.", _LATENCY
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Time in the DECODE phase, per request.", _LATENCY
        )
        self.prompt_sizes = histogram(
            "request_prompt_tokens", "Prefill tokens processed, per request.", sizes
        )
        self.output_sizes = histogram("request_generation_tokens", "Generation tokens, per request.", sizes)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)
        self.max_generation = histogram(
            "request_max_num_generation_tokens", "Most generation tokens of a request's answers.", sizes
        )
        self.params_n = histogram("request_params_n", "The n request parameter.", _N)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The max_tokens request parameter.", sizes
        )
        self.preempted = histogram("request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS)
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "New KV tokens computed during prefill, per request.", sizes
        )
        self._histograms = [h for h in vars(self).values() if isinstance(h, Histogram)]
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.success = dict.fromkeys(FINISH_REASONS, 0)
        self.rejections = 0
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        self.sleep_level: int | None = None
        """None while awake."""

    def set_gauges(self) -> None:
        """Take the gauges from the scheduler, after an abort that left it without a step to come."""
        scheduler = self._scheduler
        self.running = len(scheduler.running)
        self.waiting = scheduler.waiting
        self.kv_use = scheduler.kv.use

    def step(self, it: Iteration, out: Outcome, now: float) -> None:
        """Count one iteration that ended at `now`."""
        made = len(out.emitted)
        self.generation_tokens += made
        self.prompt_tokens += out.prompt_tokens
        self.step_tokens.observe(out.prompt_tokens + made)
        for seq in out.first:
            self.ttft.observe(now - seq.arrival)
            self.cached_tokens += seq.cached_tokens or 0
        if out.steady:
            self.itl.observe(now - it.start, out.steady)
        for gap in out.gaps:
            self.itl.observe(gap)
        self.running, self.waiting, self.kv_use = out.running, out.waiting, out.kv_use

    def finished(self, seqs: Iterable[Seq], now: float) -> None:
        """Count ended requests (those a client left are not given here: vLLM does not count them)."""
        for seq in seqs:
            reason = seq.finish_reason or "error"
            self.success[reason] = self.success.get(reason, 0) + 1
            made = len(seq.output)
            self.prompt_sizes.observe(len(seq.prompt))
            self.output_sizes.observe(made)
            self.max_generation.observe(made)
            self.params_n.observe(1)
            self.params_max_tokens.observe(seq.max_tokens)
            self.preempted.observe(seq.preemptions)
            self.computed.observe(len(seq.prompt) - (seq.cached_tokens or 0))
            self.e2e.observe(now - seq.arrival)
            if seq.first_scheduled_at is None:
                continue
            self.queue.observe(seq.first_scheduled_at - seq.arrival)
            if seq.first_token_at is None:
                continue
            self.prefill.observe(seq.first_token_at - seq.first_scheduled_at)
            self.decode.observe(seq.last_token_at - seq.first_token_at)
            self.inference.observe(seq.last_token_at - seq.first_scheduled_at)
            if made > 1:
                self.tpot.observe((seq.last_token_at - seq.first_token_at) / (made - 1))

    def render(self, *, clock_lag_s: float, clock_jumps: int) -> str:
        """The text of /metrics."""
        s = self._scheduler
        labels, model = self._labels, self._model
        local = self.prompt_tokens - self.cached_tokens
        out = [
            "# The engine behind these metrics is SIMULATED: no model runs, iteration times are computed.\n",
            "# HELP hybridsched_simulated_engine 1: this engine is a simulation.\n"
            "# TYPE hybridsched_simulated_engine gauge\n"
            f'hybridsched_simulated_engine{{{model},profile="{self._profile}",speed="{self._speed:g}"}} 1.0\n'
            "# HELP hybridsched_simulated_clock_lag_seconds How far the engine is behind the wall clock.\n"
            "# TYPE hybridsched_simulated_clock_lag_seconds gauge\n"
            f"hybridsched_simulated_clock_lag_seconds{{{model}}} {clock_lag_s:.6f}\n"
            "# HELP hybridsched_simulated_clock_jumps_total Times it was so late that it skipped ahead.\n"
            "# TYPE hybridsched_simulated_clock_jumps_total counter\n"
            f"hybridsched_simulated_clock_jumps_total{{{model}}} {clock_jumps}\n",
        ]

        def simple(name: str, kind: str, about: str, rows: Iterable[tuple[str, float]]) -> None:
            out.append(f"# HELP vllm:{name} {about}\n# TYPE vllm:{name} {kind}\n")
            for extra, value in rows:
                out.append(f"vllm:{name}{{{labels}{extra}}} {float(value)!r}\n")

        def one(name: str, kind: str, about: str, value: float) -> None:
            simple(name, kind, about, (("", value),))

        one("num_requests_running", "gauge", "Number of requests in model execution batches.", self.running)
        one("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", self.waiting)
        simple(
            "num_requests_waiting_by_reason",
            "gauge",
            "Number of waiting requests by reason.",
            ((',reason="capacity"', self.waiting), (',reason="deferred"', 0)),
        )
        level = self.sleep_level
        simple(
            "engine_sleep_state",
            "gauge",
            "Engine sleep state; awake = 0 means engine is sleeping.",
            (
                (',sleep_state="awake"', level is None),
                (',sleep_state="weights_offloaded"', level == 1),
                (',sleep_state="discard_all"', level == 2),
            ),
        )
        one("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", self.kv_use)
        counters: tuple[tuple[str, str, float], ...] = (
            ("prefix_cache_queries_total", "Prefix cache queries, in tokens.", s.prefix_queries_total),
            ("prefix_cache_hits_total", "Prefix cache hits, in tokens.", s.prefix_hits_total),
            ("external_prefix_cache_queries_total", "External prefix cache queries, in tokens.", 0),
            ("external_prefix_cache_hits_total", "External prefix cache hits, in tokens.", 0),
            ("mm_cache_queries_total", "Multi-modal cache queries, in items.", 0),
            ("mm_cache_hits_total", "Multi-modal cache hits, in items.", 0),
            ("num_preemptions_total", "Cumulative number of preemptions.", s.preemptions_total),
            ("prompt_tokens_total", "Number of prefill tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Number of cached prompt tokens.", self.cached_tokens),
            ("generation_tokens_total", "Number of generation tokens processed.", self.generation_tokens),
        )
        for name, about, value in counters:
            one(name, "counter", about, value)
        simple(
            "prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            ((',source="local_compute"', local), (',source="local_cache_hit"', self.cached_tokens)),
        )
        simple(
            "prompt_tokens_cached_by_source_total",
            "counter",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            ((',source="device"', self.cached_tokens),),
        )
        simple(
            "request_success_total",
            "counter",
            "Count of successfully processed requests.",
            ((f',finished_reason="{reason}"', n) for reason, n in self.success.items()),
        )
        out.append(
            "# HELP vllm:admission_rejections_total Attempts rejected by a queue limit, by reason.\n"
            "# TYPE vllm:admission_rejections_total counter\n"
            f'vllm:admission_rejections_total{{{model},reason="max_num_queued_reqs"}} '
            f"{float(self.rejections)}\n"
        )
        for histogram in self._histograms:
            histogram.write(out, labels)
        out.append(
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{_block_size_resolved="True",block_size="{BLOCK_SIZE}",cache_dtype="auto",'
            f'enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",'
            f'num_gpu_blocks="{s.kv.num_blocks}",prefix_caching_hash_algo="tuple"}} 1.0\n'
        )
        return "".join(out)
