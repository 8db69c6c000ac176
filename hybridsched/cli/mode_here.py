"""The layout that the pool's policy wants of this machine's GPUs now, for `mode assert` and `mode apply`."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import click
import msgspec

from hybridsched.cli.access import with_redis
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_rest import UnsettledError, stands_in
from hybridsched.core.switch_values import SwitchState
from hybridsched.store.modes import ModeStore
from hybridsched.store.policy import PolicyStore

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from hybridsched.core.mig import Layout


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of this machine."""

    host: str
    mode: str
    label: str
    """The layout's; empty: the mode has none, and its GPUs stay as they are."""
    layout: Layout


def here(redis_option: str | None, pool: str, node: str | None) -> Here:
    """What the pool's policy wants of this machine (`node`: its name there) in the mode that it stands in.

    Raises `ClickException`: the pool has no modes, or nobody can say now; `UsageError`: it is no host there.
    """

    async def work(client: Redis) -> tuple[ModesPolicy | None, SwitchState]:
        policy = await PolicyStore(client, pool).current()
        modes = None if policy is None else policy.modes
        return modes, await ModeStore(client, pool).journal() or SwitchState()

    modes, state = with_redis(redis_option, f"reading the modes of pool {pool}", work)
    if modes is None:
        raise click.ClickException(
            f"the policy of pool {pool} has no section [modes], so it says nothing of this machine's GPUs; "
            "give -f FILE"
        )
    host = _host(modes, node)
    known = state.hosts.get(host)
    if known is None:
        raise click.ClickException(
            f"no policy worker of pool {pool} has said in which mode host {host} stands; give -f FILE, or "
            "see `hybridsched mode status`"
        )
    try:
        mode = modes.named(stands_in(known))
    except UnsettledError as error:
        raise click.ClickException(
            f"how the GPUs of host {host} should be cut is not settled: {error}"
        ) from error
    if mode is None:
        raise click.ClickException(f"host {host} stands in mode {known.mode}, which the policy has no more")
    return Here(host=host, mode=mode.name, label=mode.layout, layout=modes.mig_configs.get(mode.layout, ()))


def _host(modes: ModesPolicy, node: str | None) -> str:
    """The policy's name of this machine."""
    names = modes.all_hosts()
    own = socket.gethostname()
    asked = [own, own.partition(".")[0]] if node is None else [node]
    found = next((name for name in asked if name in names), None)
    if found is None:
        listed = ", ".join([*list(names)[:6], *(["..."] if len(names) > 6 else [])])
        what = f"this machine is called {own!r}" if node is None else f"--node was given {node!r}"
        raise click.UsageError(f"{what}, which is no host of the policy's modes ({listed}); give --node HOST")
    return found
