"""A report survives its file, and its page and table show the file's figures."""

from __future__ import annotations

import html.parser
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvrouting_simulator.report import PoolMark, Report, join_reports, load_report, save_report, summarise
from kvrouting_simulator.report.document import ReportUnreadableError
from kvrouting_simulator.report.page import render_page, save_page
from kvrouting_simulator.report.plots import plots
from kvrouting_simulator.report.rows import comparison_rows, differences
from kvrouting_simulator.report.table import agreement_table, comparison_table, trouble_lines
from tests.fakes.request_records import random_records, record, run

MARKS = (
    PoolMark(at_ms=3000.0, kind="killed", worker="engine-1"),
    PoolMark(at_ms=5000.0, kind="returned", worker="engine-1"),
)


def sample() -> Report:
    return Report(
        title="Two <policies> & one pool",
        introduction=("Four engines.",),
        runs=(
            run("cache_aware + lru", random_records(1), marks=MARKS, goodput_ttft_ms=200),
            run("lbgr + rlt", random_records(2), marks=MARKS, goodput_ttft_ms=200),
            run("lbgr + rlt (virtual)", random_records(3), goodput_ttft_ms=200),
        ),
        pairs=(("lbgr + rlt", "lbgr + rlt (virtual)"),),
    )


class Cells(html.parser.HTMLParser):
    """Collects the exact values and whatever the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "data-value" and value is not None:
                self.values.append(float(value))
            if name in ("src", "href") and value is not None:
                self.fetched.append(value)


def test_a_saved_report_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    save_report(sample(), path)
    assert load_report(path) == sample()


def test_the_saved_summary_follows_from_the_saved_records(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    save_report(sample(), path)
    for loaded in load_report(path).runs:
        assert summarise(loaded.records, goodput_ttft_ms=200) == loaded.summary


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"title": "x"}', b'{"title": "x", "runs": [], "format": "kvrouting-report/1"}']
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(ReportUnreadableError, match=r"wrong\.json"):
        load_report(path)


def test_a_report_refuses_another_format_and_double_or_unknown_names() -> None:
    one = run("a", random_records(1))
    with pytest.raises(ValueError, match="kvrouting-report/0"):
        Report(title="t", runs=(one,), format="kvrouting-report/0")
    with pytest.raises(ValueError, match="one name: a, a"):
        Report(title="t", runs=(one, one))
    with pytest.raises(ValueError, match="'b'"):
        Report(title="t", runs=(one,), pairs=(("a", "b"),))


def test_joined_reports_keep_every_run_under_a_name_of_its_own() -> None:
    report = Report(title="t", runs=(run("a", random_records(1)),))
    joined = join_reports("all", [report, report, report], labels=["first", "second", "second"])
    assert [r.name for r in joined.runs] == ["a", "second: a", "second: a'"]
    assert all(r.records == report.runs[0].records for r in joined.runs)


@pytest.fixture(scope="module")
def page() -> str:
    """Drawing takes a second."""
    return render_page(sample())


def test_the_page_shows_exactly_the_figures_of_the_file(tmp_path: Path, page: str) -> None:
    save_report(sample(), tmp_path / "report.json")
    cells = Cells()
    cells.feed(page)
    saved = json.loads((tmp_path / "report.json").read_text())
    for shown_run in saved["runs"]:
        summary = shown_run["summary"]
        assert 100 * summary["hit_rate"] in cells.values
        assert summary["throughput_per_s"] in cells.values
        assert summary["goodput_per_s"] in cells.values
        assert summary["imbalance"] in cells.values
        for distribution in ("latency", "ttft"):
            for figure in ("p50", "p95", "p99"):
                assert summary[distribution][figure] in cells.values


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    cells = Cells()
    cells.feed(page)
    assert len(cells.fetched) == 4
    assert all(source.startswith("data:image/svg+xml;base64,") for source in cells.fetched)
    assert not {"script", "link", "iframe"} & set(cells.tags)
    assert cells.tags.count("img") == 4


def test_the_page_escapes_what_it_is_given(page: str) -> None:
    assert "Two &lt;policies&gt; &amp; one pool" in page
    assert "<policies>" not in page


def test_kill_and_return_are_drawn() -> None:
    unmarked = Report(title="t", runs=(run("a", random_records(1)),))
    marked = Report(title="t", runs=(run("a", random_records(1), marks=MARKS),))
    before = {plot.title: plot.svg for plot in plots(unmarked.runs)}
    after = {plot.title: plot.svg for plot in plots(marked.runs)}
    changed = {title for title in before if before[title] != after[title]}
    assert changed == {"Latency over time", "Cache hit rate over time"}
    for title in changed:
        assert "#b00020" in after[title]
        assert "#2e7d32" in after[title]


def test_the_same_report_gives_the_same_page(tmp_path: Path, page: str) -> None:
    save_page(sample(), tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8") == page


def test_expected_runs_stand_beside_their_measured_ones_only(page: str) -> None:
    assert [r.name for r in sample().compared] == ["cache_aware + lru", "lbgr + rlt"]
    agreement = page[page.index("<h2>Agreement</h2>") : page.index("<h2>Workers</h2>")]
    assert "lbgr + rlt (virtual)" in agreement
    assert "lbgr + rlt (virtual)" not in page[: page.index("<h2>Notes</h2>")]


def test_a_run_in_which_nothing_completed_still_has_a_page() -> None:
    dead = run("dead", [record(error="connection: refused", ttft_ms=None, worker=None)])
    page = render_page(Report(title="t", runs=(dead,)))
    assert "1 request failed with connection: refused" in page
    assert plots([dead]) == ()


def test_a_ratio_above_one_is_an_improvement_whatever_the_direction() -> None:
    slow = run("slow", [record(latency_ms=1000, cached_tokens=10)])
    fast = run("fast", [record(latency_ms=250, cached_tokens=40)])
    ratios = {row.label: row.ratio(1) for row in comparison_rows([slow, fast])}
    assert ratios["latency P50"] == pytest.approx(4)
    assert ratios["hit rate"] == pytest.approx(4)
    assert ratios["requests"] is None


def test_agreement_is_relative_to_what_was_expected() -> None:
    measured = run("real", [record(latency_ms=440)])
    expected = run("virtual", [record(latency_ms=400)])
    found = {d.label: d.percent for d in differences(measured, expected)}
    assert found["latency P95"] == pytest.approx(10)
    assert agreement_table(Report(title="t", runs=(measured, expected))) is None


def test_three_runs_and_two_agreements_fit_into_a_terminal_of_80_characters() -> None:
    console, wide = (Console(width=width, force_terminal=False) for width in (80, 300))
    names = ("cache_aware + lru", "lbgr + rlt-adaptive", "cache_aware 0.4 + lru (virtual)")
    # Latencies of five digits and a run in which requests were cut and sent again: the widest there is.
    slow = [
        replace(r, end_ms=r.end_ms + 20_000, output_tokens=100, resubmissions=1)
        for r in random_records(1)
        if r.completed
    ]
    runs = [run(name, slow, goodput_ttft_ms=500) for name in names]
    virtual = [run(f"{name} (virtual)", slow, goodput_ttft_ms=500) for name in names[:2]]
    pairs = tuple((name, f"{name} (virtual)") for name in names[:2])
    report = Report(title="demo", runs=(*runs, *virtual), pairs=pairs)
    agreement = agreement_table(report)
    assert agreement is not None
    for table, labels in (
        (comparison_table(report), [row.label for row in comparison_rows(report.compared)]),
        (agreement, [d.label for d in differences(runs[0], virtual[0])]),
    ):
        with console.capture() as captured:
            console.print(table)
        lines = captured.get().splitlines()
        assert all(len(line) <= 80 for line in lines)
        first = next(number for number, line in enumerate(lines) if "hit rate" in line)
        for label, line in zip(labels, lines[first:], strict=False):
            assert label in line
        assert "…" not in captured.get()
        with wide.capture() as whole:
            wide.print(table)
        assert captured.get().split() == whole.get().split(), "nothing is cut off at the edge"


def test_the_terminal_shows_runs_ratios_and_troubles() -> None:
    console = Console(width=120, record=True, file=None, quiet=False, force_terminal=False)
    report = sample()
    with console.capture() as captured:
        console.print(comparison_table(report))
        console.print(agreement_table(report))
    text = captured.get()
    row = next(r for r in comparison_rows(report.compared) if r.label == "latency P95")
    assert row.text(0) in text
    assert row.text(1) in text
    assert f"{row.ratio(1):.2f}" in text
    assert "times better than cache_aware + lru" in text
    virtual = next(d for d in differences(*report.runs[1:]) if d.label == "latency P95")
    assert f"{virtual.percent:+.1f}" in text
    lines = trouble_lines(report)
    failed = report.runs[0].summary.failures["connection"]
    assert f"cache_aware + lru: {failed} × connection: refused" in lines
    assert "lbgr + rlt: a note about lbgr + rlt" in lines
