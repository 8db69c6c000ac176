"""`hybridsched`: the entry point, and the table of its commands."""

from __future__ import annotations

import importlib
from typing import NamedTuple, NoReturn

import click

from hybridsched import __version__


class Entry(NamedTuple):
    """Where a command lives, and its line in `hybridsched --help`."""

    module: str
    attribute: str
    summary: str


# The summary stands here so that --help imports no command: several import Redis or an HTTP stack.
COMMANDS: dict[str, Entry] = {
    "batch": Entry("hybridsched.cli.batch", "batch", "Submit, run and follow offline batch files."),
    "decisions": Entry("hybridsched.cli.decisions", "decisions", "List what the policy worker decided."),
    "demo": Entry("hybridsched.cli.demo", "demo", "Run the main job on this machine and write a report."),
    "engine": Entry("hybridsched.cli.engine", "engine", "Plan and start engines, by the model itself."),
    "lane": Entry("hybridsched.cli.lane", "lane", "Run programs of your own while a lane is open."),
    "mode": Entry("hybridsched.cli.mode", "mode", "Show and switch modes: how GPUs are cut, and when."),
    "policy": Entry("hybridsched.cli.policy", "policy", "Make a policy: tune its thresholds in the twin."),
    "pool": Entry("hybridsched.cli.pool", "pool", "Show and steer a pool: status, policy, holds."),
    "simulate": Entry("hybridsched.cli.simulate", "simulate", "Replay a trace and a batch in the twin."),
    "slurm": Entry("hybridsched.cli.slurm", "slurm", "Render, install and check what Slurm needs."),
    "top": Entry("hybridsched.cli.decisions", "top", "Watch a pool live."),
    "why": Entry("hybridsched.cli.decisions", "why", "Say why a lane's gate is open or closed."),
    "worker": Entry("hybridsched.cli.worker", "worker", "Run one of the loops: online, offline, policy."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(entry.module), entry.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}:{entry.attribute} is no click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(sorted(COMMANDS))}."
            ctx.fail(f"no such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in sorted(COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybridsched")
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    envvar="HYBRIDSCHED_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much the workers say on stderr.",
)
@click.pass_context
def cli(ctx: click.Context, log_level: str) -> None:
    """Online LLM requests first, bulk inference in the measured gaps.

    Exit status: 0 done, 1 failed, 2 wrong usage.
    """
    ctx.meta["hybridsched.log_level"] = log_level


def main() -> NoReturn:
    """Run the command line and end the process with its exit status."""
    import sys

    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("Aborted.", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (head, less): not a failure, and nothing more can be said.
        sys.stderr.close()
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
