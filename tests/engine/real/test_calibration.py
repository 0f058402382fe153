"""A class fitted to a real server on the CPU, which nobody measured before, predicts it better than a guess."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrouting_core.class_file import MeasuredClass, parse_class
from kvrouting_core.service_time import worker_class
from kvrouting_simulator.calibration import calibrate, read_decisions
from kvrouting_simulator.calibration.class_fit import decode_error, prefill_error
from kvrouting_simulator.demo.pool_plan import PoolPlan
from kvrouting_simulator.demo.sglang_engines import VOCABULARY_SIZE, SglangEngines, write_model
from kvrouting_simulator.workloads import CalibrationLoad
from tests.closed_loop import send_groups
from tests.processes import LocalPool

pytestmark = pytest.mark.timeout(900)

LOAD = CalibrationLoad(
    requests=90, prompt_tokens=(40, 1200), output_tokens=(4, 16), crowd=6, vocabulary_size=VOCABULARY_SIZE
)


async def test_the_error_of_the_prediction_falls_on_a_real_server(tmp_path: Path, quiet: None) -> None:
    engines = SglangEngines.found(Path(sys.executable), model_folder=write_model(tmp_path / "model"))
    decisions = tmp_path / "decisions.jsonl"
    plan = PoolPlan(
        engines=1,
        launcher=engines,
        capacity_tokens=12_000,
        block_tokens=16,
        policy="round_robin",
        router_options=["--decisions-file", str(decisions)],
    )
    async with LocalPool(plan, folder=tmp_path / "logs") as pool:
        await send_groups(pool, LOAD, seed=1)
    with decisions.open() as lines:
        observations = read_decisions(lines, name="decisions")
    assert all(each.sound for each in observations)
    found = calibrate(observations)
    # What the router takes a class for that it does not know.
    guess = worker_class("L40").times
    before = [prefill_error(guess, found.batches), decode_error(guess, found.intervals)]
    after = [prefill_error(found.times, found.batches), decode_error(found.times, found.intervals)]
    for what, old, new in zip(("prefill batch", "decode step"), before, after, strict=True):
        print(f"{what}: median error (bias) {old.median:.0%} ({old.bias:+.0%}), now {new.median:.0%} ({new.bias:+.0%})")
    assert sum(error.median for error in after) < sum(error.median for error in before)
    assert sum(abs(error.bias) for error in after) < sum(abs(error.bias) for error in before)
    written = MeasuredClass(name="cpu", times=found.times, standard_errors=found.standard_errors)
    assert parse_class(written.as_text()) == written
    print(written.as_text())
