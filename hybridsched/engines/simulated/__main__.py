"""`python -m hybridsched.engines.simulated`: a simulated vLLM server."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from hybridsched.engines.simulated.calls import Calls
from hybridsched.engines.simulated.engine import EngineLoop
from hybridsched.engines.simulated.log import IterationLog
from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, load_profile, profile_names
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.engines.simulated.server import App, describe, serve


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong flag, not the whole usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"error: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m hybridsched.engines.simulated",
        description="A SIMULATED vLLM: its HTTP API and metrics, iteration times from a published profile. "
        "No model runs; the text is invented.",
        allow_abbrev=False,
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0 takes a free one; the ready line names it")
    p.add_argument(
        "--served-model-name", nargs="+", default=["simulated"], help="one or more names (the first answers)"
    )
    p.add_argument(
        "--profile", default=DEFAULT_PROFILE, help=f"{', '.join(profile_names())}, or a .json file"
    )
    p.add_argument("--speed", type=float, default=1.0, help="how many times faster than the wall clock")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--max-num-batched-tokens", type=int, default=2048)
    p.add_argument("--max-model-len", type=int, default=16_384)
    p.add_argument("--kv-tokens", type=int, default=400_000, help="KV cache size in tokens")
    p.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    p.add_argument("--max-num-queued-reqs", type=int, default=None, help="more in flight than this get a 503")
    p.add_argument(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        help="seconds to drain at SIGTERM; 0 (as vLLM) leaves open answers hanging",
    )
    p.add_argument(
        "--runner", choices=("generate", "pooling"), default="generate", help="pooling: embeddings"
    )
    p.add_argument("--enable-server-load-tracking", action="store_true")
    p.add_argument(
        "--enable-sleep-mode", action="store_true", help="sleep frees memory; without, it only pauses"
    )
    p.add_argument(
        "--enable-prompt-tokens-details", action="store_true", help="say in `usage` what the prefix cache had"
    )
    p.add_argument("--iteration-log", type=Path, default=None, help="JSON lines, one for each engine step")
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse, start, serve. Exit status 2 for flags that cannot be."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.port <= 65_535:
            raise ValueError(f"--port must be 0 to 65535, got {args.port}")  # noqa: TRY301
        if args.max_num_queued_reqs is not None and args.max_num_queued_reqs < 1:
            raise ValueError(f"--max-num-queued-reqs must be at least 1, got {args.max_num_queued_reqs}")  # noqa: TRY301
        if args.shutdown_timeout < 0:
            raise ValueError(f"--shutdown-timeout must be 0 or more, got {args.shutdown_timeout:g}")  # noqa: TRY301
        limits = Limits(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            kv_tokens=args.kv_tokens,
            scheduling_policy=args.scheduling_policy,
        )
        profile = load_profile(args.profile)
        sock = _bind(args.host, args.port)
        log = IterationLog(args.iteration_log) if args.iteration_log is not None else None
        engine = EngineLoop(limits, profile, model=args.served_model_name[0], speed=args.speed, log=log)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    calls = Calls(
        engine,
        tuple(args.served_model_name),
        runner=args.runner,
        max_queued=args.max_num_queued_reqs,
        prompt_details=args.enable_prompt_tokens_details,
    )
    port = sock.getsockname()[1]
    ready = describe(
        {
            "url": f"http://{args.host}:{port}",
            "model": args.served_model_name[0],
            "profile": profile.name,
            "speed": args.speed,
        }
    )
    app = App(calls, track_load=args.enable_server_load_tracking, sleep_mode=args.enable_sleep_mode)
    return serve(
        app, host=args.host, port=port, shutdown_timeout=args.shutdown_timeout, ready=ready, sock=sock
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that name it; without it every
    # answer of two writes waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    return sock


if __name__ == "__main__":
    sys.exit(main())
