"""Policy files: presets, round trip, origins, and every mistake reported at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy, ReplicasPolicy, Rung
from hybridsched.core.reasons import Reason
from hybridsched.policyfile import (
    PRESETS,
    PolicyError,
    dump_toml,
    keys,
    load_policy,
    parse_policy,
    preset_path,
)
from hybridsched.policyfile.files import LONGEST_TEXT, check_policy
from hybridsched.policyfile.schema import limits, reasons, replica_keys

GOLDEN = Path(__file__).parent.parent / "golden"
DOCS = Path(__file__).parent.parent.parent / "docs" / "policy.md"
HEAD = 'name = "p"\nkind = "idle-window"\n'


def mistakes(text: str) -> list[tuple[str, int | None, str]]:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, source="f.toml")
    return [(p.key, p.line, p.message) for p in caught.value.problems]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_by_name_and_dump_as_the_golden_file(name: str) -> None:
    loaded = load_policy(name)
    assert (loaded.policy.name, loaded.policy.kind) == (name, PolicyKind(name))
    assert dump_toml(loaded.policy) == (GOLDEN / f"policy-{name}.toml").read_text(encoding="utf-8")


def test_the_default_preset_states_the_defaults() -> None:
    assert load_policy("idle-window").policy == PoolPolicy(name="idle-window", kind=PolicyKind.IDLE_WINDOW)


def test_a_file_and_the_values_of_the_core_have_the_same_keys_and_defaults() -> None:
    plain = parse_policy(HEAD).policy
    assert plain == PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW)
    tree = msgspec.to_builtins(plain)
    dotted = {
        f"{name}.{key}" if isinstance(value, dict) else name
        for name, value in tree.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert dotted - {"version"} == set(keys())


def test_a_policy_with_every_value_changed_survives_the_round_trip() -> None:
    text = """
    name = "night.2"
    kind = "unprotected"
    floor_gpus = 2
    autonomy = "suggest"
    idle = {window_ms = 1, max_gpu_activity = 0.5, foreign_tolerance = 3}
    pause.ladder = ["boundary"]
    [cycle]
    interval_ms = 100
    lease_ms = 400
    [engine]
    kv_tokens = 5000
    [slurm]
    enabled = true
    [[slurm.replicas]]
    model = "org/m"
    arguments = ["--model", "a \\"b\\""]
    [[slurm.replicas]]
    model = "org/m"
    name = "big"
    gres = "gpu:h100:2"
    count = 3
    """
    policy = parse_policy(text).policy
    assert (policy.autonomy, policy.pause.ladder) == (Autonomy.SUGGEST, (Rung.BOUNDARY,))
    assert (policy.idle.window_ms, policy.idle.max_gpu_activity) == (1.0, 0.5)
    assert isinstance(policy.cycle.interval_ms, float)
    assert [(r.group, r.count, r.arguments) for r in policy.slurm.replicas] == [
        ("org/m", 1, ("--model", 'a "b"')),
        ("big", 3, ()),
    ]
    assert parse_policy(dump_toml(policy)).policy == policy


def test_origins_name_the_line_or_the_default() -> None:
    origins = parse_policy(HEAD + "\n[idle]\nwindow_ms = 5\n", source="f.toml").origins
    assert set(origins) == set(keys())
    assert (origins["name"], origins["idle.window_ms"]) == ("f.toml:1", "f.toml:5")
    assert origins["cycle.lease_ms"] == "default"


def test_all_mistakes_are_reported_each_with_its_line() -> None:
    text = """name = "has space"
kind = "idle"
version = 3
autonom = "auto"
[cycle]
interval_ms = 300
lease_ms = 500
[idle]
window_ms = -1
[offline]
slots_for_online = -1
max_inflght = 3
kv_share = nan
max_inflight = "64"
[engin]
"""
    assert [(key, line) for key, line, _ in mistakes(text)] == [
        ("name", 1),
        ("kind", 2),
        ("version", 3),
        ("autonom", 4),
        ("cycle.lease_ms", 7),
        ("idle.window_ms", 9),
        ("offline.slots_for_online", 11),
        ("offline.max_inflght", 12),
        ("offline.kv_share", 13),
        ("offline.max_inflight", 14),
        ("engin", 15),
    ]


def test_mistakes_in_a_list_of_tables_name_the_table_and_its_line() -> None:
    text = (
        HEAD
        + """[slurm]
notice_s = 30
[[slurm.replicas]]
model = "a"
cuont = 2
[[slurm.replicas]]
count = -1
[[slurm.replicas]]
model = "a"
[[slurm.replicas]]
model = "b"
time_limit_s = 300
"""
    )
    found = mistakes(text)
    assert [(key, line) for key, line, _ in found] == [
        ("slurm.replicas[0].cuont", 7),
        ("slurm.replicas[1].model", 8),
        ("slurm.replicas[1].count", 9),
    ]
    assert "did you mean 'count'" in found[0][2]
    assert found[1][2] == "is missing; give the model that they serve, as requests name it (no blanks)"
    whole = text.replace("cuont", "count").replace("count = -1", 'model = "c"')
    assert [(key, line) for key, line, _ in mistakes(whole)] == [
        ("slurm.replicas[2].name", 10),
        ("slurm.replicas[3].time_limit_s", 14),
    ]


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("[cycle]\nlease_ms = 499\n", "cycle.lease_ms", r"given 499; .*twice cycle.interval_ms \(250\)"),
        (
            "[idle]\nwindow_ms = -1\n",
            "idle.window_ms",
            r"given -1; it must be from 1 to .*: below 1 ms",
        ),
        ("[idle]\nwindow_ms = inf\n", "idle.window_ms", "given inf; it should be a finite number"),
        ("[pause]\nladder = ['iteration']\n", "pause.ladder", "begins with boundary"),
        ("[pause]\nladder = ['iteration', 'boundary']\n", "pause.ladder", "in this order"),
        ("[pause]\nladder = ['boundary', 'boundary']\n", "pause.ladder", "each once"),
        ("[pause]\nladder = []\n", "pause.ladder", r"given \[\]"),
        ("[pause]\nladder = ['boundary', 'sleep']\n", "pause.ladder", "in this order"),
        ("[pause]\nladder = ['boundary', 'nap']\n", "pause.ladder", "'nap'; .*'iteration' or 'sleep'"),
        ("[pause]\nladder = 'boundary'\n", "pause.ladder", "should be a list"),
        ("[pause]\nladder = ['boundary']\ngrace_ms = 5\n", "pause.grace_ms", "add iteration"),
        ("[offline]\nslots_for_online = -1\n", "offline.slots_for_online", "given -1"),
        ("[offline]\nslots_for_online = 256\n", "offline.slots_for_online", "below engine.max_num_seqs"),
        ("[offline]\nchunk_min_lines = 300\n", "offline.chunk_min_lines", "must not exceed"),
        ("[offline]\nkv_share = 1.1\n", "offline.kv_share", "less than or equal to 1"),
        ("[offline]\nmax_inflight = true\n", "offline.max_inflight", "given True; .*valid integer"),
        ("[online]\nmax_inflight = 257\n", "online.max_inflight", "must not exceed engine.max_num_seqs"),
        ("[idle]\nwindow = 3\n", "idle.window", "did you mean 'window_ms'"),
        ("[idel]\n", "idel", "did you mean 'idle'"),
        ("idle = 5\n", "idle", r"must be a table, written \[idle\]"),
        ("autonomy = 'yolo'\n", "autonomy", "'suggest', 'approve' or 'auto'"),
        ("floor_gpus = 1.5\n", "floor_gpus", "valid integer"),
        ("floor_gpus = 2026-01-01\n", "floor_gpus", "valid integer"),
    ],
)
def test_a_wrong_value_says_what_was_given_and_what_is_allowed(text: str, key: str, says: str) -> None:
    found = mistakes(HEAD + text)
    assert [k for k, _, _ in found] == [key]
    assert re.search(says, found[0][2], re.DOTALL)
    assert found[0][1] is not None


def test_a_comparison_with_a_value_that_is_wrong_itself_is_not_reported_twice() -> None:
    found = mistakes(HEAD + "[cycle]\nlease_ms = -5\n")
    assert [key for key, _, _ in found] == ["cycle.lease_ms"]


def test_what_is_missing_is_named() -> None:
    assert [key for key, _, _ in mistakes("")] == ["name", "kind"]


def test_text_that_is_no_toml_names_its_line() -> None:
    ((key, line, message),) = mistakes(HEAD + "floor_gpus = = 3\n")
    assert (key, line) == ("", 3)
    assert "not valid TOML" in message


def test_the_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + "floor_gpus = -1\n", encoding="utf-8")
    with pytest.raises(PolicyError, match=r"1 mistake:\n.*mine\.toml:3: floor_gpus: was given -1"):
        load_policy(path)


def test_files_that_cannot_be_read_are_errors_too(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.toml cannot be used: no such file, and no preset; the pr"):
        load_policy(tmp_path / "none.toml")
    with pytest.raises(PolicyError, match="cannot be used: cannot be read"):
        load_policy(tmp_path)
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(binary)
    with pytest.raises(PolicyError, match="no such preset"):
        preset_path("nope")


def test_at_speed_leaves_the_control_plane_alone() -> None:
    policy = load_policy("idle-window").policy
    fast = policy.at_speed(10)
    assert (fast.idle.window_ms, fast.idle.metric_lag_ms, fast.offline.chunk_target_ms) == (15, 10, 500)
    assert (fast.slo.ttft_ms, fast.slo.tpot_ms, fast.pack.adjust_ms) == (100, 5, 500)
    assert (fast.cycle, fast.idle.queue_wait_ms, fast.idle.max_metric_age_ms) == (policy.cycle, 50, 2000)


def test_consolidate_without_packing_is_refused() -> None:
    with pytest.raises(PolicyError, match=r'pack\.enabled: was given false, but kind is "consolidate"'):
        parse_policy('name = "p"\nkind = "consolidate"\n')
    (only,) = mistakes(HEAD + "[pack]\nenabled = true\nmax_inflight = 65\n")
    assert only[0] == "pack.max_inflight"
    assert "must not exceed online.max_inflight (64)" in only[2]


def test_the_least_slice_beside_online_is_one_that_offline_may_have() -> None:
    head, slices = 'name = "p"\nkind = "headroom"\n', "[offline]\nslice_tokens = 48\n"
    with pytest.raises(
        PolicyError, match=r"least_slice_tokens: .*must not exceed offline\.slice_tokens \(48\)"
    ):
        parse_policy(head + slices)
    for allowed in ("[offline]\nslice_tokens = 0\n", slices + "[headroom]\nleast_slice_tokens = 48\n"):
        assert parse_policy(head + allowed)
    assert parse_policy('name = "p"\nkind = "idle-window"\n' + slices)


def documented_rows(section: str) -> dict[str, str]:
    """The table rows below a heading of docs/policy.md, by the code word in their first cell."""
    text = DOCS.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([a-z_.]+)` \|(.*)\|$", text, flags=re.MULTILINE))


ABSURD = {
    "a lease of a day": "[cycle]\nlease_ms = 86_400_000\n",
    "a cycle of a microsecond": "[cycle]\ninterval_ms = 0.001\n",
    "a window of nothing": "[idle]\nwindow_ms = 0.0001\n",
    "a float where requests are counted": "[offline]\nmax_inflight = 1e23\n",
    "more requests than any engine": "[offline]\nmax_inflight = 100000000000000000000000\n",
    "a grace of a day": "[pause]\ngrace_ms = 86_400_000\n",
    "KV cache beyond any node": "[engine]\nkv_tokens = 99_999_999_999\n",
    "a number of thousands of digits": "x = " + "9" * 5000 + "\n",
    "the same in hexadecimal": "x = 0x" + "f" * 5000 + "\n",
    "lists within lists": "x = " + "[" * 5000 + "]" * 5000 + "\n",
    "tables within tables": "x = " + "{y = " * 2000 + "1" + "}" * 2000 + "\n",
    "tables within tables, dotted": "[idle]\n" + "window_ms" + ".a" * 3000 + " = 1\n",
    "a table in the place of a number": "[idle.window_ms]\na = 1\n",
    "a list in the place of a table": "cycle = [1]\n",
    "a long text in the place of a number": '[cycle]\nlease_ms = "' + "x" * 500 + '"\n',
    "a file of a megabyte": "#" * LONGEST_TEXT + "\n",
}


def test_what_is_absurd_is_refused_in_one_sentence_each() -> None:
    said = []
    for what, text in ABSURD.items():
        (only,) = mistakes(HEAD + text)
        key, line, message = only
        said.append(f"{what}\n    line {line}: {key}: {message}\n")
    assert "".join(said) == (GOLDEN / "policy-mistakes.txt").read_text(encoding="utf-8")


def test_a_policy_that_came_from_no_file_keeps_to_the_same_limits() -> None:
    good = load_policy("idle-window").policy
    assert check_policy(good) == ()
    replace = msgspec.structs.replace
    (day,) = check_policy(replace(good, cycle=replace(good.cycle, lease_ms=86_400_000.0)))
    assert (day.key, "from 20 to 60,000" in day.message) == ("cycle.lease_ms", True)
    (late,) = check_policy(replace(good, cycle=replace(good.cycle, interval_ms=900.0)))
    assert "at least twice" in late.message


def test_every_limit_is_documented_with_its_reason() -> None:
    rows = documented_rows("Limits")
    assert set(rows) == set(limits()) == set(reasons())
    for key, (least, most) in limits().items():
        cells = [cell.strip() for cell in rows[key].split("|")]
        assert cells == [f"{least:,.12g}", f"{most:,.12g}", reasons()[key].capitalize() + "."], key


def test_every_key_is_documented_with_its_default() -> None:
    rows = documented_rows("Keys")
    assert set(rows) == set(keys())
    tree = msgspec.to_builtins(PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW))
    for key in set(keys()) - {"name", "kind"}:
        value = tree
        for part in key.split("."):
            value = value[part]
        shown = "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        if isinstance(value, bool) or (key.startswith("slurm.") and not isinstance(value, float)):
            shown = json.dumps(value)
        if isinstance(value, tuple | list):
            shown = json.dumps(list(value))
        cells = [cell.strip() for cell in rows[key].split("|")]
        assert cells[1] == shown, key


def test_every_key_of_a_replica_table_is_documented_with_its_default() -> None:
    rows = documented_rows("Online replicas on Slurm")
    assert {f"slurm.replicas.{key}" for key in rows} == set(replica_keys())
    for key, value in msgspec.to_builtins(ReplicasPolicy(model="m")).items():
        if key not in ("model", "name"):
            shown = f"{value:g}" if isinstance(value, float) else json.dumps(value)
            assert [cell.strip() for cell in rows[key].split("|")][1] == shown, key


def test_every_reason_is_documented_and_no_other() -> None:
    assert set(documented_rows("Reasons")) == {reason.value for reason in Reason}
