"""The search for thresholds: knobs, what is best of what was tried, the files, and that it says the same
twice."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.policyfile import PRESETS, check_policy, load_policy
from hybridsched.report.record import Ceiling, PassRecord
from hybridsched.simulate.knobs import DEFAULT_KNOBS, Knob, KnobError, parse_knob, turned, value_of
from hybridsched.simulate.options import SimulateOptions, make_plan
from hybridsched.simulate.run import alone_record, baseline_key
from hybridsched.simulate.tune import Bounds, Trial, Tuned, TuneError, tuned_policy
from hybridsched.twin.trace import Waves
from tests.conftest import missing

BASE = PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW)
SHORT = ("--duration", "12", "--gpus", "1", "--lines", "100", "--trials", "5", "--waves", "6,1,4")


@pytest.fixture
def search() -> None:
    if importlib.util.find_spec("cmaes") is None:
        missing("the package cmaes (the extra tune)")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["policy", "tune", *arguments])


def test_a_knob_goes_from_its_least_to_its_greatest_value() -> None:
    span = Knob(key="idle.window_ms", low=5, high=500, log=True)
    assert [span.at(place) for place in (-1.0, 0.0, 0.5, 1.0, 7.0)] == [5, 5, 50, 500, 500]
    count = Knob(key="offline.max_inflight", low=8, high=192, log=True, step=1)
    assert [count.at(place) for place in (0.0, 0.5, 1.0)] == [8, 39, 192]
    assert type(count.at(0.4)) is int
    blocks = Knob(key="offline.slice_tokens", low=64, high=2048, step=16)
    assert int(blocks.at(0.37)) % 16 == 0
    for knob in (span, count):
        for value in (knob.low, 33.0, knob.high):
            assert knob.at(knob.place_of(value)) == pytest.approx(value, rel=0.02)
    assert span.place_of(1e9) == 1.0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_place_of_the_default_knobs_is_a_policy_that_is_allowed(preset: str) -> None:
    policy = load_policy(preset).policy
    knobs = DEFAULT_KNOBS.get(policy.kind, ())
    for place in (0.0, 0.5, 1.0):
        found = turned(policy, knobs, [place] * len(knobs))
        assert check_policy(found) == ()
        for knob in knobs:
            assert value_of(found, knob.key) == knob.at(place)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("idle.windw_ms=1:2", "is no key with a number"),
        ("autonomy=1:2", "is no key with a number"),
        ("idle.window_ms", "no two numbers"),
        ("idle.window_ms=9:x", "no two numbers"),
        ("idle.window_ms=9:3", "from 9 to 3"),
        ("idle.window_ms=0:3:log", "begins above 0"),
        ("idle.window_ms=1:3:exp", "'exp' is not understood"),
        ("idle.window_ms=1:inf", "from 1 to inf"),
    ],
)
def test_a_knob_that_is_none_says_what_is_allowed(given: str, said: str) -> None:
    with pytest.raises(KnobError, match=said):
        parse_knob(given)


def test_a_knob_as_it_is_given() -> None:
    assert parse_knob("idle.window_ms=20:500:log") == Knob(key="idle.window_ms", low=20, high=500, log=True)
    assert parse_knob("offline.max_inflight=1:9").step == 1
    assert parse_knob("floor_gpus=0:2").at(1.0) == 2


def trial(number: int, share: float, ttft: float, tpot: float = 1.0, excess: float = 0.0) -> Trial:
    return Trial(
        number=number,
        values={},
        policy=BASE,
        ceiling_share=share,
        harvested_ratio=0.9,
        ttft_p99_ratio=ttft,
        tpot_p99_ratio=tpot,
        slo_attainment=1.0,
        slo_attainment_alone=1.0,
        offline_tokens_done=1,
        excess=excess,
    )


def test_the_front_is_what_nothing_beats_in_both() -> None:
    trials = (trial(0, 0.5, 1.02), trial(1, 0.4, 1.03), trial(2, 0.9, 1.0, 2.0), trial(3, 0.5, 1.01))
    tuned = Tuned(
        trials=trials,
        best=trials[3],
        checks=(),
        ceiling=Ceiling(alone_tokens_per_s=1.0, policy_tokens_per_s=1.0, online_needs_s=0.0),
        knobs=(),
        bounds=Bounds(),
    )
    assert [one.number for one in tuned.front] == [3, 2]


@pytest.mark.usefixtures("search")
def test_the_best_that_keeps_the_bounds_becomes_a_policy_file(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    lax = ("--max-ttft", "9", "--max-tpot", "9", "--attainment", "0", "--slo", "900,40")
    done = invoke(*SHORT, *lax, "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["trials"]) == 5
    assert all(one["keeps_bounds"] for one in found["trials"])
    shares = [one["ceiling_share"] for one in found["trials"]]
    assert shares[found["chosen"]] == max(shares)
    (check,) = found["checks"]
    assert check["number"] == found["chosen"]
    assert check["ceiling_share"] != max(shares), "it is of other draws"
    loaded = load_policy(out).policy
    assert loaded.name == "idle-window-tuned"
    assert (loaded.slo.ttft_ms, loaded.slo.tpot_ms) == (900.0, 40.0)
    for key, value in found["trials"][found["chosen"]]["values"].items():
        assert value_of(loaded, key) == value
    page = out.with_suffix(".html").read_text()
    assert "hybridsched policy tune" in page
    again = tmp_path / "again.toml"
    assert invoke(*SHORT, *lax, "--out", str(again)).exit_code == 0
    assert again.read_text() == out.read_text()
    other = tmp_path / "other.toml"
    assert invoke(*SHORT, *lax, "--seed", "1", "--out", str(other)).exit_code == 0
    assert other.read_text() != out.read_text()


def test_luck_in_the_search_is_no_policy() -> None:
    """The best two kept the bounds in the search and not when they were run again."""
    tuned = Tuned(
        trials=(trial(0, 0.5, 1.02), trial(1, 0.4, 1.03)),
        best=None,
        checks=(trial(0, 0.5, 1.2, excess=0.14), trial(1, 0.4, 1.1, excess=0.05)),
        ceiling=Ceiling(alone_tokens_per_s=1.0, policy_tokens_per_s=1.0, online_needs_s=0.0),
        knobs=(),
        bounds=Bounds(),
    )
    with pytest.raises(TuneError, match=r"the best 2 did in the search, and not in 3 other draws.*×1\.100"):
        tuned_policy(tuned, "x")


@pytest.mark.usefixtures("search")
def test_when_nothing_keeps_the_bounds_there_is_a_picture_and_no_policy(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    done = invoke(*SHORT, "--max-ttft", "0.01", "--out", str(out), "--trials", "3")
    assert done.exit_code == 1
    assert "none of 3 policies keeps the bounds" in done.output
    assert not out.exists()
    assert out.with_suffix(".html").exists()


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    done = invoke(*SHORT, "--out", str(tmp_path / "x.toml"))
    assert done.exit_code == 1
    assert "hybridsched[tune]" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slo", "1000"), "give two numbers of ms"),
        (("--slo", "0,50"), "give two numbers of ms"),
        (("--knob", "idle.window_ms=9:3"), "from 9 to 3"),
        (("--policy", "online-only"), "name keys with --knob"),
        (("--policy", "static-split"), "is a baseline of the twin"),
        (("--slo", "1e12,50"), "slo.ttft_ms was given 1000000000000.0"),
        (("--knob", "idle.window_ms=3:9", "--knob", "idle.window_ms=9:20"), "two knobs turn idle.window_ms"),
        (("--trace", "/nowhere.csv"), "does not exist"),
    ],
)
def test_wrong_usage_says_what_is_allowed(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    asked = SHORT if "--trace" not in arguments else SHORT[:-2]
    done = invoke(*asked, *arguments, "--out", str(tmp_path / "x.toml"))
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("name", ["mine.html", "gone/mine.toml"])
def test_a_place_that_cannot_hold_both_files_is_said_before_the_search(tmp_path: Path, name: str) -> None:
    done = invoke(*SHORT, "--out", str(tmp_path / name))
    assert done.exit_code == 2, done.output
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    out.write_text("name = 'precious'")
    done = invoke(*SHORT, "--out", str(out))
    assert done.exit_code == 2
    assert "--force" in done.output
    assert out.read_text() == "name = 'precious'"


@pytest.mark.usefixtures("search")
def test_policies_that_are_not_allowed_are_not_tried(tmp_path: Path) -> None:
    """Most of this range leaves offline no slot of the engine, which the file would be refused for."""
    knob = "offline.slots_for_online=200:2000"
    assert check_policy(turned(BASE, [parse_knob(knob)], [1.0])) != ()
    done = invoke(*SHORT, "--knob", knob, "--max-ttft", "9", "--out", str(tmp_path / "x.toml"), "--json")
    tried = json.loads(done.stdout)["trials"]
    assert all(one["values"]["offline.slots_for_online"] < 256 for one in tried)


@pytest.mark.parametrize("preset", ["idle-window", "consolidate", "headroom"])
def test_runs_of_online_alone_that_are_shared_are_the_same(preset: str) -> None:
    """What the search does not run again must not depend on what it turns."""
    options = SimulateOptions(
        waves=Waves(high_rps=9.0, low_rps=1.0, wave_s=5.0), duration_s=15.0, gpus=2, lines=1
    )
    plan = make_plan(msgspec.structs.replace(options, policies=(preset,)))
    policy = plan.policies[0]
    knobs = DEFAULT_KNOBS[policy.kind]
    found: dict[PoolPolicy, PassRecord] = {}
    shared = 0
    for place in (0.1, 0.4, 0.9):
        for knob in knobs:
            one = turned(policy, [knob], [place])
            record = alone_record(plan, one)
            known = found.setdefault(baseline_key(one), record)
            shared += known is not record
            assert known == record
    assert shared >= 3


@pytest.mark.usefixtures("search")
def test_ranges_without_an_allowed_policy_are_said(tmp_path: Path) -> None:
    done = invoke(*SHORT, "--knob", "idle.window_ms=1e8:1e9", "--out", str(tmp_path / "x.toml"))
    assert done.exit_code == 1
    assert "no other policy in these ranges is allowed (idle.window_ms: " in done.output
    assert list(tmp_path.iterdir()) == []
