"""Summary and page of a made-up record: the summary against its golden file, the page by its parts."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from hybridsched.report import html
from hybridsched.report.figures import figures
from hybridsched.report.summary import summarise
from tests.unit.report_record import make_record

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "summary.json"


def test_the_summary_is_the_golden_one() -> None:
    made = json.loads(json.dumps(summarise(make_record())))
    assert made == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_fixed_fields_are_there_with_and_without_a_baseline() -> None:
    fixed = {
        "schema": None,
        "online": {"requests", "ok", "expired", "failed", "ttft_ms", "tpot_ms", "slo_attainment"},
        "offline": {
            *("lines", "completed", "failed", "remaining", "duplicates", "missing"),
            *("output_tokens", "tokens_recomputed"),
        },
        "harvest": {"engine_seconds", "online_busy_s", "idle_s", "harvested_s", "harvested_ratio"},
        "pauses": {"count", "signal_to_quiet_ms", "by_rung"},
        "policy": {"name", "version", "cycles", "cycle_ms"},
        "wall_s": None,
    }
    for baseline in (True, False):
        summary = summarise(make_record(baseline=baseline))
        for key, fields in fixed.items():
            assert key in summary
            assert fields is None or fields <= set(summary[key])
        assert (summary["online_only"] is not None) is baseline
        if baseline:
            assert fixed["online"] is not None
            assert set(fixed["online"]) <= set(summary["online_only"])


class Page(HTMLParser):
    """What a browser would load, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [
            f"{tag} {name}={value}" for name, value in attrs if name in {"src", "href", "data", "srcset"}
        ]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def test_the_page_loads_nothing_from_elsewhere_and_is_whole() -> None:
    record = make_record()
    text = html.render(summarise(record), record)
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert not {"link", "iframe", "img", "base"} & set(page.tags)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert page.tags.count("script") == 3, "the data, plotly once, and the page's own few lines"
    drawn = json.loads(page.scripts[0])
    assert [figure["key"] for figure in drawn] == [figure.key for figure in figures(record)]
    assert {figure["key"] for figure in drawn} <= set(page.ids)


def test_names_from_outside_cannot_break_out_of_the_page() -> None:
    import msgspec

    record = msgspec.structs.replace(make_record(), trace="</script><script>alert(1)</script>")
    text = html.render(summarise(record), record)
    assert "<script>alert" not in text


def test_a_run_in_which_nothing_happened_still_renders() -> None:
    import msgspec

    record = make_record(baseline=False)
    empty = msgspec.structs.replace(record.together, online=(), engines=(), events=())
    record = msgspec.structs.replace(record, together=empty)
    summary = summarise(record)
    assert summary["harvest"]["harvested_ratio"] is None
    assert summary["bars"]["ttft_p99_ratio"]["reached"] is None
    assert "not measured" in html.render(summary, record)
