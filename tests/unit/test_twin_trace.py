"""The twin's load: slices, scaling in two ways, and the lengths of offline work."""

from __future__ import annotations

import gzip
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from hybridsched.traces import TraceError, TraceRow
from hybridsched.twin.lengths import Length, read_lengths, repeated
from hybridsched.twin.trace import Scaling, Waves, load_trace, make_waves, scale

ROWS = [
    TraceRow(arrival_s=at / 10, prompt_tokens=1 + at % 97, output_tokens=1 + at % 31) for at in range(20_000)
]


def write(path: Path, rows: list[TraceRow]) -> Path:
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
        f"{row.arrival_s},{row.prompt_tokens},{row.output_tokens}\n" for row in rows
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_slice_of_a_packed_file_at_its_own_load(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv.gz", ROWS[:100])
    rows = load_trace(path, start_s=2.0, duration_s=1.0)
    assert [row.prompt_tokens for row in rows] == [row.prompt_tokens for row in ROWS[20:30]]
    assert rows[0].arrival_s == 0.0
    assert load_trace(path) == ROWS[:100]


def test_compressed_time_keeps_every_request_and_shortens_every_gap() -> None:
    rows = scale(ROWS, 4.0, scaling=Scaling.COMPRESS)
    assert len(rows) == len(ROWS)
    assert rows[-1].arrival_s == pytest.approx(ROWS[-1].arrival_s / 4)
    assert [row.output_tokens for row in rows] == [row.output_tokens for row in ROWS]


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.7, 2.0, 6.25])
def test_resampling_keeps_the_span_the_lengths_and_the_rate_over_time(factor: float) -> None:
    rows = scale(ROWS, factor)
    assert len(rows) == pytest.approx(len(ROWS) * factor, rel=0.03)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert rows[-1].arrival_s == pytest.approx(ROWS[-1].arrival_s, abs=60)
    assert {(row.prompt_tokens, row.output_tokens) for row in rows} <= {
        (row.prompt_tokens, row.output_tokens) for row in ROWS
    }
    counts = [sum(1 for row in rows if start <= row.arrival_s < start + 200) for start in range(0, 2000, 200)]
    assert min(counts) > 0.85 * statistics.fmean(counts)


def test_copies_do_not_all_come_at_once_and_none_comes_before_the_start() -> None:
    rows = scale([TraceRow(arrival_s=0.0, prompt_tokens=5, output_tokens=2)], 50.0)
    assert len(rows) == 50
    assert all(0.0 <= row.arrival_s <= 1.0 for row in rows)
    assert sum(1 for a, b in pairwise(rows) if a.arrival_s == b.arrival_s) == 0


def test_the_seed_decides() -> None:
    assert scale(ROWS, 1.5, seed=3) == scale(ROWS, 1.5, seed=3)
    assert scale(ROWS, 1.5, seed=3) != scale(ROWS, 1.5, seed=4)


def test_a_load_that_cannot_be_is_said(tmp_path: Path) -> None:
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            scale(ROWS, factor)
    with pytest.raises(ValueError, match="jitter"):
        scale(ROWS, 2.0, jitter_s=-1.0)
    with pytest.raises(TraceError, match="leaves no request"):
        load_trace(write(tmp_path / "t.csv", ROWS[:1]), factor=1e-9)


def line(number: int, **body: object) -> str:
    return json.dumps(
        {
            "custom_id": f"l{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", **body},
        }
    )


def test_lengths_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(
        "\n".join(
            [
                line(1, prompt=[7] * 33, max_tokens=5),
                "{broken",
                line(2, prompt="word " * 40, max_tokens=9, n=2),
            ]
        )
    )
    notes: list[str] = []
    lengths = read_lengths(path, notes.append)
    assert [note.partition(" of batch")[0] for note in notes] == ["1 of 3 lines"]
    assert "line 2: not valid JSON" in notes[0]
    assert lengths[0] == Length(prompt_tokens=33, output_tokens=5)
    assert len(lengths) == 2
    assert lengths[1].output_tokens == 18
    assert 40 <= lengths[1].prompt_tokens <= 60


def test_lengths_of_a_csv_and_in_turn(tmp_path: Path) -> None:
    lengths = read_lengths(write(tmp_path / "l.csv", ROWS[:3]))
    assert [length.prompt_tokens for length in repeated(lengths, 5)] == [1, 2, 3, 1, 2]


def test_a_batch_without_work_is_said(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text("{broken\n")
    with pytest.raises(TraceError, match="line 1, is wrong"):
        read_lengths(path)
    path.write_text("")
    with pytest.raises(TraceError, match="it is empty"):
        read_lengths(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_lengths(tmp_path / "none.jsonl")


def test_waves_rise_and_fall_at_their_rates() -> None:
    waves = Waves(high_rps=15.0, low_rps=1.0, wave_s=90.0)
    rows = make_waves(waves, 180.0 * 40)
    assert rows == make_waves(waves, 180.0 * 40)
    assert rows == sorted(rows, key=lambda row: row.arrival_s)
    assert {(row.prompt_tokens, row.output_tokens) for row in rows} == {(512, 128)}
    bursts = sum(1 for row in rows if row.arrival_s % 180.0 < 90.0)
    assert bursts == pytest.approx(15.0 * 90.0 * 40, rel=0.02)
    assert len(rows) - bursts == pytest.approx(1.0 * 90.0 * 40, rel=0.1)
    assert len(make_waves(waves, 180.0 * 40, factor=0.5)) == pytest.approx(len(rows) / 2, rel=0.02)
    assert make_waves(waves, 60.0, seed=1) != make_waves(waves, 60.0)


def test_valleys_may_be_empty_and_a_load_may_not() -> None:
    empty = Waves(high_rps=5.0, low_rps=0.0, wave_s=10.0)
    assert all(row.arrival_s % 20.0 < 10.0 for row in make_waves(empty, 200.0))
    for high, wave_s in ((1e9, 10.0), (1e308, 1e-300)):
        with pytest.raises(TraceError, match="at most 5,000,000 are simulated"):
            make_waves(Waves(high_rps=high, wave_s=wave_s), 10.0)
    with pytest.raises(TraceError, match="no request falls into"):
        make_waves(Waves(high_rps=1e-9, low_rps=0.0), 10.0)
