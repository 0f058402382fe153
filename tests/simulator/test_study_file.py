"""What a study file may say, and what is told of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouting_simulator.study.definition import StudyError
from kvrouting_simulator.study.runner import tasks_of
from kvrouting_simulator.study.study_file import read_studies, read_study
from tests.simulator.study_under_test import STUDY, write_study

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


class TestReading:
    def test_every_combination_of_points_has_a_cell_for_every_seed(self, tmp_path: Path) -> None:
        (study,) = read_studies(write_study(tmp_path))
        cells = study.cells()
        assert len(cells) == 2 * 2 * 2
        assert cells[0].labels == {"policy": "random", "rate": "4.0"}
        scenarios = [placed.cell.scenario for placed in cells]
        assert [s["workload"]["arrivals"]["rate_per_s"] for s in scenarios] == [4.0, 4.0, 8.0, 8.0] * 2
        assert [s["seed"] for s in scenarios] == [1, 2] * 4
        assert {s["workers"][0]["eviction"] for s in scenarios[:4]} == {"lru"}
        assert {s["workload"]["requests"] for s in scenarios} == {24}

    def test_the_small_form_keeps_what_it_names(self, tmp_path: Path) -> None:
        (study,) = read_studies(write_study(tmp_path), quick=True)
        assert [placed.labels["rate"] for placed in study.cells()] == ["8.0", "8.0"]
        assert study.requests == 8
        assert not study.claims

    def test_a_study_without_a_small_form_is_left_out_of_the_quick_set(self, tmp_path: Path) -> None:
        write_study(tmp_path, STUDY.split("[quick]")[0], name="long-only")
        assert read_studies(tmp_path, quick=True) == []

    def test_a_cell_that_two_studies_share_is_run_once(self, tmp_path: Path) -> None:
        write_study(tmp_path, name="one")
        write_study(tmp_path, name="two")
        assert len(tasks_of(read_studies(tmp_path))) == 8

    def test_points_and_scenarios_come_from_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "_base.toml").write_text("block_tokens = 128\n[[workers]]\ncount = 3\npage_size = 64\n")
        (tmp_path / "_points.toml").write_text(
            '[[points]]\nlabel = "a"\n[[points]]\nlabel = "b"\nset = {policy = "random"}\n'
        )
        text = """
title = "t"
about = "a"
seeds = [1]
series = "s"
base = ["_base.toml"]
axes = [{ name = "s", from = "_points.toml", pick = ["b"] }]
[scenario]
block_tokens = 64
"""
        (study,) = read_studies(write_study(tmp_path, text))
        (placed,) = study.cells()
        assert placed.labels == {"s": "b"}
        assert placed.cell.scenario["workers"] == [{"count": 3, "page_size": 64}]
        assert placed.cell.scenario["block_tokens"] == 64


class TestErrors:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('title = "Two policies"', 'headline = "x"', "study has no 'headline'; known: title"),
            ("seeds = [1, 2]", "seeds = [1, 1]", r"seeds must be different numbers, got \[1, 1\]"),
            ("seeds = [1, 2]", 'seeds = ["one"]', "seeds: Expected `int`, got `str`"),
            ('series = "policy"', 'series = "polcy"', "series is 'polcy', which is no axis; axes: policy, rate"),
            ('policy = "random",', 'policy = "rnd",', r"'policy': 'random'.*unknown policy 'rnd'"),
            ("values = [4.0, 8.0]", "values = [4.0, -8.0]", "rate_per_s must be positive, got -8.0"),
            ("values = [4.0, 8.0]", "values = []", "axis 'rate' has no points"),
            ('path = "workload.arrivals.rate_per_s"', 'path = "workload.groups.x"', "workload.groups.x leads into 4"),
            ('figure = "latency_p50_s"', 'figure = "latency"', "claim 'gain': no figure 'latency'; known: hit_rate"),
            ('over = { policy = "best" }', 'over = { policy = "worst" }', "names policy 'worst'; known: random, best"),
            ('over = { policy = "best" }', "", "claim 'gain': form 'ratio' needs `over`"),
            ('form = "ratio"', 'form = "quotient"', "claim 'gain': Invalid enum value 'quotient'"),
            ("keep = { rate = [8.0] }", "keep = { rates = [8.0] }", "quick.keep has no 'rates'; known: policy, rate"),
            ("keep = { rate = [8.0] }", "keep = { rate = [9.0] }", "axis 'rate' has no '9.0'; known: 4.0, 8.0"),
            ('label = "best"', 'label = "random"', "axis 'policy' has two points of one label"),
            ('about = "The gain is {gain}."', 'about = "{loss}"', "'loss' is the number of no claim; claims: gain"),
            ("capacity_tokens = 2048", "capacity = 2048", "workers has no 'capacity'"),
            ("requests = 24", "requests = 24\nkind = 'sprint'", "kind must be one of run, timed"),
        ],
    )
    def test_a_wrong_value_is_named_with_its_file(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        assert old in STUDY
        quick = "keep" in old
        text = STUDY.replace(old, new)
        with pytest.raises(StudyError, match=message) as raised:
            read_study(write_study(tmp_path, text) / "small.toml", quick=quick)
        assert str(raised.value).startswith("small.toml: ")

    def test_an_unknown_study_is_told_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(StudyError, match=r"no study 'smal' in .*; there are: small"):
            read_studies(write_study(tmp_path), names=["smal"])


class TestTheProductsOwn:
    @pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("[!_]*.toml")), ids=lambda path: path.stem)
    def test_each_is_valid_in_both_forms(self, path: Path) -> None:
        study = read_study(path)
        assert study is not None
        assert len(study.seeds) >= 3
        assert study.paper
        read_study(path, quick=True)

    def test_each_figure_and_table_of_the_paper_is_there(self) -> None:
        names = {path.stem for path in EXPERIMENTS.glob("[!_]*.toml")}
        assert {f"figure-{n}" for n in (2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14)} <= names
        assert {"table-2", "table-3", "capacity", "policies", "evictions", "traces"} <= names
