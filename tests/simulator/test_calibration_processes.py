"""The true step times of a simulated engine are recovered from what a real router wrote down of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_core.class_file import MeasuredClass, parse_class
from kvrouting_core.service_time import StepTimes
from kvrouting_simulator.calibration.command import calibrate_command
from kvrouting_simulator.demo.pool_plan import PoolPlan
from kvrouting_simulator.workloads import CalibrationLoad
from tests.closed_loop import send_groups
from tests.processes import LocalPool

# Slow enough that the milliseconds which processes on a busy machine lose are a small part of each step.
TRUE = StepTimes(
    prefill_overhead_ms=20,
    prefill_floor_ms=30,
    prefill_ms_per_token=0.5,
    attention_ms_per_token_pair=4e-4,
    decode_overhead_ms=40,
    decode_overhead_alone_ms=40,
    decode_ms_per_context_token=8e-3,
    decode_ms_per_request=8,
)
LOAD = CalibrationLoad(requests=100, prompt_tokens=(40, 2000), output_tokens=(4, 16), crowd=8)


@pytest.mark.processes
@pytest.mark.slow
async def test_a_class_goes_from_an_engine_through_the_routers_file_into_a_class_file(tmp_path: Path) -> None:
    true, decisions, out = tmp_path / "true.json", tmp_path / "decisions.jsonl", tmp_path / "found.json"
    true.write_text(MeasuredClass(name="true", times=TRUE).as_text())
    plan = PoolPlan(
        engines=1,
        capacity_tokens=60_000,
        policy="round_robin",
        engine_options=["--class-file", str(true)],
        router_options=["--decisions-file", str(decisions)],
    )
    async with LocalPool(plan, folder=tmp_path / "logs") as pool:
        sent = await send_groups(pool, LOAD, seed=1)
    assert len(decisions.read_text().splitlines()) == sent
    result = CliRunner().invoke(calibrate_command, [str(decisions), "--name", "found", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = parse_class(out.read_text())
    fitted = {name: error for name, error in found.standard_errors.items() if name != "prefill_overhead_ms"}
    assert len(fitted) == 5
    # Within a tenth; on a machine so busy that a tenth cannot be told, the standard errors say so.
    off = {name: (getattr(found.times, name), getattr(TRUE, name), error) for name, error in fitted.items()}
    assert all(abs(value - true) < max(0.1 * true, 3 * error) for value, true, error in off.values()), off
    assert all(error < 0.2 * true for _, true, error in off.values()), off
