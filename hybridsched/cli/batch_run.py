"""`hybridsched batch run`: one file on engines of one's own, here and now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hybridsched.cli.batch_follow import bar, print_json

if TYPE_CHECKING:
    from hybridsched.batches.layout import BatchFiles
    from hybridsched.batches.work import WorkFolder


def run_here(work: WorkFolder, engine_urls: Sequence[str], api_key: str | None) -> tuple[int, int, int]:
    """Run until the end, or until a signal. Returns the lines in the output file, those in the error file,
    and all that have an answer, which may wait in the work folder."""
    import asyncio
    import signal

    from hybridsched.engines.protocol import EngineError
    from hybridsched.engines.vllm_http import VllmHttpEngine
    from hybridsched.workers.offline_file import RunState, run_file

    answered = 0

    async def session() -> tuple[int, int, int]:
        served: set[str] | None = set()
        for url in engine_urls:
            engine = VllmHttpEngine(url, api_key=api_key)
            healthy = await engine.healthy()
            try:
                models = (await engine.info()).models if healthy else ()
            except EngineError:  # the run itself says what is wrong with it
                models = ()
            await engine.close()
            served = served | set(models) if models and served is not None else None
            if not healthy:
                raise click.ClickException(
                    f"no engine answers at {url}/health; start it, or give its address with --engine"
                )
        if served is not None and (said := unserved(work.index.models, served)):
            click.echo(said, err=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        with bar(work.index.lines) as show:

            def on_progress(state: RunState) -> None:
                nonlocal answered
                answered = state.done
                show(state.done, state.failed)

            progress = await run_file(work, engine_urls, api_key=api_key, stop=stop, on_progress=on_progress)
        return progress.done, progress.failed, max(answered, progress.done + progress.failed)

    try:
        return asyncio.run(session())
    finally:
        work.close()


def unserved(asked: Mapping[str, int], served: Collection[str]) -> str:
    """That lines name models that none of the engines serves, so that they will fail; empty: none does.

    `asked` has the lines of each model.
    """
    lacking = {model: lines for model, lines in asked.items() if model not in served}
    if not lacking:
        return ""
    names = ", ".join(f"{model} ({lines:,} lines)" for model, lines in lacking.items())
    return (
        f"No engine that was given serves {names}; they serve {', '.join(sorted(served))}. These lines end "
        "in the error file with an engine's 404. If they should run, stop this, and start again with one "
        "more --engine and another --output."
    )


def report_run(files: BatchFiles, lines: int, done: int, failed: int, answered: int, json_: bool) -> int:
    """Say how a local run ended. Returns the exit status."""
    whole = done + failed == lines
    if not whole:
        waiting = answered - done - failed
        click.echo(
            f"Stopped with {answered:,} of {lines:,} lines answered; the same command goes on from here."
            + (f" {waiting:,} of them wait in {files.work} for the lines before them." if waiting else ""),
            err=True,
        )
    if json_:
        status = "completed" if whole else "in_progress"
        counts = {"lines": lines, "done": done, "failed": failed, "remaining": lines - done - failed}
        print_json({"status": status, **counts, "output": files.output, "errors": files.errors})
    else:
        click.echo(f"{done:,} of {lines:,} lines in {files.output}, {failed:,} in {files.errors}")
    return 0 if whole else 1
