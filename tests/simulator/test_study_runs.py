"""Results of cells: the same for everyone, kept at once, never computed twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouting_simulator.experiment import build_scenario, simulate
from kvrouting_simulator.study.cell import CapacitySearch, Cell, CellResult
from kvrouting_simulator.study.evidence import Evidence
from kvrouting_simulator.study.execution import run_cell
from kvrouting_simulator.study.figures import of_summary
from kvrouting_simulator.study.number_table import numbers_csv
from kvrouting_simulator.study.paths import changed, merged
from kvrouting_simulator.study.runner import CellFailedError, Task, run_tasks, tasks_of
from kvrouting_simulator.study.store import ResultStore
from kvrouting_simulator.study.study_file import read_studies
from tests.simulator.study_under_test import write_study

SCENARIO: dict[str, Any] = {
    "policy": "lbgr-released",
    "seed": 1,
    "workload": {"kind": "gsp", "groups": 6, "prompts_per_group": 8, "lengths_tokens": [128, 256, 512]},
    "workers": [{"count": 2, "page_size": 64, "capacity_tokens": 2048, "eviction": "rlt"}],
}


def quiet(done: int, total: int, where: str) -> None:
    """Nobody watches."""


class TestDigest:
    def test_any_change_of_the_scenario_its_kind_or_its_search_changes_it(self) -> None:
        search = CapacitySearch(low_per_s=1, high_per_s=2)
        cells = [
            Cell(kind="run", scenario=SCENARIO),
            Cell(kind="run", scenario=changed(SCENARIO, {"seed": 2})),
            Cell(kind="run", scenario=changed(SCENARIO, {"workers.eviction": "lru"})),
            Cell(kind="run", scenario=changed(SCENARIO, {"workload.groups": 7})),
            Cell(kind="timed", scenario=SCENARIO),
            Cell(kind="optimum", scenario=SCENARIO),
            Cell(kind="capacity", scenario=SCENARIO, capacity=search),
            Cell(kind="capacity", scenario=SCENARIO, capacity=CapacitySearch(low_per_s=1, high_per_s=3)),
        ]
        assert len({cell.digest for cell in cells}) == len(cells)

    def test_the_order_of_the_values_does_not_matter(self) -> None:
        backwards = dict(reversed(SCENARIO.items()))
        assert Cell(kind="run", scenario=backwards).digest == Cell(kind="run", scenario=SCENARIO).digest

    def test_a_search_without_bounds_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'capacity': a capacity search and its bounds go together"):
            Cell(kind="capacity", scenario=SCENARIO)


class TestKinds:
    def test_a_run_has_the_figures_of_its_scenario(self, tmp_path: Path) -> None:
        cell = Cell(kind="run", scenario=SCENARIO)
        first, second = (run_cell(cell, data=tmp_path) for _ in range(2))
        assert first == second
        assert first.figures == of_summary(simulate(build_scenario(SCENARIO)).summary)
        assert first.figures["completed"] == 48

    def test_timing_changes_no_figure(self, tmp_path: Path) -> None:
        plain = run_cell(Cell(kind="run", scenario=SCENARIO), data=tmp_path)
        ticks = iter(range(10**9))
        timed = run_cell(Cell(kind="timed", scenario=SCENARIO), data=tmp_path, seconds=lambda: float(next(ticks)))
        assert timed.figures == plain.figures
        assert timed.measured["decision_us"] >= 3e6, "arrival, first token and end of each: a tick for each at least"
        assert timed.measured["eviction_us"] > 0

    def test_the_optimum_hits_at_least_as_often_as_any_policy(self, tmp_path: Path) -> None:
        scenario = changed(SCENARIO, {"policy": "round_robin"})
        hits = {}
        for eviction in ("lru", "rlt", "lfu", "slru", "random"):
            cell = Cell(kind="run", scenario=changed(scenario, {"workers.eviction": eviction}))
            hits[eviction] = run_cell(cell, data=tmp_path).figures["hit_rate"] or 0.0
        best = run_cell(Cell(kind="optimum", scenario=scenario), data=tmp_path).figures["hit_rate"] or 0.0
        assert best >= max(hits.values())
        assert best > hits["lru"]

    def test_the_optimum_refuses_workers_that_die(self, tmp_path: Path) -> None:
        scenario = {**SCENARIO, "failures": [{"worker": 0, "killed_ms": 10.0}]}
        with pytest.raises(ValueError, match="this scenario has failures"):
            run_cell(Cell(kind="optimum", scenario=scenario), data=tmp_path)

    def test_capacity_is_the_highest_rate_that_meets_the_target(self, tmp_path: Path) -> None:
        search = CapacitySearch(low_per_s=5, high_per_s=200, step_per_s=5, target_p95_s=0.3)
        found = run_cell(Cell(kind="capacity", scenario=SCENARIO, capacity=search), data=tmp_path)
        rate = found.figures["capacity_per_s"]
        assert rate is not None
        p95 = {}
        for tried in (rate, rate + 5):
            values = changed(SCENARIO, {"workload.arrivals.rate_per_s": tried})
            p95[tried] = of_summary(simulate(build_scenario(values)).summary)["latency_p95_s"] or 0.0
        assert p95[rate] <= 0.3 < p95[rate + 5]
        assert found.figures["latency_p95_s"] == p95[rate]

    def test_a_target_out_of_reach_has_no_capacity(self, tmp_path: Path) -> None:
        search = CapacitySearch(low_per_s=5, high_per_s=20, step_per_s=5, target_p95_s=0.001)
        found = run_cell(Cell(kind="capacity", scenario=SCENARIO, capacity=search), data=tmp_path)
        assert found.figures == {"capacity_per_s": None}


class TestStore:
    def test_what_was_kept_is_read_and_anything_else_is_not(self, tmp_path: Path) -> None:
        store = ResultStore(tmp_path / "cells")
        result = CellResult(digest="abc", figures={"hit_rate": 0.25, "goodput_per_s": None})
        assert store.read("abc") is None
        store.write(result)
        assert store.read("abc") == result
        store.path("other").write_bytes(store.path("abc").read_bytes())
        assert store.read("other") is None, "the result of another cell"
        store.path("abc").write_bytes(b'{"digest": "abc"')
        assert store.read("abc") is None
        store.write(CellResult(digest="abc", figures={}, format="kvrouting-cell/0"))
        assert store.read("abc") is None


class TestRunning:
    def test_side_by_side_and_one_by_one_give_the_same_bytes(self, tmp_path: Path) -> None:
        studies = read_studies(write_study(tmp_path / "studies"))
        tables, files = [], []
        for jobs in (1, 3):
            folder = tmp_path / str(jobs)
            results = run_tasks(tasks_of(studies), ResultStore(folder), data=tmp_path, jobs=jobs, progress=quiet)
            tables.append(numbers_csv(Evidence(studies[0], results)))
            files.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert tables[0] == tables[1]
        assert files[0] == files[1]
        assert len(tables[0].splitlines()) == 9

    def test_what_has_a_result_is_not_run_again(self, tmp_path: Path) -> None:
        tasks = tasks_of(read_studies(write_study(tmp_path / "studies")))
        store = ResultStore(tmp_path / "cells")
        told: list[tuple[int, int]] = []
        run_tasks(tasks[:3], store, data=tmp_path, jobs=1, progress=quiet)
        run_tasks(tasks, store, data=tmp_path, jobs=1, progress=lambda done, total, _: told.append((done, total)))
        assert told == [(done, 8) for done in range(4, 9)]

    def test_a_cell_that_fails_is_named_and_what_is_done_stays(self, tmp_path: Path) -> None:
        good = Task(cell=Cell(kind="run", scenario=SCENARIO), where="good")
        broken = changed(SCENARIO, {"workload": {"kind": "mooncake", "path": "data:absent.jsonl"}})
        bad = Task(cell=Cell(kind="run", scenario=broken), where="study: chat, seed 1")
        store = ResultStore(tmp_path)
        with pytest.raises(CellFailedError, match=r"study: chat, seed 1: .*absent.jsonl"):
            run_tasks([good, bad], store, data=tmp_path, jobs=1, progress=quiet)
        assert store.read(good.cell.digest) is not None


@pytest.mark.processes
class TestInterrupted:
    @pytest.fixture
    def begun(self, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        write_study(tmp_path / "experiments")
        process = subprocess.Popen(self._command(), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield process
        process.kill()
        process.wait()

    @staticmethod
    def _command() -> list[str]:
        return [sys.executable, "-m", "kvrouting_simulator.study", "--jobs", "1"]

    def test_a_killed_call_goes_on_where_it_stopped(self, tmp_path: Path, begun: subprocess.Popen[bytes]) -> None:
        cells = tmp_path / "out" / "experiments"
        deadline = time.monotonic() + 120
        while len(list(cells.glob("*.json"))) < 2 and begun.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(begun.pid, signal.SIGKILL)
        begun.wait()
        kept = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in cells.glob("*.json")}
        assert kept
        done = subprocess.run(self._command(), cwd=tmp_path, capture_output=True, check=True, timeout=240)
        assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in kept} == kept
        assert len(list(cells.glob("*.json"))) == 8
        assert b"8/8" in done.stderr or len(kept) == 8
        fresh = ResultStore(tmp_path / "fresh")
        (study,) = read_studies(tmp_path / "experiments")
        again = run_tasks(tasks_of([study]), fresh, data=tmp_path, jobs=1, progress=quiet)
        written = (tmp_path / "docs" / "results" / "small.csv").read_text()
        assert written == numbers_csv(Evidence(study, again))


@given(
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3)), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3)), max_size=3),
)
def test_merging_two_levels_is_the_same_as_changing_each_path(
    below: dict[str, dict[str, int]], over: dict[str, dict[str, int]]
) -> None:
    paths = {f"{outer}.{inner}": value for outer, table in over.items() for inner, value in table.items()}
    by_paths = changed({**{outer: {} for outer in over}, **below}, paths)
    before = json.dumps([below, over])
    assert merged(below, over) == by_paths
    assert json.dumps([below, over]) == before
