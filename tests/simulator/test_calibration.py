"""Step times are recovered from what a router recorded: on the virtual clock, despite outliers, and from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvrouting_core.class_file import parse_class
from kvrouting_core.service_time import StepTimes, worker_class
from kvrouting_simulator.calibration import (
    Calibration,
    CalibrationError,
    Observation,
    calibrate,
    observed_records,
    read_decisions,
)
from kvrouting_simulator.calibration.class_fit import decode_error, prefill_error
from kvrouting_simulator.calibration.command import calibrate_command
from kvrouting_simulator.calibration.observations import DecisionsError
from kvrouting_simulator.calibration.prefill_batches import Start, prefill_batches
from kvrouting_simulator.calibration.robust_fit import robust_fit
from kvrouting_simulator.experiment.scenario import Scenario, WorkerSpec
from kvrouting_simulator.experiment.simulation import simulate
from kvrouting_simulator.workloads import CalibrationLoad, build_workload

# What a worker class is told by beside c0 and w, which the way to the engine and back is part of.
FITTED = (
    "prefill_ms_per_token",
    "attention_ms_per_token_pair",
    "decode_overhead_ms",
    "decode_ms_per_context_token",
    "decode_ms_per_request",
)


def observed(name: str, *, requests: int = 240) -> list[Observation]:
    """One worker of the class on the virtual clock."""
    run = simulate(
        Scenario(
            workload=CalibrationLoad(requests=requests),
            workers=[WorkerSpec(worker_class=name, eviction="lru", page_size=16)],
            policy="round_robin",
            seed=3,
        )
    )
    return list(observed_records(run.records))


@pytest.fixture(scope="module")
def l40() -> list[Observation]:
    return observed("L40")


def off(found: StepTimes, true: StepTimes, *, names: Iterable[str] = FITTED) -> dict[str, float]:
    """Relative difference by coefficient."""
    return {name: abs(getattr(found, name) / getattr(true, name) - 1) for name in names}


@pytest.mark.parametrize("name", ["L40", "H200", "H200x2-llama-70b"])
def test_the_true_coefficients_are_recovered_on_the_virtual_clock(name: str) -> None:
    true = worker_class(name).times
    found = calibrate(observed(name))
    assert max(off(found.times, true).values()) < 0.1, off(found.times, true)
    # c0 + w, with the way: two hops of 1 ms.
    assert abs(found.times.prefill_ms([(0, 1)]) - true.prefill_ms([(0, 1)])) < 3


def with_outliers(observations: Sequence[Observation], *, share: float, seed: int) -> list[Observation]:
    """Some requests met something that has nothing to do with the class: a pause of up to 20 s."""
    rng = random.Random(seed)
    hit = []
    for each in observations:
        pause_ms = rng.uniform(500, 20_000) if rng.random() < share else 0.0
        first = each.first_token_ms + (pause_ms if rng.random() < 0.5 else 0.0)
        hit.append(replace(each, first_token_ms=first, end_ms=max(first, each.end_ms + pause_ms)))
    return hit


def test_outliers_and_noise_do_not_move_them(l40: list[Observation]) -> None:
    rng = random.Random(5)
    noisy = [
        replace(o, first_token_ms=o.first_token_ms + noise, end_ms=o.end_ms + noise + rng.uniform(0, 2))
        for o in with_outliers(l40, share=0.08, seed=4)
        for noise in [rng.uniform(0, 3)]
    ]
    found = calibrate(noisy)
    true = worker_class("L40").times
    large = off(found.times, true, names=[n for n in FITTED if n != "decode_ms_per_request"])
    assert max(large.values()) < 0.1, large
    # Of d2 such noise leaves a guess, and the standard error says so.
    missed = abs(found.times.decode_ms_per_request - true.decode_ms_per_request)
    assert missed < 4 * found.standard_errors["decode_ms_per_request"]


def test_the_same_observations_give_the_same_times(l40: list[Observation]) -> None:
    assert calibrate(l40).times == calibrate(list(reversed(l40))).times
    assert calibrate(l40, seed=1).standard_errors == calibrate(l40, seed=1).standard_errors


def test_no_coefficient_is_negative_and_outliers_have_no_weight() -> None:
    rng = np.random.default_rng(2)
    design = np.column_stack([np.ones(200), rng.uniform(0, 10, 200), rng.uniform(0, 10, 200)])
    target = design @ np.array([3.0, 2.0, -0.1]) + rng.normal(0, 0.1, 200)
    target[:20] += 500
    fit = robust_fit(design, target, np.ones(200), seed=1)
    assert fit.coefficients[2] == 0
    assert abs(fit.coefficients[1] - 2) < 0.02
    assert 0 < fit.standard_errors[1] < 0.02


def one(dispatched: float, first: float, end: float, *, new: int = 100, sound: bool = True) -> Observation:
    return Observation(
        worker="w", dispatched_ms=dispatched, first_token_ms=first, end_ms=end, prompt_tokens=new, cached_tokens=0,
        output_tokens=10, sound=sound,
    )  # fmt: skip


def test_a_batch_is_known_by_its_first_tokens_and_begins_when_the_one_before_ends() -> None:
    alone, joined = one(0, 50, 300), [one(10, 120, 320), one(20, 121, 330, new=50)]
    amid_decoding = one(150, 210, 400)
    batches = prefill_batches([*joined, amid_decoding, alone])
    assert [b.start for b in batches] == [Start.IDLE, Start.BATCH, Start.UNKNOWN]
    assert [b.duration_ms for b in batches[:2]] == [50, 70]
    assert [b.new_tokens for b in batches] == [100, 150, 100]
    vague = prefill_batches([one(0, 50, 300, sound=False), *joined])
    assert [b.start for b in vague] == [Start.UNKNOWN, Start.UNKNOWN]


def test_what_cannot_be_told_is_refused_with_what_to_send(l40: list[Observation]) -> None:
    with pytest.raises(CalibrationError, match=r"only \d+ prefill batches began at a known moment, 30 are needed"):
        calibrate(l40[:20])
    alike = [replace(o, prompt_tokens=900, cached_tokens=0) for o in l40]
    with pytest.raises(CalibrationError, match=r"900 to \d+ new tokens: send prompts of lengths that differ"):
        calibrate([o for o in alike if prefill_batches([o])[0].new_tokens == 900][:96])
    with pytest.raises(CalibrationError, match="only 0 answers have several tokens"):
        calibrate([replace(o, output_tokens=1) for o in l40])


def lines(observations: Iterable[Observation]) -> list[str]:
    """As a router's --decisions-file has them."""
    return [
        json.dumps(
            {
                "decision": {"worker": o.worker, "decided_ms": o.dispatched_ms + 0.5, "candidates": []},
                "request": {
                    "arrived_ms": o.dispatched_ms, "prompt_tokens": o.prompt_tokens, "further_prompt_tokens": 0,
                    "sequences": 1, "exact": True, "stream": True,
                },
                "outcome": {
                    "outcome": "completed", "attempt": 1, "first_byte_ms": o.first_token_ms - o.dispatched_ms,
                    "end_ms": o.end_ms - o.dispatched_ms, "output_tokens": o.output_tokens,
                    "cached_tokens": o.cached_tokens,
                },
            }
        )
        for o in observations
    ]  # fmt: skip


def test_a_line_becomes_an_observation_and_an_unsound_one_says_so(l40: list[Observation]) -> None:
    line = lines(l40[:1])[0]
    (read,) = read_decisions([line, "\n"], name="f")
    assert read.dispatched_ms == l40[0].dispatched_ms + 0.5
    assert read.sound
    body = json.loads(line)
    changes: list[tuple[str, str, object]] = [
        ("outcome", "outcome", "failed"), ("outcome", "cached_tokens", None), ("outcome", "first_byte_ms", None),
        ("request", "stream", False), ("request", "sequences", 2), ("request", "exact", False),
    ]  # fmt: skip
    for part, key, value in changes:
        (read,) = read_decisions([json.dumps({**body, part: {**body[part], key: value}})], name="f")
        assert not read.sound, (part, key)
    for bad, complaint in (("{", "f, line 1: no JSON"), ("{}", "not a line of a router's --decisions-file")):
        with pytest.raises(DecisionsError, match=complaint):
            read_decisions([bad], name="f")


def test_the_command_writes_the_class_and_shows_the_errors_before_and_after(
    tmp_path: Path, l40: list[Observation]
) -> None:
    decisions, out = tmp_path / "decisions.jsonl", tmp_path / "class.json"
    strange = [replace(o, worker="w9/0", end_ms=o.end_ms + 5000) for o in l40]
    decisions.write_text("\n".join(lines([*l40, *strange])) + "\n")
    arguments = [str(decisions), "--name", "mine", "--out", str(out), "--worker", "w0/*", "--compare", "H200"]
    result = CliRunner().invoke(calibrate_command, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    written = parse_class(out.read_text())
    assert written.name == "mine"
    assert max(off(written.times, worker_class("L40").times).values()) < 0.1
    assert set(written.standard_errors) == set(asdict(written.times)) - {"prefill_floor_ms", "decode_overhead_alone_ms"}
    assert written.measured["requests"] == len(l40)
    assert "class H200" in result.output
    assert f"--class-file {out}" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        ("nonsense\n", [], "line 1: no JSON"),
        ("\n", [], "no request"),
        (None, ["--worker", "x*"], "no request of these workers"),
        (None, ["--name", "n" * 64], "1 to 63 printable characters"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, l40: list[Observation], content: str | None, options: list[str], complaint: str
) -> None:
    decisions = tmp_path / "decisions.jsonl"
    decisions.write_text("\n".join(lines(l40)) if content is None else content)
    arguments = [str(decisions), "--name", "n", "--out", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(calibrate_command, arguments)
    assert result.exit_code == 1
    assert complaint in result.output
    assert not (tmp_path / "out").exists()


def test_errors_are_relative_and_their_bias_has_a_sign(l40: list[Observation]) -> None:
    found: Calibration = calibrate(l40)
    faster = worker_class("H200").times
    assert prefill_error(faster, found.batches).bias < -0.5
    assert decode_error(faster, found.intervals).bias < -0.5
    assert prefill_error(found.times, found.batches).median < 0.02
    assert decode_error(found.times, found.intervals).median < 0.02


def test_the_load_has_requests_alone_and_in_crowds_with_and_without_a_known_prefix() -> None:
    load = build_workload("calibration", {"requests": 50, "prompt_tokens": "16,64", "vocabulary_size": 100})
    assert isinstance(load, CalibrationLoad)
    items = load.workload(seed=1).items
    assert len(items) == 50
    assert all(16 <= len(item.tokens) <= 64 and max(item.tokens) < 110 for item in items)
    gaps = np.diff([item.arrival_ms for item in items])
    assert (gaps[:19] == load.alone_gap_ms).all()
    assert (gaps == 0).any()
    with pytest.raises(ValueError, match="prompt_tokens must be a least of 2 or more and a most, got 9 and 3"):
        CalibrationLoad(prompt_tokens=(9, 3))
