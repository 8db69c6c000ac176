"""The section [modes] of a policy: what it takes, what it refuses, and that it comes back as it went in."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hybridsched.core.mig import LayoutEntry
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.policy import Autonomy
from hybridsched.policyfile import PolicyError, dump_toml, parse_policy
from hybridsched.policyfile.files import check_policy
from hybridsched.policyfile.modes_schema import mode_keys

DOCS = Path(__file__).parent.parent.parent / "docs" / "modes.md"
WHOLE = """
name = "p"
kind = "idle-window"

[slurm]
enabled = true

[modes]
enabled = true
time_zone = "Europe/Berlin"
default = "day"
autonomy = "auto"

[modes.mig-configs]
slices = [{devices = "all", mig-enabled = true, mig-devices = {"1g.10gb" = 7}}]
mixed = [
  {devices = [0, 1], mig-enabled = true, mig-devices = {"3g.40gb" = 2}},
  {devices = [2, 3], mig-enabled = false},
]
whole = [{devices = "all", mig-enabled = false}]

[[modes.hosts]]
names = "gpu[01-04]"
gpu = "a100-80gb"
gpus = 4

[[modes.mode]]
name = "day"
layout = "slices"
early = true

[[modes.mode.windows]]
days = ["weekday"]
start = "07:00"
end = "22:00"

[[modes.mode.engines]]
model = "small"
per_host = 28
gres = "gpu:1g.10gb:1"
floor = 40
memory_gib = 9.0
time_limit_s = 604800

[[modes.mode]]
name = "night"
layout = "whole"
node = "{host}-night"

[[modes.mode.windows]]
start = "22:00"
end = "07:00"

[[modes.mode.engines]]
model = "big"
gres = "gpu:a100:4"
arguments = ["--tensor-parallel-size", "4"]
"""


def mistakes(text: str) -> list[tuple[str, int | None, str]]:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, source="f.toml")
    return [(p.key, p.line, p.message) for p in caught.value.problems]


def modes_of(text: str) -> ModesPolicy:
    modes = parse_policy(text).policy.modes
    assert modes is not None
    return modes


def test_the_section_as_values() -> None:
    modes = modes_of(WHOLE)
    assert modes.autonomy is Autonomy.AUTO
    assert list(modes.all_hosts()) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert modes.mig_configs["mixed"] == (
        LayoutEntry(devices=(0, 1), mig_enabled=True, mig_devices={"3g.40gb": 2}),
        LayoutEntry(devices=(2, 3), mig_enabled=False),
    )
    assert [mode.name for mode in modes.mode] == ["day", "night"]
    assert modes.mode[0].floors() == {"small": 40}
    assert modes.mode[1].group(modes.mode[1].engines[0]) == "night.big"


def test_the_section_survives_the_round_trip() -> None:
    policy = parse_policy(WHOLE).policy
    assert parse_policy(dump_toml(policy)).policy == policy
    assert check_policy(policy) == ()


def test_a_policy_without_the_section_has_no_modes() -> None:
    assert parse_policy('name = "p"\nkind = "idle-window"\n').policy.modes is None


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("Europe/Berlin", "Europe/Berln", "modes.time_zone", "'Europe/Berln', which is no time zone"),
        ('default = "day"', 'default = "dya"', "modes.default", "no mode; there are day, night"),
        ('name = "night"', 'name = "day"', "modes.mode[1].name", r"as modes.mode\[0\] is called"),
        ('name = "night"', 'name = "calendar"', "modes.mode[1].name", "by which orders are withdrawn"),
        ("gpu[01-04]", "gpu[04-01]", "modes.hosts[0].names", "no range of numbers"),
        ('"whole"\nnode', '"hole"\nnode', "modes.mode[1].layout", "there are slices, mixed, whole"),
        ('gpu = "a100-80gb"', "", "modes.mode[0].layout", "model is not given"),
        ("gpus = 4", "gpus = 1", "modes.mode[1].engines[0].per_host", "for 4 whole GPUs; a host.* has 1"),
        ('"{host}-night"', '"{host}"', "modes.mode[1].node", "a node record of its own"),
        ('start = "07:00"', 'start = "7h"', "modes.mode[0].windows[0].start", "was given '7h'"),
        ('"weekday"', '"weekdays"', "modes.mode[0].windows[0].days", "'weekday'"),
        ("gpu:1g.10gb:1", "gpu:2g.20gb:1", "modes.mode[0].engines[0].gres", "it has 1g.10gb: 28"),
        ("gpu:1g.10gb:1", "gpu:1g.10gb:2", "modes.mode[0].engines[0].gres", "no tensor parallelism"),
        (
            "per_host = 28",
            "per_host = 29",
            "modes.mode[0].engines[0].per_host",
            "29 of 1g.10gb; a host has 28",
        ),
        ("floor = 40", "floor = 113", "modes.mode[0].engines", "4 hosts have 112"),
        ("enabled = true\n\n[modes]", "\n[modes]", "modes.enabled", "slurm.enabled must be true"),
        ("604800", "300", "modes.mode[0].engines[0].time_limit_s", "must be at least"),
        ("early = true", "erly = true", "modes.mode[0].erly", "did you mean 'early'"),
        ('model = "big"', "", "modes.mode[1].engines[0].model", "is missing; give the model"),
        ("[modes]", '[modes]\nway = "x"', "modes.way", "'records' or 'reconfigure'"),
    ],
)
def test_a_mistake_names_its_place_and_what_fits(old: str, new: str, key: str, says: str) -> None:
    assert old in WHOLE
    text = WHOLE.replace(old, new)
    found = mistakes(text)
    assert key in [k for k, _, _ in found], found
    line, message = next((at, text) for k, at, text in found if k == key)
    assert re.search(says, message), message
    assert line is not None


def test_tensor_parallelism_across_slices_is_refused_in_the_arguments_too() -> None:
    text = WHOLE.replace("memory_gib = 9.0", 'arguments = ["-tp=2"]')
    ((key, _, message),) = mistakes(text)
    assert key == "modes.mode[0].engines[0].arguments"
    assert "over 2 GPUs" in message


@pytest.mark.parametrize("words", ['"--tensor-parallel-size=2", "-pp", "4"', '"-tp", "8"'])
def test_an_engine_over_more_gpus_than_its_gres_gives_is_refused(words: str) -> None:
    ((key, _, message),) = mistakes(WHOLE.replace('"--tensor-parallel-size", "4"', words))
    assert key == "modes.mode[1].engines[0].arguments"
    assert "over 8 GPUs, and gres 'gpu:a100:4' gives each 4" in message


def test_a_profile_with_a_plus_is_asked_for_by_the_type_that_slurm_has() -> None:
    """`mode gres` writes 1g.10gb.me for 1g.10gb+me."""
    text = WHOLE.replace('{"1g.10gb" = 7}', '{"1g.10gb+me" = 1, "1g.10gb" = 6}')
    text = text.replace("per_host = 28", "per_host = 4").replace("floor = 40", "")
    assert modes_of(text.replace("gpu:1g.10gb:1", "gpu:1g.10gb.me:1")).mode[0].engines[0].per_host == 4
    (mistake,) = mistakes(text.replace("gpu:1g.10gb:1", "gpu:1g.10gb+me:1"))
    assert "it has 1g.10gb: 24, 1g.10gb.me: 4" in mistake[2]
    large = text.replace("gpu:1g.10gb:1", "gpu:1g.10gb.me:1").replace("memory_gib = 9.0", "memory_gib = 90.0")
    assert "a slice 1g.10gb.me has 9.50 GiB" in mistakes(large)[0][2]


def test_a_list_whose_only_item_is_wrong_is_said_once_and_an_empty_one_plainly() -> None:
    ((_, _, message),) = mistakes(WHOLE.replace('"weekday"', '"weekdays"'))
    assert "'weekday'" in message
    ((_, _, message),) = mistakes(WHOLE.replace('["weekday"]', "[]"))
    assert message == "was given []; it must have at least 1 item"


def test_a_floor_that_no_host_could_leave_is_refused() -> None:
    night = 'model = "small"\nfloor = 4\ngres = "gpu:a100:1"'
    text = WHOLE.replace(
        'model = "big"\ngres = "gpu:a100:4"\narguments = ["--tensor-parallel-size", "4"]', night
    )
    ((key, _, message),) = mistakes(text)
    assert key == "modes.mode[1].engines"
    assert "no host could ever change" in message
    modes_of(text.replace("floor = 4\n", "floor = 3\n"))


def test_the_reconfigure_way_wants_one_record() -> None:
    text = WHOLE.replace("[modes]", '[modes]\nway = "reconfigure"')
    assert [key for key, _, _ in mistakes(text)] == ["modes.mode[1].node"]
    modes_of(text.replace('node = "{host}-night"\n', ""))


def test_modes_that_were_written_to_redis_by_other_means_are_checked_as_well() -> None:
    policy = parse_policy(WHOLE).policy
    assert policy.modes is not None
    bad = msgspec.structs.replace(policy, modes=msgspec.structs.replace(policy.modes, default="dya"))
    assert [problem.key for problem in check_policy(bad)] == ["modes.default"]


def test_the_example_of_the_docs_is_a_policy() -> None:
    example = DOCS.read_text(encoding="utf-8").split("```")[1]
    modes = modes_of(example)
    assert [mode.name for mode in modes.mode] == ["day", "night"]


def test_every_key_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z_.-]+)` \|", text, flags=re.MULTILINE))
    assert set(mode_keys()) <= {f"modes.{row}" for row in rows}
