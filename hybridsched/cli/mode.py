"""`hybridsched mode`: the modes of a pool, and the switch of its hosts between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli import mode_mig
from hybridsched.cli.access import Duration, pool_options, with_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from hybridsched.cli.mode_view import Known

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
_hosts_option = click.option(
    "--node", "hosts", multiple=True, metavar="HOST", help="Only this host; can be given again."
)

CALENDAR = "calendar"
"""In the place of a mode: withdraw the orders, so that the calendar counts."""


@click.group()
def mode() -> None:
    """Show and switch modes: how the GPUs of each host are cut, which engines stand on them, and when."""


@mode.command("list")
@pool_options
@_json_option
def list_(redis_option: str | None, pool: str, as_json: bool) -> None:
    """List the policy's modes with their windows."""
    from hybridsched.cli.mode_view import list_json, list_text

    known = _known(redis_option, pool)
    _say(list_json(known), list_text(known), as_json)


@mode.command()
@pool_options
@_json_option
def status(redis_option: str | None, pool: str, as_json: bool) -> None:
    """Show where each host stands and what it waits for.

    Also what the calendar has ahead, whether that will be late or waits for an approval, and the orders.
    """
    from hybridsched.cli.mode_view import status_json, status_text

    known = _known(redis_option, pool)
    _say(status_json(known), status_text(known), as_json)


@mode.command()
@click.option("--to", metavar="MODE", help="The mode; without it, the calendar's next change.")
@_hosts_option
@pool_options
@_json_option
def plan(redis_option: str | None, pool: str, to: str | None, hosts: tuple[str, ...], as_json: bool) -> None:
    """Show for each host what a switch would change.

    With how long it takes and which jobs have to leave. It is what `switch` with the same options does, from
    where the hosts stand now.
    """
    from hybridsched.cli.mode_view import plan_json, plan_of, plan_text

    known = _known(redis_option, pool)
    made = plan_of(known, to, hosts)
    _say(plan_json(known, made), plan_text(known, made), as_json)


@mode.command()
@click.option("--to", required=True, metavar="MODE|calendar", help="The mode; calendar withdraws orders.")
@_hosts_option
@click.option(
    "--for", "for_ms", type=Duration(), help="The calendar counts again after this: 90m, 8h. Default: never."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and order nothing.")
@click.option("--yes", is_flag=True, help="Do not ask, on a terminal.")
@pool_options
@_json_option
def switch(
    redis_option: str | None,
    pool: str,
    to: str,
    hosts: tuple[str, ...],
    for_ms: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Order a mode for all hosts or for some.

    The policy worker follows, host by host. The order stands above the calendar until its time is over or it
    is withdrawn (`--to calendar`). It also takes a host that is held out of there. `mode status` shows how
    far it is.
    """
    from hybridsched.cli.mode_view import plan_json, plan_of, plan_text
    from hybridsched.cli.words import count

    known = _known(redis_option, pool)
    made = plan_of(known, to, hosts)
    answer: dict[str, Any] = plan_json(known, made) | {"ordered": False}
    if not as_json:
        click.echo(plan_text(known, made))
    if dry_run:
        if as_json:
            _print_json(answer)
        return
    if not known.modes.enabled and to != CALENDAR:
        raise click.ClickException(
            "modes.enabled is false in the policy, so nobody would follow the order; nothing was ordered"
        )
    if not yes and _asked(made.changes):
        click.confirm(f"Change {count(made.changes, 'host')}?", abort=True, err=True)

    async def work(client: Redis) -> str:
        from hybridsched.store.modes import ModeStore
        from hybridsched.store.telemetry import server_ms

        store = ModeStore(client, pool)
        if to == CALENDAR:
            gone = await store.withdraw(hosts)
            stay = [o for o in known.wishes.orders if o not in gone and (not hosts or not o.hosts)]
            wider = (
                f"; {stay[0].id} for all hosts stands, and {CALENDAR} without --node ends it" if stay else ""
            )
            return f"{count(len(gone), 'order')} withdrawn{wider}."
        until = None if for_ms is None else server_ms(await client.time()) + for_ms
        order = await store.order(to, hosts, by=_who(), until_ms=until)
        return f"Ordered ({order.id}); `hybridsched mode status` shows how far it is."

    said = with_redis(redis_option, f"ordering a mode in pool {pool}", work)
    if as_json:
        _print_json(answer | {"ordered": True})
    else:
        click.echo(said, err=True)


@mode.command()
@click.argument("change", required=False)
@pool_options
@_json_option
def approve(redis_option: str | None, pool: str, change: str | None, as_json: bool) -> None:
    """Approve the calendar's next change.

    CHANGE: its id in `mode status`, where another one is meant than the next that is not approved.
    """
    from hybridsched.cli.mode_view import held_of
    from hybridsched.core.autonomy import Autonomy

    known = _known(redis_option, pool)
    ahead = [one for one in (known.status.proposal, known.status.ahead) if one is not None]
    if known.modes.autonomy is Autonomy.SUGGEST:
        raise click.ClickException(
            'modes.autonomy is "suggest", so approvals are not followed; order the mode with '
            "`hybridsched mode switch --to MODE`"
        )
    if not ahead and change is None:
        raise click.ClickException("the calendar has no change ahead; see `hybridsched mode status`")
    name = change or next((one.id for one in ahead if not one.approved), ahead[0].id)
    if name not in [one.id for one in ahead]:
        there = f"it is {' or '.join(one.id for one in ahead)}" if ahead else "there is none"
        raise click.ClickException(f"{name!r} is not the change that is ahead: {there}")
    meant = next(one for one in ahead if one.id == name)
    held = held_of(meant, known.status.state)
    if len(held) == len(meant.hosts):
        raise click.ClickException(
            f"all that {name} would change is held ({', '.join(held)}), and follows orders only: "
            f"`hybridsched mode switch --to {meant.mode} --node {held[0]}`"
        )

    async def work(client: Redis) -> None:
        from hybridsched.store.modes import ModeStore

        await ModeStore(client, pool).approve(name, by=_who())

    with_redis(redis_option, f"approving a change in pool {pool}", work)
    if as_json:
        _print_json({"approved": name})
    else:
        click.echo(f"Approved {name}.")


def _known(redis_option: str | None, pool: str) -> Known:
    from hybridsched.cli.mode_view import read

    return with_redis(redis_option, f"reading the modes of pool {pool}", lambda client: read(client, pool))


def _asked(changes: int) -> bool:
    """Whether a person is there to be asked."""
    import sys

    return changes > 0 and sys.stdin.isatty()


def _say(data: Any, text: str, as_json: bool) -> None:
    if as_json:
        _print_json(data)
    else:
        click.echo(text)


def _print_json(data: Any) -> None:
    import json

    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def _who() -> str:
    import getpass
    import socket

    return f"{getpass.getuser()}@{socket.gethostname()}"


mode.add_command(mode_mig.assert_)
mode.add_command(mode_mig.apply)
mode.add_command(mode_mig.export)
mode.add_command(mode_mig.gres)
