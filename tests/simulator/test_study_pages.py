"""What is written about results: numbers, claims, pages, and the command that writes and checks them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrouting_simulator.study.cell import CellResult
from kvrouting_simulator.study.charts import chart_png
from kvrouting_simulator.study.command import experiments
from kvrouting_simulator.study.definition import StudyError
from kvrouting_simulator.study.evidence import Evidence, spread
from kvrouting_simulator.study.number_table import measured_csv, numbers_csv
from kvrouting_simulator.study.overview import overview_page
from kvrouting_simulator.study.page import claim_numbers, study_page
from kvrouting_simulator.study.study_file import read_study
from tests.simulator.study_under_test import STUDY, write_study

# P50 latency of (policy, rate) for the seeds 1 and 2.
LATENCY = {
    ("random", "4.0"): (2.0, 4.0),
    ("random", "8.0"): (6.0, 8.0),
    ("best", "4.0"): (1.0, 1.0),
    ("best", "8.0"): (2.0, 1.0),
}


def evidence(folder: Path, text: str = STUDY) -> Evidence:
    """The small study with the latencies above."""
    study = read_study(write_study(folder, text) / "small.toml")
    assert study is not None
    results = {}
    for placed in study.cells():
        seconds = LATENCY[placed.labels["policy"], placed.labels["rate"]][placed.seed - 1]
        figures = {"latency_p50_s": seconds, "hit_rate": 0.25, "latency_p95_s": 2 * seconds, "goodput_per_s": None}
        digest = placed.cell.digest
        results[digest] = CellResult(digest=digest, figures=figures, measured={"decision_us": 12.0})
    return Evidence(study, results)


class TestEvidence:
    def test_mean_and_deviation_of_a_sample(self) -> None:
        found = spread([1.0, 2.0, 6.0])
        assert (found.mean, found.sd) == pytest.approx((3.0, 7.0**0.5))
        assert spread([5.0]).sd == 0.0
        with pytest.raises(ValueError, match="no values"):
            spread([])

    def test_a_claim_is_paired_by_seed_and_averaged_over_the_axes_it_does_not_name(self, tmp_path: Path) -> None:
        found = evidence(tmp_path)
        (claim,) = found.study.claims
        # Seed 1: (2/1 + 6/2)/2; seed 2: (4/1 + 8/1)/2.
        judged = found.judge(claim)
        assert (judged.mean, judged.sd) == pytest.approx((4.25, (2 * 1.75**2) ** 0.5))

    @pytest.mark.parametrize(
        ("form", "of", "expected"),
        [
            ("percent", 'of = { policy = "random", rate = "8.0" }\nover = { policy = "best" }', "450.00 ± 353.55 %"),
            ("difference", 'of = { policy = "random", rate = "4.0" }\nover = { rate = "8.0" }', "-4.00 ± 0.00 s"),
            ("value", 'of = { policy = "best", rate = "8.0" }', "1.50 ± 0.71 s"),
        ],
    )
    def test_the_forms_of_a_claim(self, tmp_path: Path, form: str, of: str, expected: str) -> None:
        text = STUDY.replace('form = "ratio"', f'form = "{form}"')
        text = text.replace('of = { policy = "random" }\nover = { policy = "best" }', of)
        assert claim_numbers(evidence(tmp_path, text)) == {"gain": expected}

    def test_a_claim_on_a_figure_that_a_run_lacks_is_refused(self, tmp_path: Path) -> None:
        found = evidence(tmp_path, STUDY.replace('figure = "latency_p50_s"', 'figure = "goodput_per_s"'))
        with pytest.raises(StudyError, match=r"claim 'gain': no goodput_per_s at"):
            claim_numbers(found)


class TestPages:
    def test_numbers_have_a_line_for_each_run_and_no_measured_time(self, tmp_path: Path) -> None:
        found = evidence(tmp_path)
        header, first, *others = numbers_csv(found).splitlines()
        assert header == "policy,rate,seed,hit_rate,latency_p50_s,latency_p95_s,digest"
        assert first == f"random,4.0,1,0.250000,2.00000,4.00000,{found.study.cells()[0].cell.digest}"
        assert len(others) == 7
        assert measured_csv(found) == "policy,rate,seed,decision_us\n" + "".join(
            f"{policy},{rate},{seed},12\n"
            for policy in ("random", "best")
            for rate in ("4.0", "8.0")
            for seed in (1, 2)
        )

    def test_a_page_holds_both_claims_the_texts_with_their_numbers_and_the_table(self, tmp_path: Path) -> None:
        page = study_page(evidence(tmp_path), command="the command", has_times=True)
        assert page.startswith("# Two policies\n\nThe gain is 4.25 ± 2.47x.\n")
        assert "| median latency | 2x | 4.25 ± 2.47x |" in page
        assert "Because of 4.25 ± 2.47x." in page
        assert "| random | 4.0 | 0.250 ± 0.000 | 3.00 ± 1.41 | 6.00 ± 2.83 | 12 ± 0 |" in page
        assert "seeds 1, 2" in page
        assert "first 24 of the workload" in page
        assert "`the command`" in page

    def test_a_page_says_which_set_ups_fit(self, tmp_path: Path) -> None:
        text = STUDY.replace("requests = 24", 'requests = 24\nmemory = ["H200-llama-70b", "H200x2-llama-70b"]')
        page = study_page(evidence(tmp_path, text), command="c", has_times=False)
        assert "| Llama-3.1-70B | 1 x H200 | 124 | 132 | does not start |" in page
        assert "| Llama-3.1-70B | 2 x H200 | 247 | 132 | 378k |" in page

    @pytest.mark.parametrize("text", [STUDY, STUDY.replace('x = "rate"\n', "")], ids=["lines", "bars"])
    def test_a_chart_is_a_picture_and_always_the_same(self, tmp_path: Path, text: str) -> None:
        found = evidence(tmp_path, text)
        picture = chart_png(found)
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
        assert chart_png(found) == picture

    def test_the_overview_fills_in_numbers_and_leaves_out_what_did_not_run(self, tmp_path: Path) -> None:
        found = evidence(tmp_path, STUDY.replace("x = ", 'summary = "Better by {gain}."\nx = '))
        text = "# All\n\n1. It is {small.gain}.\n2. It is {absent.gain}.\n"
        page = overview_page(text, [found], skipped={"absent": "no file"}, command="c")
        assert "1. It is 4.25 ± 2.47x." in page
        assert "2. It is" not in page
        assert "| [Two policies](small.md) | is best | Better by 4.25 ± 2.47x. |" in page
        assert "- absent: no file" in page
        with pytest.raises(StudyError, match=r"wants 'small.loss'"):
            overview_page("{small.loss}", [found], skipped={}, command="c")


class TestCommand:
    @staticmethod
    def _run(folder: Path, *arguments: str) -> Result:
        places = ("--studies", str(folder / "e"), "--cells", str(folder / "c"), "--out", str(folder / "o"))
        return CliRunner().invoke(experiments, [*places, "--jobs", "1", *arguments])

    def test_it_writes_pages_numbers_and_plots_and_an_overview(self, tmp_path: Path) -> None:
        (write_study(tmp_path / "e") / "_overview.md").write_text("# All\n\n{small.gain}\n")
        done = self._run(tmp_path)
        assert done.exit_code == 0, done.output
        names = {path.name for path in (tmp_path / "o").iterdir()}
        assert names == {"small.csv", "small.md", "small.png", "README.md"}
        assert "8/8 small: best, 8.0, seed 2" in done.output
        assert "{" not in (tmp_path / "o" / "README.md").read_text()

    def test_the_check_accepts_the_same_numbers_and_names_the_first_that_differs(self, tmp_path: Path) -> None:
        write_study(tmp_path / "e")
        assert self._run(tmp_path, "--quick").exit_code == 0
        numbers = tmp_path / "o" / "quick" / "small.csv"
        assert len(numbers.read_text().splitlines()) == 3
        agreed = self._run(tmp_path, "--quick", "--check")
        assert agreed.exit_code == 0, agreed.output
        assert "byte for byte" in agreed.output
        numbers.write_text(numbers.read_text().replace("best,8.0,1,0", "best,8.0,1,9"))
        for path in (tmp_path / "c").iterdir():
            path.write_bytes(b"a result that is kept is not trusted")
        differing = self._run(tmp_path, "--quick", "--check")
        assert differing.exit_code == 1
        assert "small.csv:3: it has best,8.0,1,9" in differing.output

    def test_a_study_whose_trace_is_absent_is_skipped_with_the_reason(self, tmp_path: Path) -> None:
        (write_study(tmp_path / "e") / "_overview.md").write_text("# All\nOf a trace: {recorded.gain}\n")
        text = STUDY.replace(
            "groups = 4\nprompts_per_group = 8\nlengths_tokens = [128, 256]", 'kind = "mooncake"\npath = "data:t.jsonl"'
        )
        text = text.replace('path = "workload.arrivals.rate_per_s"', 'path = "workload.speed"')
        write_study(tmp_path / "e", text, name="recorded")
        done = self._run(tmp_path, "--data", str(tmp_path / "nowhere"))
        assert done.exit_code == 0, done.output
        assert "recorded: skipped, needs t.jsonl in the folder that --data names" in done.output
        overview = (tmp_path / "o" / "README.md").read_text()
        assert "- recorded: needs t.jsonl" in overview
        assert "Of a trace" not in overview
        (tmp_path / "t.jsonl").write_text(
            '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
        )
        found = self._run(tmp_path, "recorded", "--data", str(tmp_path))
        assert found.exit_code == 0, found.output
        assert (tmp_path / "o" / "recorded.csv").is_file()

    def test_without_running_only_what_is_finished_is_written(self, tmp_path: Path) -> None:
        write_study(tmp_path / "e")
        write_study(tmp_path / "e", STUDY.replace("seeds = [1, 2]", "seeds = [3]"), name="other")
        assert self._run(tmp_path, "small").exit_code == 0
        (tmp_path / "o" / "small.md").unlink()
        done = self._run(tmp_path, "--no-run")
        assert done.exit_code == 0, done.output
        assert (tmp_path / "o" / "small.md").is_file()
        assert not (tmp_path / "o" / "other.md").exists()

    def test_a_wrong_file_ends_it_with_the_reason(self, tmp_path: Path) -> None:
        write_study(tmp_path / "e", STUDY.replace("[1, 2]", "[]"))
        done = self._run(tmp_path)
        assert done.exit_code == 1
        assert "small.toml: small: seeds must be different numbers, got []" in done.output
