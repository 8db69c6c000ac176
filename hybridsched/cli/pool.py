"""`hybridsched pool`: what a pool does now, its policy, and operators' holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration, on_terminal, pool_options, with_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

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

    from hybridsched.cli.pool_view import render

    Console(width=None if on_terminal() else 200).print(render(seen))


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
        click.echo(f"{entry.version:>5}  {_local(entry.at_ms)}  {name}  {entry.by}{remark}")
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
@pool_options
@click.option("--lane", help="The lane to hold; without it the whole pool.")
@click.option("--why", required=True, help="The reason, for whoever asks `hybridsched why`.")
@click.option("--for", "for_ms", type=Duration(), help="End by itself after this long, such as 30m or 1h30m.")
@_json_option
def hold(
    redis_option: str | None, pool: str, lane: str | None, why: str, for_ms: float | None, as_json: bool
) -> None:
    """Keep gates closed until released: of one lane, or of the whole pool."""
    import msgspec

    from hybridsched.cli.words import span
    from hybridsched.store.holds import HoldStore
    from hybridsched.store.keys import check_name

    if lane is not None:
        try:
            check_name("lane", lane)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--lane") from error
    placed = with_redis(
        redis_option,
        f"holding pool {pool}",
        lambda client: HoldStore(client, pool).put(lane=lane or "", by=_who(), why=why, for_ms=for_ms),
    )
    if as_json:
        print_json(msgspec.to_builtins(placed))
        return
    where = f"Lane {lane}" if lane else f"Every lane of pool {pool}"
    until = "until released" if for_ms is None else f"for {span(for_ms)}"
    click.echo(f"{where} is held {until}.")


@pool.command()
@pool_options
@click.option("--lane", help="The lane to release; without it the hold of the whole pool.")
def release(redis_option: str | None, pool: str, lane: str | None) -> None:
    """End a hold. Lanes open again when the policy finds them idle."""
    from hybridsched.store.holds import HoldStore

    gone = with_redis(
        redis_option,
        f"releasing pool {pool}",
        lambda client: HoldStore(client, pool).release(lane=lane or ""),
    )
    where = f"lane {lane}" if lane else f"pool {pool} as a whole"
    if not gone:
        raise click.ClickException(f"{where} is not held; see the holds with `hybridsched pool status`")
    click.echo(f"The hold of {where} is over.")


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


def _local(at_ms: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ms / 1000.0, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
