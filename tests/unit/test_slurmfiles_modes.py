"""Node records of hosts with modes: rendered, put in place, written anew for a mode, and checked."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybridsched.cli.slurm import slurm
from hybridsched.slurmfiles import (
    Finding,
    InstallError,
    Level,
    apply,
    examine,
    mode_records,
    parse_site,
    plan,
    records_of,
    render,
)
from hybridsched.slurmfiles.configure import ConfigureRefusedError, configure, refusals
from hybridsched.slurmfiles.facts import expand
from hybridsched.slurmfiles.modes import gpu_counts, parse_devices, standing_modes
from hybridsched.slurmfiles.records import entries, leftovers
from tests.mode_files import GOLDEN, WAYS, example_site, modes_of, policy_text, printed_lines
from tests.unit.right_cluster import right

WITH_NVML = (
    (GOLDEN / "site.toml").read_text().replace('device_files = "/dev/nvidia[0-1]"', "autodetect = true")
)


def rendered(way: str, site: str | None = None, policy: str | None = None) -> dict[str, str]:
    """The files that follow from the policy. Without those that do not."""
    modes = modes_of(way, policy)
    devices = printed_lines(modes) if site is None else {}
    made = example_site() if site is None else parse_site(site)
    files = render(made, records_of(made, modes, devices))
    other = {"hybridsched-cluster.conf", "hybridsched-node.conf"}
    return {name: text for name, text in files.items() if name.endswith(".conf") and name not in other}


# Slices beside whole GPUs cannot be had by autodetection, nor a profile with a +.
ONLY_SLICES = policy_text().replace('layout = "mixed"', 'layout = "slices"')
CASES = {
    "records": ("records", None, None),
    "reconfigure": ("reconfigure", None, None),
    "autodetect": ("records", WITH_NVML, ONLY_SLICES),
    "unlisted": ("records", (GOLDEN / "site.toml").read_text(), None),
}


@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str) -> None:
    golden = {path.name: path.read_text() for path in (GOLDEN / case).iterdir()}
    assert rendered(*CASES[case]) == golden


def test_every_golden_file_is_of_a_case() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_line_is_one_that_slurm_can_read(case: str) -> None:
    for name, text in rendered(*CASES[case]).items():
        assert leftovers(text) == [], name
        named = [entry.value for entry in entries(text) if entry.key == "NodeName" and "gres" not in name]
        assert len(named) == len(set(named)), "Slurm takes a node once"


def test_records_of_a_host_have_ports_of_their_own_and_one_machine() -> None:
    text = rendered("records")["hybridsched-partitions.conf"]
    ports: dict[str, list[str]] = {}
    for entry in entries(text):
        if entry.key == "NodeName" and entry.value.startswith("gpu"):
            for host, address in zip(expand(entry.value), expand(entry.fields["NodeAddr"]), strict=True):
                ports.setdefault(address, []).append(entry.fields.get("Port", "6818"))
                assert entry.fields.get("NodeHostname", host) == f"gpu{address[-1]}"
    assert ports == {f"10.0.0.{i}": ["6818", "6819", "6820"] for i in (1, 2)}


def test_hosts_that_share_an_address_get_no_port_twice() -> None:
    site = (
        (GOLDEN / "site.toml")
        .read_text()
        .replace("NodeAddr=10.0.0.[1-2]", "NodeAddr=127.0.0.1 Port=[17011-17012]")
    )
    text = rendered("records", site)["hybridsched-partitions.conf"]
    ports = [
        port
        for entry in entries(text)
        if entry.key == "NodeName" and entry.value.startswith("gpu")
        for port in expand(entry.fields["Port"])
    ]
    assert sorted(ports) == [str(17011 + i) for i in range(6)]


def test_a_gpu_that_a_layout_does_not_name_is_as_the_others_leave_it() -> None:
    policy = policy_text().replace("  {devices = [1], mig-enabled = false},\n", "")
    with pytest.raises(ValueError, match=r"mode evening does not say how GPU 1 of gpu\[1-2\] is cut"):
        rendered("records", (GOLDEN / "site.toml").read_text(), policy)
    # One other way of it: then it is that.
    whole, halves = "mig-enabled = false", 'mig-enabled = true, mig-devices = {"3g.40gb" = 2}'
    policy = policy.replace(whole, halves)
    text = rendered("records", (GOLDEN / "site.toml").read_text(), policy)["hybridsched-partitions.conf"]
    assert "NodeName=gpu1-evening Gres=gpu:1g.10gb:3,gpu:1g.10gb.me:1,gpu:3g.40gb:3," in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('names = "gpu[1-2]"', 'names = "gpu[1-3]"', "modes for gpu1, gpu2 and not for gpu3: give these a"),
        ('names = "gpu[1-2]"', 'names = "gpu1"', r"modes for gpu2, and no table \[\[nodes\]\] names it"),
        ("gpus = 2\n", "gpus = 8\n", r"have 8 GPUs in the site file and 2 in the policy"),
        ('options = "NodeAddr', '# "', r"has no options: give the words of its NodeName line"),
        ("10.0.0.[1-2]", "10.0.0.[1-3]", "nodeaddr in the options .* has 3 values for 2 hosts"),
        ("CPUs=32", "Port=65535 CPUs=32", "would listen on port 65536"),
    ],
)
def test_what_does_not_go_together_is_refused(old: str, new: str, words: str) -> None:
    text = (GOLDEN / "site.toml").read_text()
    assert old in text
    with pytest.raises(ValueError, match=words):
        rendered("records", text.replace(old, new))


def test_lines_of_a_host_that_was_cut_otherwise_are_refused() -> None:
    site, modes = example_site(), modes_of()
    devices = printed_lines(modes)
    devices["day", "gpu1"] = devices["evening", "gpu1-evening"]
    with pytest.raises(ValueError, match=r"of gpu1 in mode day have .*1 x a100.* the mode has 4 x 3g\.40gb"):
        records_of(site, modes, devices)


def test_lines_are_read_as_mode_gres_prints_them() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    text = (
        "NodeName=n1 AutoDetect=off\nNodeName=n1 Name=gpu Type=a100 File=/dev/nvidia0\n# In slurm.conf: x\n"
    )
    parse_devices("day", text, found)
    assert found == {("day", "n1"): text.splitlines()[:2]}


def test_counts_of_gpus() -> None:
    assert gpu_counts("gpu:a100:2,gpu:1g.10gb:7(S:0-1),hsfill:4,gpu") == {"a100": 2, "1g.10gb": 7, "": 1}
    assert gpu_counts("(null)") == {}


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    shutil.copy(GOLDEN / "site.toml", tmp_path)
    (tmp_path / "policy.toml").write_text(policy_text())
    for (mode, name), lines in printed_lines(modes_of()).items():
        path = tmp_path / "devices" / mode / f"{name}.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return tmp_path


def test_one_command_gives_the_parts_of_all_modes(files: Path) -> None:
    words = ["render", str(files / "site.toml"), "--policy", str(files / "policy.toml")]
    out = files / "out"
    answer = CliRunner().invoke(slurm, [*words, "--devices", str(files / "devices"), "--out", str(out)])
    assert (answer.exit_code, answer.stderr) == (0, "")
    for path in (GOLDEN / "records").iterdir():
        assert (out / path.name).read_text() == path.read_text()
    answer = CliRunner().invoke(slurm, [*words, "--out", str(out)])
    assert answer.exit_code == 0
    assert "lacks the GPUs of 4 records" in answer.stderr
    assert "hybridsched mode gres --node gpu1 --gpu-type a100 > DEVICES/day/gpu1.conf" in answer.stderr


@pytest.mark.parametrize("word", ["render", "install"])
def test_a_policy_that_does_not_help_is_wrong_use(files: Path, word: str) -> None:
    site = str(files / "site.toml")
    for policy, said in (("idle-window", "has no [modes]"), (str(files / "none.toml"), "no such file")):
        answer = CliRunner().invoke(slurm, [word, site, "--policy", policy])
        assert answer.exit_code == 2
        assert said in answer.stderr


def test_the_check_of_what_it_cannot_read_is_unknown(files: Path) -> None:
    policy = str(files / "policy.toml")
    (files / "bare.toml").write_text("")
    for words, said in (
        (["check", "--policy", policy], "--policy needs a SITE_FILE"),
        (["check", str(files / "bare.toml"), "--policy", policy], "modes for gpu1, gpu2, and no table"),
        (["check", str(files / "site.toml"), "--policy", "idle-window"], "has no [modes]"),
    ):
        answer = CliRunner().invoke(slurm, words)
        assert answer.exit_code == 3
        assert answer.stdout.startswith("SLURM UNKNOWN - ")
        assert said in answer.stdout


# -- in place ----------------------------------------------------------------------------------------------


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The folder of a site whose hosts have one record for all modes, each on a line of its own."""
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "slurm.conf").write_text("ClusterName=c\nGresTypes=gpu\n")
    (folder / "gres.conf").write_text("AutoDetect=off\n")
    modes = modes_of("reconfigure")
    apply(plan(example_site(), folder, modes, printed_lines(modes)))
    return folder


def gres_of(etc: Path, node: str) -> tuple[dict[str, int], list[str]]:
    """GPUs of a node by slurm.conf, and their files by gres.conf."""
    text = (etc / "hybridsched-partitions.conf").read_text()
    (line,) = [entry for entry in entries(text) if entry.value == node]
    lines = [e.fields for e in entries((etc / "hybridsched-gres.conf").read_text()) if e.value == node]
    files = [f.get("File") or f.get("MultipleFiles", "") for f in lines if f.get("Name") == "gpu"]
    return gpu_counts(line.fields["Gres"]), files


def test_install_puts_the_records_of_all_modes_in_place(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=c\nNodeName=gpu[1-2] Gres=gpu:a100:2,nic:1 CPUs=32 State=UNKNOWN\n"
    )
    modes = modes_of()
    apply(plan(example_site(), tmp_path, modes, printed_lines(modes)))
    text = (tmp_path / "slurm.conf").read_text()
    assert "NodeName=gpu[1-2] Gres=gpu:3g.40gb:4,hsfill:no_consume:4,hslane:4,nic:1 CPUs=32" in text
    ours = (tmp_path / "hybridsched-partitions.conf").read_text()
    names = [entry.value for entry in entries(ours) if entry.key == "NodeName"]
    assert names == ["gpu1-evening", "gpu1-night", "gpu2-evening", "gpu2-night", "old1", "hspark"]
    assert plan(example_site(), tmp_path, modes, printed_lines(modes)).needed == ()


def test_install_leaves_a_host_in_its_mode(etc: Path) -> None:
    """Another install after a switch, say with one more mode, does not take the host back."""
    modes = modes_of("reconfigure")
    assert configure(etc, "gpu2", "night")
    the_plan = plan(example_site(), etc, modes, printed_lines(modes))
    assert the_plan.needed == ()


def test_there_and_back_again(etc: Path) -> None:
    before = {path: path.read_text() for path in etc.iterdir()}
    devices = printed_lines(modes_of("reconfigure"))
    for mode, gpus in (
        ("night", {"a100": 2}),
        ("evening", {"a100": 1, "1g.10gb": 3, "1g.10gb.me": 1, "3g.40gb": 1}),
    ):
        assert {path.name for path in configure(etc, "gpu1", mode)} == {
            "hybridsched-partitions.conf",
            "hybridsched-gres.conf",
        }
        counts, files = gres_of(etc, "gpu1")
        assert counts == gpus
        assert files == [line.rpartition("=")[2] for line in devices[mode, "gpu1"] if "Type=" in line]
        assert gres_of(etc, "gpu2")[0] == {"3g.40gb": 4}, "another host stays"
        assert configure(etc, "gpu1", mode) == [], "a second time there is nothing to do"
    configure(etc, "gpu1", "day")
    assert {path: path.read_text() for path in etc.iterdir()} == before


@pytest.mark.parametrize("file", ["hybridsched-partitions.conf", "hybridsched-gres.conf"])
def test_a_call_that_was_cut_off_between_the_files_is_repaired_by_the_next(etc: Path, file: str) -> None:
    before = (etc / file).read_text()
    configure(etc, "gpu1", "night")
    after = {path: path.read_text() for path in etc.iterdir()}
    (etc / file).write_text(before)
    for mode in ("night", "day"):
        assert configure(etc, "gpu1", mode)
        (etc / file).write_text(before)
    configure(etc, "gpu1", "night")
    assert {path: path.read_text() for path in etc.iterdir()} == after


def test_hosts_that_change_at_once_do_not_undo_each_other(etc: Path) -> None:
    for mode in ("night", "evening", "day", "night"):
        threads = [threading.Thread(target=configure, args=(etc, f"gpu{i}", mode)) for i in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gres_of(etc, "gpu1") == gres_of(etc, "gpu2")
    assert gres_of(etc, "gpu1")[0] == {"a100": 2}


@pytest.mark.parametrize(
    ("words", "file", "old", "new", "said"),
    [
        (("gpu1", "nosuch"), "", "", "", "there is no .*hybridsched-mode-nosuch-nodes.conf: render"),
        (("gpu9", "night"), "", "", "", "has no Gres of node gpu9"),
        (("gpu1", "night"), "hybridsched-partitions.conf", "NodeName=gpu1 ", "NodeName=gpu[1,9] ",
         r"no line of node gpu1 alone; .* line 3 has NodeName=gpu\[1,9\]: divide it"),
        (("gpu1", "night"), "gres.conf", "AutoDetect=off", "NodeName=gpu[1-2] Name=gpu File=/dev/nvidia0",
         r"not of it alone; .*gres.conf line 1 has NodeName=gpu\[1-2\]: divide it"),
        (("gpu1", "night"), "gres.conf", "AutoDetect=off", "Name=gpu File=/dev/nvidia0",
         "line 1 has Name=gpu without NodeName=: divide it"),
        (("gpu1", "night"), "hybridsched-mode-night-gres.conf", "Name=gpu", "Name=gpx",
         "has no lines of the GPUs of gpu1"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_so_is_refused_and_nothing_is_written(
    etc: Path, words: tuple[str, str], file: str, old: str, new: str, said: str
) -> None:
    if file:
        text = (etc / file).read_text()
        assert old in text
        (etc / file).write_text(text.replace(old, new))
    before = {path: path.read_text() for path in etc.iterdir()}
    with pytest.raises(ConfigureRefusedError, match=said):
        configure(etc, *words)
    answer = CliRunner().invoke(slurm, ["configure", *words, "--etc", str(etc)])
    assert answer.exit_code == 2
    assert {path: path.read_text() for path in etc.iterdir()} == before


def test_the_check_tries_beforehand_what_a_switch_would_write(etc: Path) -> None:
    records = mode_records(example_site(), modes_of("reconfigure"))
    assert refusals(etc, records) == {}
    before = {path: path.read_text() for path in etc.iterdir()}
    (etc / "hybridsched-mode-night-gres.conf").unlink()
    part = etc / "hybridsched-mode-evening-nodes.conf"
    part.write_text(
        part.read_text().replace("NodeName=gpu2 Gres=gpu:a100:1,", "NodeName=gpu2 Gres=gpu:a100:2,")
    )
    found = refusals(etc, records)
    assert found.keys() == {"night", "evening"}
    assert "there is no " in found["night"]
    assert "gives node gpu2 gpu:a100:2,gpu:1g.10gb:3," in found["evening"]
    for path, text in before.items():
        path.write_text(text)
    ours = etc / "hybridsched-partitions.conf"
    ours.write_text(ours.read_text().replace("NodeName=gpu2 ", "NodeName=gpu[2,7] "))
    assert set(refusals(etc, records)) == {"day", "evening", "night", "weekend"}
    facts = replace(right(), mode_refusals=refusals(etc, records), nodes=seen("reconfigure") | {"hspark": {}})
    said = [f for f in examine(facts, example_site(), records, way="reconfigure") if f.code == "mode_parts"]
    assert [f.level for f in said] == [Level.CRITICAL] * 4
    assert "no host could be written into mode day: " in said[0].text
    assert "divide it, a line for each node" in said[0].text


def test_the_command_says_what_was_written_and_a_folder_that_fails_is_1(etc: Path) -> None:
    words = ["configure", "gpu1", "night", "--etc", str(etc)]
    answer = CliRunner().invoke(slurm, [*words, "--json"])
    assert answer.exit_code == 0
    assert len(json.loads(answer.output)["changed"]) == 2
    assert "gpu1 stands in mode night already" in CliRunner().invoke(slurm, words).output
    (etc / "hybridsched-partitions.conf").write_bytes(b"\xff\xfe")
    with pytest.raises(InstallError):
        configure(etc, "gpu1", "day")
    assert CliRunner().invoke(slurm, ["configure", "gpu1", "day", "--etc", str(etc)]).exit_code == 1


# -- checked -----------------------------------------------------------------------------------------------


def seen(way: str = "records") -> dict[str, dict[str, str]]:
    """The nodes as Slurm shows them where all is well: by day."""
    nodes = {}
    for record in mode_records(example_site(), modes_of(way)):
        if record.name in nodes:
            continue
        gpus = ",".join(f"gpu:{kind}:{count}" for kind, count in record.group.gpus.items())
        nodes[record.name] = {
            "Gres": f"{gpus},hsfill:4,hslane:4",
            "GresUsed": "gpu:0,hsfill:0,hslane:0",
            "Partitions": "online,offline",
            "State": "IDLE" if record.name == record.host else "DOWN",
        }
    return nodes


def judged(nodes: dict[str, dict[str, str]], way: str = "records", **config: str) -> dict[str, Finding]:
    facts = right()
    nodes = {**nodes, "hspark": facts.nodes["hspark"]}
    configured = {name: row["Gres"].replace("hsfill", "hsfill:no_consume") for name, row in nodes.items()}
    facts = replace(facts, nodes=nodes, configured_gres=configured, config={**facts.config, **config})
    found = examine(facts, example_site(), mode_records(example_site(), modes_of(way)), way=way)
    return {f.code: f for f in found if f.level is not Level.OK or f.code == "mode_records"}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_found_where_slurm_has_the_records(way: str) -> None:
    found = judged(seen(way), way)
    assert found.keys() == {"mode_records"}
    assert found["mode_records"].level is Level.OK


@pytest.mark.parametrize("mode", ["day", "evening", "night"])
def test_one_record_for_all_modes_is_right_in_each_of_them(mode: str) -> None:
    nodes = seen("reconfigure")
    for record in mode_records(example_site(), modes_of("reconfigure")):
        if mode in record.modes:
            nodes[record.name]["Gres"] = ",".join(
                [*(f"gpu:{k}:{n}" for k, n in record.group.gpus.items()), "hsfill:4", "hslane:4"]
            )
            assert standing_modes(
                example_site(), modes_of("reconfigure"), {record.name: nodes[record.name]["Gres"]}
            ) == {record.host: mode}
    assert judged(nodes, "reconfigure").keys() == {"mode_records"}


@pytest.mark.parametrize(
    ("node", "fields", "code", "level"),
    [
        ("gpu1-night", None, "mode_record_missing", Level.CRITICAL),
        ("gpu1-night", {"Gres": "gpu:a100:1,hsfill:4,hslane:4"}, "mode_record_gres", Level.CRITICAL),
        ("gpu2", {"Gres": "gpu:a100:2,hsfill:4,hslane:4"}, "mode_record_gres", Level.CRITICAL),
        ("gpu1-night", {"Partitions": "offline"}, "mode_record_partition", Level.CRITICAL),
        ("gpu1-night", {"State": "IDLE"}, "mode_record_state", Level.CRITICAL),
        ("gpu1", {"State": "DOWN"}, "mode_record_state", Level.WARNING),
    ],
)
def test_a_record_that_is_not_the_policys_is_found(
    node: str, fields: dict[str, str] | None, code: str, level: Level
) -> None:
    nodes = seen()
    if fields is None:
        del nodes[node]
    else:
        nodes[node] |= fields
    found = judged(nodes)
    assert found[code].level is level
    assert node in found[code].text
    assert found[code].remedy
    assert "\n" not in found[code].text + found[code].remedy
    # None of the records that rest is called down.
    follows = {"node_state"} if code == "mode_record_state" and level is Level.WARNING else set()
    assert set(found) - {"nodes_left_out"} == {code} | follows


def test_one_record_whose_gpus_are_of_no_mode_is_found() -> None:
    nodes = seen("reconfigure")
    nodes["gpu1"]["Gres"] = "gpu:a100:1,hsfill:4,hslane:4"
    found = judged(nodes, "reconfigure")
    assert found.keys() == {"mode_record_gres"}
    assert "gpu:3g.40gb:4 in mode day or " in found["mode_record_gres"].text


def test_a_build_without_several_slurmd_cannot_have_a_record_for_each_mode() -> None:
    assert "mode_multiple_slurmd" in judged(seen(), MULTIPLE_SLURMD="No")
    assert "mode_multiple_slurmd" not in judged(seen("reconfigure"), "reconfigure", MULTIPLE_SLURMD="No")
