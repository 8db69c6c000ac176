"""The check's reading: slurm.conf and its includes, hooks, devices, and what scontrol prints or does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybridsched.cli.main import cli
from hybridsched.slurmfiles import Level
from hybridsched.slurmfiles.facts import (
    SlurmUnreachableError,
    configured_gres,
    expand,
    gather,
    local_devices,
    local_hooks,
    parse_config,
)
from hybridsched.slurmfiles.records import parse_fields
from tests.unit.right_cluster import bad, right


def test_gres_of_slurm_conf_are_read_through_includes_and_defaults(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "NodeName=DEFAULT Gres=gpu:1\nNodeName=n[1-2] Gres=gpu:a100:4,hsfill:no_consume:4 CPUs=4\n"
        "NodeName=n3 CPUs=4\nInclude more.conf\n# NodeName=n9 Gres=x\n"
    )
    (tmp_path / "more.conf").write_text("NodeName=hspark Gres=hsfill:no_consume:8 State=DOWN\n")
    assert configured_gres(str(conf)) == {
        "n1": "gpu:a100:4,hsfill:no_consume:4",
        "n2": "gpu:a100:4,hsfill:no_consume:4",
        "n3": "gpu:1",
        "hspark": "hsfill:no_consume:8",
    }
    assert configured_gres(str(tmp_path / "none.conf")) is None
    assert configured_gres("") is None


def test_hooks_that_are_not_there(tmp_path: Path) -> None:
    here, there = {"n1": {"NodeAddr": "127.0.0.1"}}, {"n1": {"NodeAddr": "10.0.0.9", "NodeHostName": "far"}}
    plain = tmp_path / "epilog.sh"
    plain.write_text("#!/bin/sh\n")
    config = {"Prolog[0]": "/nowhere/prolog.sh", "Epilog": str(plain), "EpilogSlurmctld": "/nowhere/x"}
    assert local_hooks(config, there) == []
    assert [(h.name, h.problem) for h in local_hooks(config, here)] == [
        ("Prolog", "does not exist"),
        ("Epilog", "cannot be run"),
    ]
    plain.chmod(0o755)
    assert local_hooks({"Epilog": str(plain)}, here)[0].problem is None
    assert local_hooks({"Epilog": "/etc/epilog.d/*"}, here) == []
    found = bad(replace(right(), hooks=local_hooks(config, here)))
    assert found.keys() == {"prolog_path"}
    assert found["prolog_path"].level is Level.CRITICAL


def test_reading_scontrol() -> None:
    config = parse_config(
        "Configuration data as of X\nKillWait                = 30 sec\nPrologFlags = (null)\n\n"
    )
    assert config == {"KillWait": "30 sec", "PrologFlags": "(null)"}
    row = parse_fields(
        "NodeName=n1 OS=Linux 6.1 #1 SMP @0  State=IDLE Reason=two words [root@now] AllocTRES= X=1"
    )
    assert row["OS"] == "Linux 6.1 #1 SMP @0"
    assert row["Reason"] == "two words [root@now]"
    assert (row["AllocTRES"], row["X"]) == ("", "1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[08-10],x", ["gpu08", "gpu09", "gpu10", "x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("/dev/nvidia[0-1]", ["/dev/nvidia0", "/dev/nvidia1"]),
        ("", []),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_device_files_are_looked_up_through_includes(tmp_path: Path) -> None:
    (tmp_path / "gres.conf").write_text(
        "AutoDetect=off\nInclude more.conf\nNodeName=far Name=gpu File=/dev/none\n"
    )
    (tmp_path / "more.conf").write_text(
        f"NodeName=n[1-2] Name=gpu File=/dev/null,/dev/none,{tmp_path}/gres.conf\n"
    )
    nodes = {
        "n1": {"NodeAddr": "127.0.0.1"},
        "n2": {"NodeAddr": "127.0.0.1"},
        "far": {"NodeAddr": "10.0.0.9"},
    }
    found = local_devices(str(tmp_path / "slurm.conf"), nodes)
    assert [(d.node, Path(d.path).name, d.problem) for d in found] == [
        ("n1", "null", None),
        ("n1", "none", "No such file or directory"),
        ("n1", "gres.conf", "is no device"),
    ]
    assert local_devices("/nowhere/slurm.conf", nodes) == []


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachableError, match="is not installed here"):
        gather(offline="offline")
    slow = tmp_path / "scontrol"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(SlurmUnreachableError, match=r"did not answer within 0\.1 s"):
        gather(offline="offline", timeout_s=0.1)


def stand_in(folder: Path, node: bytes, config: bytes = b"SLURM_VERSION = 22.05.8") -> None:
    """A scontrol that answers so, and nothing else of Slurm."""
    for name, text in (("node", node), ("config", config), ("partition", b"PartitionName=offline")):
        (folder / name).write_bytes(text + b"\n")
    command = folder / "scontrol"
    command.write_text(
        f"#!/bin/sh\nfor word; do :; done\n[ -f {folder}/$word ] || exec /bin/echo slurm-wlm 22.05.8\n"
        f"exec /bin/cat {folder}/$word\n"
    )
    command.chmod(0o755)


@pytest.mark.parametrize("between", ["\x0c", "\x1c", "\u2028", "\u0085"])
def test_a_reason_may_hold_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, between: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = b"caf\xe9" + between.encode() + b"bar"
    stand_in(tmp_path, b"NodeName=n2 State=IDLE+DRAIN Reason=" + reason + b" [root@now] Partitions=offline")
    row = gather(offline="offline").nodes["n2"]
    assert row["Reason"] == f"caf\ufffd{between}bar [root@now]"
    assert row["Partitions"] == "offline"


@pytest.mark.parametrize(
    ("node", "config"),
    [
        (bytes(range(256)), b"SLURM_VERSION = 22.05.8"),
        (b"NodeName=n1", bytes(range(256)) * 20),
        (b"", b""),
        (
            b"NodeName=n1 Partitions=offline Gres=hslane:" + b"9" * 5000,
            b"SLURM_VERSION = 22.05.8\nGresTypes=hsfill,hslane",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_cannot_be_read_is_unknown_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: bytes, config: bytes, options: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    stand_in(tmp_path, node, config)
    done = CliRunner().invoke(cli, ["slurm", "check", *options])
    assert done.exit_code == 3, done.output
    assert not isinstance(done.exception, Exception)
    assert done.output.count("Remedy:" if not options else '"remedy"') == 1


def test_commands_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "scontrol").write_bytes(b"\x00\x01")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(SlurmUnreachableError, match="cannot be run"):
        gather(offline="offline")
