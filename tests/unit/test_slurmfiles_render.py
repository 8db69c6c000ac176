"""The site file and what is rendered from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybridsched.cli.slurm import slurm
from hybridsched.slurmfiles import Site, SiteError, load_site, parse_site, render
from hybridsched.slurmfiles.records import entries, gres_counts
from hybridsched.slurmfiles.render import batch_scripts
from hybridsched.slurmfiles.site import Nodes

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "slurm"
HOOKS = {"prolog.sh", "epilog.sh"}

SMALL = """
[[nodes]]
names = "n[1-2]"
gpu_type = "a100"
gpus = 4
"""


def test_batch_scripts_have_the_sites_names() -> None:
    text = """
[partitions]
online = "serve"
offline = "scavenge"
[fill]
gres = "openlane"
places = "lane"
[jobs]
signal = "USR1"
notice_s = 90
"""
    scripts = batch_scripts(parse_site(text))
    assert scripts.keys() == {"offline.sbatch", "own.sbatch", "online.sbatch"}
    for name in ("offline.sbatch", "own.sbatch"):
        lines = scripts[name].splitlines()
        for line in ("--partition=scavenge", "--gres=openlane:1,lane:1", "--signal=B:USR1@90"):
            assert f"#SBATCH {line}" in lines
    assert "#SBATCH --partition=serve" in scripts["online.sbatch"]


def test_golden_files() -> None:
    rendered = render(load_site(GOLDEN / "mixed.toml"))
    golden = {path.name: path.read_text() for path in (GOLDEN / "mixed").iterdir()}
    assert rendered.keys() == golden.keys() | HOOKS
    for name, text in golden.items():
        assert rendered[name] == text, name
    for name in HOOKS:
        assert rendered[name] == (ROOT / "slurm" / name).read_text()


def test_the_shipped_fragments_are_those_of_the_example() -> None:
    rendered = render(load_site(ROOT / "slurm" / "site.example.toml"))
    shipped = {path.name: path.read_text() for path in (ROOT / "slurm" / "conf").iterdir()}
    assert shipped == {name: text for name, text in rendered.items() if name.endswith(".conf")}
    assert rendered["job_submit.lua"] == (ROOT / "slurm" / "job_submit.lua").read_text()


def test_every_line_is_one_that_slurm_can_read() -> None:
    for name, text in render(load_site(GOLDEN / "mixed.toml")).items():
        if name.startswith("hybridsched-") and name != "hybridsched-node.conf":
            assert all("=" in line for line in text.splitlines() if line and not line.startswith("#"))
            assert list(entries(text))


def test_records_that_slurm_conf_has_are_left_out() -> None:
    site = load_site(GOLDEN / "mixed.toml")
    text = render(site, present={"mig[01-04]", "bulk"})["hybridsched-partitions.conf"]
    names = [(entry.key, entry.value) for entry in entries(text)]
    assert names == [("NodeName", "nowhere"), ("PartitionName", "inference")]


@pytest.mark.parametrize(
    ("version", "key"), [("22.05", "SlurmctldParameters"), ("23.02", "PreemptParameters")]
)
def test_the_user_signal_stands_where_the_release_has_it(version: str, key: str) -> None:
    text = render(parse_site(SMALL + f'[slurm]\nversion = "{version}"\n'))["hybridsched-cluster.conf"]
    keys = {entry.key for entry in entries(text)}
    assert keys & {"SlurmctldParameters", "PreemptParameters"} == {key}


def test_every_mistake_is_said_with_its_key() -> None:
    with pytest.raises(SiteError) as caught:
        parse_site(
            """
            [partitions]
            online = "two words"
            grace_s = -1
            colour = "red"
            [[nodes]]
            names = "n1"
            gpus = "four"
            [fil]
            gres = "x"
            """,
            source="site.toml",
        )
    said = str(caught.value)
    keys = {key for key, _ in caught.value.problems}
    assert keys == {
        "partitions.online",
        "partitions.grace_s",
        "partitions.colour",
        "nodes[0].gpu_type",
        "nodes[0].gpus",
        "fil",
    }
    assert "site file site.toml has 6 mistakes" in said
    assert "did you mean 'fill'?" in said
    assert "allowed here:" in said


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[partitions]\nonline_tier = 1\n", "partitions.online_tier"),
        ('[partitions]\nonline = "a"\noffline = "a"\n', "partitions.offline"),
        ("[jobs]\nmin_notice_s = 61\n", "jobs.min_notice_s"),
        (SMALL + SMALL, "nodes[1].names"),
        (SMALL.replace("n[1-2]", "hspark"), "nodes[0].names"),
        ("[slurm\n", ""),
        ('[node]\nlog = "/var/log/x y"\n', "node.log"),
        ('[slurm]\netc = "/etc/slurm\\nPlugin=/x"\n', "slurm.etc"),
        (SMALL + 'options = "CPUs=4\\nPreemptMode=OFF"\n', "nodes[0].options"),
    ],
)
def test_contradictions_and_what_would_break_slurm_conf(text: str, key: str) -> None:
    with pytest.raises(SiteError) as caught:
        parse_site(text)
    assert [found for found, _ in caught.value.problems] == [key]


def test_a_site_without_nodes_cannot_be_rendered() -> None:
    with pytest.raises(ValueError, match=r"add a \[\[nodes\]\] table"):
        render(Site())


def test_render_command(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(SMALL)
    answer = CliRunner().invoke(slurm, ["render", str(site), "--out", str(tmp_path / "out"), "--json"])
    assert answer.exit_code == 0
    files = json.loads(answer.output)["files"]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in written) == files
    assert (tmp_path / "out" / "prolog.sh").stat().st_mode & 0o111
    assert CliRunner().invoke(slurm, ["render", str(tmp_path / "none.toml")]).exit_code == 2
    site.write_text("")
    answer = CliRunner().invoke(slurm, ["render", str(site), "--out", str(tmp_path / "out2")])
    assert answer.exit_code == 2
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("gpu:a100:4(S:0-1),hsfill:8", {"gpu": 4, "hsfill": 8}),
        ("gpu:(null):4(IDX:0-3)", {"gpu": 4}),
        ("gpu:a100:2,gpu:1g.10gb:7", {"gpu": 9}),
        ("(null)", {}),
        ("mps:1K", {"mps": 1024}),
        ("hsfill", {"hsfill": 1}),
    ],
)
def test_gres_counts(text: str, counts: dict[str, int]) -> None:
    assert gres_counts(text) == counts


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "slurm-site.md").read_text()
    for name, field in Site.model_fields.items():
        table = type(field.default) if name != "nodes" else Nodes
        for key, sub in table.model_fields.items():
            assert f"| `{name}.{key}` |" in text
            assert sub.description, f"{name}.{key} has no description"
            assert sub.description in text
