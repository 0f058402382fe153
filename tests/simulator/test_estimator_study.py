"""Predictions held against what happened: on made-up runs whose answer is known, and on simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Candidate, Decision, Reason
from kvrouting_core.routing.events import Outcome
from kvrouting_simulator.estimator_study.cases import CASES
from kvrouting_simulator.estimator_study.command import judge_command
from kvrouting_simulator.estimator_study.judgement import accuracy, regret
from kvrouting_simulator.estimator_study.recorded_run import RecordedRun, recorded, undisturbed_ms
from kvrouting_simulator.experiment.scenario import Failure
from kvrouting_simulator.report import RequestRecord

SCENARIO = next(case for case in CASES if not case.late).scenario(requests=40, seed=2)
LATE = CASES[0].scenario(requests=40, seed=2)


@pytest.fixture(scope="module", params=[SCENARIO, LATE], ids=["immediate", "late"])
def run(request: pytest.FixtureRequest) -> RecordedRun:
    return recorded(request.param)


def made_up(predicted_ms: Sequence[float], happened_ms: Sequence[float]) -> RecordedRun:
    worker = WorkerId("w0/0")
    decisions, records = {}, {}
    for number, (predicted, happened) in enumerate(zip(predicted_ms, happened_ms, strict=True)):
        name = f"r{number:03}"
        candidate = Candidate(worker, 0, 0, 10, 0, predicted, 0.0, 0.0, predicted, 0.0, predicted)
        decisions[name] = Decision(
            request_id=name, policy="lbgr", worker=worker, reason=Reason.ONLY_CANDIDATE, decided_ms=number, waited_ms=0,
            prompt_tokens=10, candidates=(candidate,),
        )  # fmt: skip
        records[name] = RequestRecord(
            request_id=name, arrival_ms=number, first_token_ms=number, end_ms=number + happened, prompt_tokens=10,
            cached_tokens=0, output_tokens=1, worker=str(worker), outcome=Outcome.COMPLETED,
        )  # fmt: skip
    return RecordedRun(scenario=SCENARIO, requests=(), decisions=decisions, records=records)


def test_right_predictions_have_no_error_and_wrong_ones_a_bias_with_a_sign() -> None:
    happened = [float(n) for n in range(10, 110)]
    right = accuracy(made_up(happened, happened))
    assert (right.mean_error_ms, right.bias_ms, right.explained) == (0, 0, 1)
    assert right.rank == pytest.approx(1)
    assert [round(d.predicted_ms, 1) for d in right.deciles] == [14.5 + 10 * tenth for tenth in range(10)]
    short = accuracy(made_up([ms - 5 for ms in happened], happened))
    assert (short.mean_error_ms, short.median_error_ms, short.bias_ms) == (5, 5, -5)
    assert all(decile.happened_ms == pytest.approx(decile.predicted_ms + 5) for decile in short.deciles)
    upside_down = accuracy(made_up(happened[::-1], happened))
    assert upside_down.rank == pytest.approx(-1)
    assert upside_down.explained < 0


def test_the_last_requests_replay_where_it_was_is_what_happened(run: RecordedRun) -> None:
    assert len(run.served) == 40
    last = run.requests[-1].request_id
    same = undisturbed_ms(run, last, run.decisions[last].worker)
    assert same == pytest.approx(run.happened_ms(last))


def test_time_in_the_router_is_not_held_against_a_prediction() -> None:
    waited = recorded(replace(LATE, policy_parameters={"binding": "late", "release_ahead_ms": 1}))
    decisions = [waited.decisions[each] for each in waited.served]
    assert sum(d.waited_ms for d in decisions) > 1000
    for d in decisions:
        assert waited.happened_ms(d.request_id) == pytest.approx(
            waited.records[d.request_id].latency_ms - d.waited_ms, abs=5
        )


def test_without_later_requests_nothing_takes_longer(run: RecordedRun) -> None:
    for request_id in run.served[::11]:
        alone = undisturbed_ms(run, request_id, run.decisions[request_id].worker)
        assert 0 < alone <= run.happened_ms(request_id) + 1e-6


def test_regret_is_what_the_best_worker_would_have_saved(run: RecordedRun) -> None:
    request_id = run.served[0]
    found = regret(run, samples=1)
    candidates = run.decisions[request_id].candidates
    latencies = [undisturbed_ms(run, request_id, c.worker) for c in candidates]
    chosen = undisturbed_ms(run, request_id, run.decisions[request_id].worker)
    assert found.requests == 1
    assert found.mean_ms == pytest.approx(chosen - min(latencies))
    assert found.any_ms == pytest.approx(sum(latencies) / len(latencies) - min(latencies))
    assert found.best_share == 1.0  # all are idle and empty
    missed = [c.prediction_ms - latency for c, latency in zip(candidates, latencies, strict=True)]
    assert found.bias_ms == pytest.approx(sum(missed) / len(missed))


def test_with_one_worker_there_is_nothing_to_regret() -> None:
    alone = recorded(replace(SCENARIO, workers=SCENARIO.workers[:1]))
    found = regret(alone, samples=3)
    assert (found.mean_ms, found.foreseen_ms, found.any_ms, found.best_share) == (0, 0, 0, 1)


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="this scenario has failures"):
        recorded(replace(SCENARIO, failures=[Failure(worker=0, killed_ms=10)]))


def test_the_same_run_is_judged_alike(run: RecordedRun) -> None:
    again = recorded(run.scenario)
    assert accuracy(again) == accuracy(run)
    assert regret(again, samples=2) == regret(run, samples=2)


def test_the_command_writes_a_page_with_every_case(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    options = ["--requests", "20", "--samples", "1", "--seed", "3"]
    result = CliRunner().invoke(judge_command, ["--out", str(out), *options])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert "kvrouting judge-estimator --requests 20 --samples 1 --seed 3" in text
    assert all(text.count(f"| {case.name} |") >= 2 for case in CASES)
    assert text.count("\n| 10 |") == 2
