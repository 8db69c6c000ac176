"""What the check reads of a live cluster: Slurm's commands by argument lists, each with a time limit."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridsched.slurmfiles.records import entries, parse_fields


class SlurmUnreachableError(Exception):
    """slurmctld could not be asked. Says which command failed and how."""


@dataclass(frozen=True)
class Device:
    """A device file that gres.conf names for a node of this machine."""

    node: str
    path: str
    problem: str | None
    """None when it is a device."""


@dataclass(frozen=True)
class Hook:
    """A Prolog or Epilog of a node that this machine is."""

    name: str
    path: str
    problem: str | None
    """None when slurmd can run it."""


@dataclass(frozen=True)
class ClusterFacts:
    """One look at a cluster. Names and values are as `scontrol` prints them."""

    config: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    nodes: Mapping[str, Mapping[str, str]]
    client: str
    """Version of the commands here, such as 22.05.8."""
    refusal: str | None
    """What sbatch said of an offline job that has nothing of what it needs; None: it was not tried."""
    accepted: bool = False
    """Whether that job would have been taken."""
    devices: Sequence[Device] = field(default=())
    hooks: Sequence[Hook] = field(default=())
    """Empty where this machine is no node."""
    ping_ms: float = 0.0
    configured_gres: Mapping[str, str] | None = None
    """Node -> Gres= as slurm.conf has it; None where slurm.conf cannot be read here."""
    complaints: Sequence[str] = field(default=())
    """What Slurm's commands said on the side though they succeeded."""
    resting: frozenset[str] = frozenset()
    """Node records that are out of service because their host is in another mode."""
    mode_refusals: Mapping[str, str] = field(default_factory=dict)
    """Mode -> why no host could be written into it, where hosts have one record for all modes."""

    def setting(self, name: str) -> str:
        """A setting's value without units, empty when it is unset. From 23.x some names end in `[0]`."""
        low = name.lower()
        for key, value in self.config.items():
            if key.lower().partition("[")[0] == low:
                return "" if value in ("(null)", "(none)", "N/A", "n/a") else value
        return ""


def gather(*, offline: str, timeout_s: float = 10.0) -> ClusterFacts:
    """Ask the cluster of SLURM_CONF (or the default configuration). Raises `SlurmUnreachableError`."""
    begin = time.monotonic()
    complaints: list[str] = []
    config = parse_config(_ask(["scontrol", "show", "config"], timeout_s, complaints))
    ping_ms = (time.monotonic() - begin) * 1000
    partitions = _records(_ask(["scontrol", "-o", "show", "partition"], timeout_s), "PartitionName")
    nodes = _records(_ask(["scontrol", "-o", "-d", "show", "node"], timeout_s), "NodeName")
    version = _ask(["scontrol", "--version"], timeout_s)
    if "SLURM_VERSION" not in config or not nodes:
        asked = "config" if "SLURM_VERSION" not in config else "node"
        raise SlurmUnreachableError(
            f"`scontrol show {asked}` succeeded, and its answer cannot be read: see what it prints, and that "
            "it is Slurm's own"
        )
    refusal, accepted = _try_submit(offline, timeout_s) if offline in partitions else (None, False)
    return ClusterFacts(
        config=config,
        partitions=partitions,
        nodes=nodes,
        client=version.split()[-1] if version.split() else "",
        refusal=refusal,
        accepted=accepted,
        devices=tuple(local_devices(config.get("SLURM_CONF", ""), nodes)),
        hooks=tuple(local_hooks(config, nodes)),
        ping_ms=ping_ms,
        configured_gres=configured_gres(config.get("SLURM_CONF", "")),
        complaints=tuple(dict.fromkeys(complaints)),
    )


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: lines of `Key = value`, in every release text."""
    found = (re.match(r"\s*([A-Za-z][\w\[\]()/]*)\s*=\s*(.*?)\s*$", line) for line in text.splitlines())
    return {match.group(1): match.group(2) for match in found if match}


def _records(text: str, key: str) -> dict[str, dict[str, str]]:
    # A reason may hold any character that Python takes for the end of a line; Slurm ends its lines by \n.
    rows = (parse_fields(line) for line in text.split("\n"))
    return {row[key]: row for row in rows if key in row}


def _ask(command: Sequence[str], timeout_s: float, complaints: list[str] | None = None) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a list of our own words, no shell
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a node's reason may be any bytes
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmUnreachableError(
            f"{command[0]} is not installed here: run the check on a machine with Slurm's clients"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachableError(
            f"`{' '.join(command)}` did not answer within {timeout_s:g} s: is slurmctld running and "
            "reachable?"
        ) from error
    except OSError as error:
        raise SlurmUnreachableError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise SlurmUnreachableError(
            f"`{' '.join(command)}` failed: {said or f'exit status {done.returncode}'}"
        )
    if complaints is not None:
        complaints += [line.strip() for line in done.stderr.splitlines() if "error:" in line]
    return done.stdout


def configured_gres(conf: str) -> dict[str, str] | None:
    """Node -> its Gres= in slurm.conf and what that includes; None where it cannot be read."""
    texts = _texts(Path(conf)) if conf else []
    if not texts:
        return None
    found: dict[str, str] = {}
    default = ""
    for text in texts:
        for entry in entries(text):
            if entry.key.lower() != "nodename":
                continue
            given = next((value for key, value in entry.fields.items() if key.lower() == "gres"), None)
            if entry.value.upper() == "DEFAULT":
                default = default if given is None else given
                continue
            for name in expand(entry.value):
                found[name] = default if given is None else given
    return found


def _try_submit(partition: str, timeout_s: float) -> tuple[str | None, bool]:
    """Have slurmctld judge a bare job without taking it (--test-only), so that job_submit.lua speaks."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SBATCH_")}
    try:
        done = subprocess.run(  # noqa: S603
            ["sbatch", "--test-only", f"--partition={partition}", "--wrap=true"],  # noqa: S607
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, False
    return " ".join(done.stderr.split()), done.returncode == 0


def local_devices(conf: str, nodes: Mapping[str, Mapping[str, str]]) -> list[Device]:
    """The device files of gres.conf for nodes that run on this machine. Empty where gres.conf is not here."""
    path = Path(conf).parent / "gres.conf"
    local = _local(nodes)
    found = []
    for text in _texts(path):
        for entry in entries(text):
            low = {key.lower(): value for key, value in {entry.key: entry.value, **entry.fields}.items()}
            mine = [node for node in expand(low.get("nodename", "")) if node in local] or (
                [] if "nodename" in low else sorted(local)
            )
            files = low.get("file", low.get("multiplefiles", ""))
            if mine and files:
                found += [Device(mine[0], name, _problem(name)) for name in expand(files)]
    return found


def local_hooks(config: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> list[Hook]:
    """Prolog and Epilog of a node that this machine is, by full path. A pattern is left out."""
    if not _local(nodes):
        return []
    found = []
    for key, path in config.items():
        name = key.partition("[")[0]
        if name in ("Prolog", "Epilog") and path.startswith("/") and not re.search(r"[*?\[]", path):
            problem = None if os.access(path, os.X_OK) else "cannot be run"
            found.append(Hook(name, path, problem if Path(path).exists() else "does not exist"))
    return found


def _local(nodes: Mapping[str, Mapping[str, str]]) -> set[str]:
    """The nodes that are this machine."""
    here = {os.uname().nodename.partition(".")[0], "localhost"}
    return {
        name
        for name, row in nodes.items()
        if row.get("NodeHostName", name).partition(".")[0] in here
        or row.get("NodeAddr", "").startswith("127.")
    }


def _texts(path: Path, depth: int = 0) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    texts = [text]
    for entry in entries(text):
        if entry.key == "Include" and depth < 3:
            texts += _texts(path.parent / entry.value, depth + 1)
    return texts


def _problem(path: str) -> str | None:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return error.strerror or "cannot be read"
    return None if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "is no device"


def expand(expression: str) -> list[str]:
    """Slurm's lists: `n[1-3,7]`, `/dev/nvidia[0-1],/dev/x`, with leading zeros kept."""
    out: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", expression):
        pieces = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            pieces = [piece + tail for piece in pieces for tail in ([text] if text else _ranges(ranges))]
        out += pieces
    return out


def _ranges(text: str) -> list[str]:
    out = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if high.isdigit() and low.isdigit():
            out += [str(n).zfill(len(low)) for n in range(int(low), min(int(high), int(low) + 100_000) + 1)]
        else:
            out.append(part)
    return out
