"""`hybridsched why`, `decisions` and `top`: what was decided, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import on_terminal, pool_options, screen_width, with_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from hybridsched.cli.decision_view import Answer
    from hybridsched.core.codec import DecisionRecord

REFRESH_S = 0.5

_SHOWN = 10
"""Lines of a log that are no records, shown one by one."""


@click.command()
@click.argument("lane")
@pool_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def why(redis_option: str | None, pool: str, lane: str, as_json: bool) -> None:
    """Say in one sentence why LANE's gate is open or closed, on which numbers, and since when."""

    async def work(client: Redis) -> Answer:
        from hybridsched.cli.decision_view import explain

        return await explain(client, pool, lane)

    answer = with_redis(redis_option, f"reading lane {lane} of pool {pool}", work)
    if as_json:
        import json

        click.echo(json.dumps(answer.data, indent=2))
    else:
        click.echo(answer.sentence)


@click.group(invoke_without_command=True)
@pool_options
@click.option("--lane", help="Only this lane.")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Newest changes to show; with --json newest records.",
)
@click.option("--follow", is_flag=True, help="Go on with new ones until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print whole records, one JSON object a line.")
@click.pass_context
def decisions(
    ctx: click.Context,
    redis_option: str | None,
    pool: str,
    lane: str | None,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """List what the policy worker decided: each change of a lane with its numbers, oldest first.

    Times are local. With --lane a lane that is not there now is fine as long as the log speaks of it.
    """
    if ctx.invoked_subcommand is not None:
        return

    async def work(client: Redis) -> None:
        from hybridsched.cli.decision_view import Changes, known_lanes, living_lanes, no_such_lane
        from hybridsched.core.codec import encode
        from hybridsched.store.decisions import DecisionLog

        changes, log = Changes(lane), DecisionLog(client, pool)

        def lines(record: DecisionRecord) -> list[str]:
            if lane is not None and all(d.lane != lane for d in record.decisions):
                return []
            return [encode(record).decode()] if as_json else changes.lines(record)

        if as_json:
            past = [line for record in await log.read(limit=limit, lane=lane) for line in lines(record)]
        else:
            past = [change.line for change in await changes.newest(log.backwards(), limit)]
        if not past and lane is not None:
            known = await known_lanes(client, pool)
            if lane not in known:
                raise click.ClickException(no_such_lane(pool, lane, await living_lanes(client, pool)))
        for line in past:
            click.echo(line)
        if not past and not as_json:
            about = f"pool {pool}" if lane is None else f"lane {lane} of pool {pool}"
            click.echo(f"The log holds no decision on {about}.", err=True)
        if follow:
            async for record in log.follow():
                for line in lines(record):
                    click.echo(line)

    try:
        with_redis(redis_option, f"reading the decisions of pool {pool}", work)
    except KeyboardInterrupt:
        # The way to end --follow.
        return


@decisions.command()
@click.argument("file", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def replay(file: Any, as_json: bool) -> None:
    """Decide again on the records in FILE (- for stdin), which `decisions --json` printed.

    Exit status 1 when any decision differs from the recorded one, a line is no record (the others are
    replayed all the same), or there is none at all.
    """
    import json

    import msgspec

    from hybridsched.core.codec import CodecError, decode_record
    from hybridsched.core.codec import replay as decide_again

    records, found = 0, []
    unread: list[dict[str, Any]] = []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = decode_record(line)
        except CodecError as error:
            unread.append({"line": number, "problem": str(error)})
            continue
        records += 1
        found += [
            {"line": number, "cycle": record.cycle, **msgspec.to_builtins(difference)}
            for difference in decide_again(record)
        ]
    if as_json:
        click.echo(json.dumps({"records": records, "differences": found, "unreadable": unread}, indent=2))
    else:
        for entry in found:
            click.echo(
                f"line {entry['line']}, cycle {entry['cycle']}, lane {entry['lane']}: {entry['field']} was "
                f"{entry['recorded']}, is now {entry['replayed']}"
            )
        click.echo(f"{records} records replayed, {len(found)} differences.")
    for one in unread[:_SHOWN]:
        click.echo(f"Error: line {one['line']}: {one['problem']}", err=True)
    if len(unread) > 1:
        click.echo(f"Error: {len(unread)} lines are no records.", err=True)
    if not records and not unread:
        click.echo("Error: there is no record in it, so nothing was replayed.", err=True)
    if found or unread or not records:
        click.get_current_context().exit(1)


@click.command()
@pool_options
@click.option("--json", "as_json", is_flag=True, help="Print the pool once, as JSON.")
@click.option("--once", is_flag=True, help="Print the pool once, also on a terminal.")
def top(redis_option: str | None, pool: str, as_json: bool, once: bool) -> None:
    """Watch a pool live; into a pipe: print it once. End with Ctrl-C."""
    import json

    live = on_terminal() and not as_json and not once

    async def work(client: Redis) -> None:
        import asyncio

        from rich.console import Console
        from rich.live import Live

        from hybridsched.cli.pool_table import render
        from hybridsched.cli.pool_view import look
        from hybridsched.workers.policy_observe import Observer

        observer = Observer(client, pool)
        seen = await look(client, pool, observer)
        if as_json:
            click.echo(json.dumps(seen, indent=2))
        elif not live:
            width = screen_width()
            Console(width=width).print(render(seen, width))
        else:
            with Live(render(seen, screen_width()), screen=True, auto_refresh=False) as screen:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    seen = await look(client, pool, observer)
                    screen.update(render(seen, screen_width()), refresh=True)

    try:
        with_redis(redis_option, f"reading pool {pool}", work)
    except KeyboardInterrupt:
        return
