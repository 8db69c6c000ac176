"""`hybridsched pool`: what a pool does now, its policy, and operators' holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration, pool_options, screen_width, with_redis
from hybridsched.cli.words import local, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from hybridsched.core.values import Hold

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
def pool() -> None:
    """Show and steer a pool: status, policy, holds."""


@pool.command()
@pool_options
@_json_option
def status(redis_option: str | None, pool: str, as_json: bool) -> None:
    """Show every lane with its gate, its reason and what runs there."""

    async def work(client: Redis) -> dict[str, Any]:
        from hybridsched.cli.pool_view import look

        return await look(client, pool)

    seen = with_redis(redis_option, f"reading the status of pool {pool}", work)
    if as_json:
        print_json(seen)
        return
    from rich.console import Console

    from hybridsched.cli.pool_table import render

    width = screen_width()
    Console(width=width).print(render(seen, width))


@pool.group()
def policy() -> None:
    """Show, set and roll back the pool's policy. Running workers take a change up at their next cycle."""


@policy.command()
@pool_options
@_json_option
def show(redis_option: str | None, pool: str, as_json: bool) -> None:
    """Print the policy in force, as the TOML that `set` takes."""
    import msgspec

    from hybridsched.policyfile import dump_toml
    from hybridsched.store.policy import PolicyStore

    found = with_redis(
        redis_option, f"reading the policy of pool {pool}", lambda client: PolicyStore(client, pool).current()
    )
    if found is None:
        raise click.ClickException(
            f"pool {pool} has no policy, so all its gates are closed; "
            f"set one with `hybridsched pool policy set FILE`"
        )
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        click.echo(f"# version {found.version}\n{dump_toml(found)}", nl=False)


@policy.command("set")
@click.argument("file")
@pool_options
@click.option("--note", default="", help="A remark for the history.")
@_json_option
def set_(redis_option: str | None, pool: str, file: str, note: str, as_json: bool) -> None:
    """Check FILE (TOML, or the name of a shipped policy) and put it in force as a new version."""
    from hybridsched.policyfile import PolicyError, load_policy
    from hybridsched.store.policy import PolicyStore

    try:
        given = load_policy(file).policy
    except PolicyError as error:
        raise click.UsageError(str(error)) from error
    version = with_redis(
        redis_option,
        f"setting the policy of pool {pool}",
        lambda client: PolicyStore(client, pool).set(given, by=_who(), note=note),
    )
    if as_json:
        print_json({"pool": pool, "name": given.name, "version": version})
    else:
        click.echo(f"Policy {given.name} is version {version} of pool {pool}.")


@policy.command()
@pool_options
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="Versions to show.")
@_json_option
def history(redis_option: str | None, pool: str, limit: int, as_json: bool) -> None:
    """List the versions that were set, newest first."""
    import msgspec

    from hybridsched.store.policy import PolicyStore

    found = with_redis(
        redis_option,
        f"reading the policy history of pool {pool}",
        lambda client: PolicyStore(client, pool).history(limit=limit),
    )
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    for entry in found:
        name = "(cannot be read by this release)" if entry.policy is None else entry.policy.name
        remark = f"  {entry.note}" if entry.note else ""
        click.echo(f"{entry.version:>5}  {local(entry.at_ms)}  {name}  {entry.by}{remark}")
    if not found:
        click.echo(f"Pool {pool} never had a policy.")


@policy.command()
@click.argument("version", type=click.IntRange(min=1))
@pool_options
@_json_option
def rollback(redis_option: str | None, pool: str, version: int, as_json: bool) -> None:
    """Put an earlier VERSION in force again, as a new version."""
    from hybridsched.store.policy import PolicyStore

    new = with_redis(
        redis_option,
        f"rolling back the policy of pool {pool}",
        lambda client: PolicyStore(client, pool).rollback(version, by=_who()),
    )
    if as_json:
        print_json({"pool": pool, "rolled_back_to": version, "version": new})
    else:
        click.echo(f"Version {version} is in force again in pool {pool}, as version {new}.")


@pool.command()
@click.argument("lane_word", metavar="[LANE]", required=False)
@pool_options
@click.option("--lane", help="The lane to hold, as LANE; without either the whole pool.")
@click.option("--why", required=True, help="The reason, for whoever asks `hybridsched why`.")
@click.option("--for", "for_ms", type=Duration(), help="End by itself after this long, such as 30m or 1h30m.")
@click.option("--force", is_flag=True, help="Also a lane that is not there yet; it is held when it comes.")
@_json_option
def hold(
    redis_option: str | None,
    pool: str,
    lane_word: str | None,
    lane: str | None,
    why: str,
    for_ms: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Keep gates closed until released: of one lane, or of the whole pool.

    A hold stands beside those of others, under an id of its own: what several hold opens when the last has
    ended.
    """
    import msgspec

    from hybridsched.store.holds import HoldStore
    from hybridsched.store.keys import check_name

    lane = _one_lane(lane_word, lane)
    if lane is not None:
        try:
            check_name("lane", lane)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--lane") from error
    if not why.strip():
        raise click.BadParameter("it is empty; say why, for whoever finds it closed", param_hint="--why")

    async def work(client: Redis) -> tuple[Hold, list[Hold]]:
        from hybridsched.cli.decision_view import known_lanes, living_lanes, no_such_lane

        if lane is not None and not force:
            known = await known_lanes(client, pool)
            if lane not in known:
                hint = "with --force it is held when it comes"
                living = await living_lanes(client, pool)
                raise click.ClickException(f"{no_such_lane(pool, lane, living)}; {hint}")
        store = HoldStore(client, pool)
        placed = await store.put(lane=lane or "", by=_who(), why=why, for_ms=for_ms)
        others = [other for other in await store.standing() if other.id != placed.id]
        return placed, others

    placed, others = with_redis(redis_option, f"holding pool {pool}", work)
    if as_json:
        print_json(msgspec.to_builtins(placed) | {"also": msgspec.to_builtins(others)})
        return
    where = f"Lane {lane}" if lane else f"Every lane of pool {pool}"
    until = "until released" if for_ms is None else f"for {span(for_ms)}"
    click.echo(f"{where} is held {until}, by hold {placed.id}.")
    if others:
        click.echo(f"{counted(others)} beside it:\n{listed(others)}")


@pool.command()
@click.argument("lane_word", metavar="[LANE]", required=False)
@pool_options
@click.option("--lane", help="The lane to release, as LANE; without either the hold of the whole pool.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="This hold and no other; may be repeated.")
@click.option(
    "--all", "everything", is_flag=True, help="All holds: of the pool and of every lane, or of LANE."
)
@_json_option
def release(
    redis_option: str | None,
    pool: str,
    lane_word: str | None,
    lane: str | None,
    ids: tuple[str, ...],
    everything: bool,
    as_json: bool,
) -> None:
    """End a hold. Lanes that nothing else holds open again when the policy finds them idle.

    Where several hold the pool (or LANE), none is ended until --id says which, or --all: no
    order to keep closed is ended by accident.
    """
    import msgspec

    from hybridsched.store.holds import HoldStore

    lane = _one_lane(lane_word, lane)
    if ids and (everything or lane is not None):
        raise click.UsageError("--id names the holds by itself; give it without a lane and --all")

    async def work(client: Redis) -> tuple[list[Hold], list[Hold]]:
        store = HoldStore(client, pool)
        chosen = _chosen(await store.standing(), pool=pool, lane=lane, ids=ids, everything=everything)
        gone = await store.release(chosen)
        return list(gone), list(await store.standing())

    gone, left = with_redis(redis_option, f"releasing pool {pool}", work)
    if as_json:
        print_json({"released": msgspec.to_builtins(gone), "standing": msgspec.to_builtins(left)})
        return
    click.echo(f"Released:\n{listed(gone)}" if gone else "Released nothing: somebody else was faster.")
    if left:
        click.echo(f"{counted(left)}:\n{listed(left)}")
    else:
        click.echo("Nothing holds the pool or any lane of it now.")


def _chosen(
    standing: tuple[Hold, ...], *, pool: str, lane: str | None, ids: tuple[str, ...], everything: bool
) -> list[Hold]:
    """The holds that a release means. Raises click's exception when that is none, or more than was named."""
    names = "" if not standing else f"; these stand:\n{listed(standing)}"
    if ids:
        known = {hold.id for hold in standing}
        unknown = [given for given in ids if given not in known]
        if unknown:
            raise click.ClickException(f"pool {pool} has no hold {unknown[0]!r}{names}")
        return [hold for hold in standing if hold.id in ids]
    if everything and lane is None:
        found = list(standing)
        where = f"pool {pool}"
    else:
        found = [hold for hold in standing if hold.lane == (lane or "")]
        where = f"lane {lane}" if lane else f"pool {pool} as a whole"
    if not found:
        raise click.ClickException(f"{where} is not held{names}")
    if len(found) > 1 and not everything:
        raise click.ClickException(
            f"{len(found)} holds stand on {where}, and none was released; say which with --id ID, or --all:\n"
            f"{listed(found)}"
        )
    return found


def counted(holds: Sequence[Hold]) -> str:
    """`1 hold stands`, `2 holds stand`."""
    return "1 hold stands" if len(holds) == 1 else f"{len(holds)} holds stand"


def listed(holds: Sequence[Hold]) -> str:
    """One line a hold: its id, what it holds, by whom, why and how long."""
    return "\n".join(
        f"  {hold.id}  {f'lane {hold.lane}' if hold.lane else 'the whole pool'}, by {hold.by}: {hold.why}, "
        + ("until released" if hold.until_ms is None else f"until {local(hold.until_ms)}")
        for hold in holds
    )


def _one_lane(word: str | None, option: str | None) -> str | None:
    """The lane that is meant, given either way."""
    if word is not None and option is not None and word != option:
        raise click.UsageError(f"two lanes were given, {word} and --lane {option}; name one")
    return option if word is None else word


def print_json(data: Any) -> None:
    """One JSON document, indented."""
    import json

    click.echo(json.dumps(data, indent=2))


def _who() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
