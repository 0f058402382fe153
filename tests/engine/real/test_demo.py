"""Half of the demo on real servers: every request is answered although one of the two is killed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvrouting_simulator.demo.real_run import run_setup
from kvrouting_simulator.demo.scenario import Fault, sglang_scenario
from kvrouting_simulator.demo.sglang_engines import SglangEngines, write_model

pytestmark = pytest.mark.timeout(1200)

REQUESTS = 36


async def test_real_servers_answer_every_request_although_one_is_killed(tmp_path: Path) -> None:
    engines = SglangEngines.found(Path(sys.executable), model_folder=write_model(tmp_path / "model"))
    assert engines.version == "0.5.23"
    scenario = sglang_scenario(engines, seed=1)
    scenario = replace(
        scenario,
        gsp=replace(scenario.gsp, requests=REQUESTS),
        # It is away until all is over: a start takes most of a minute.
        fault=Fault(worker=1, killed_ms=6_000, away_ms=600_000, busy_within_ms=6_000),
    )
    setup = scenario.setups[1]
    run = await run_setup(scenario, setup, folder=tmp_path / "logs", console=Console(quiet=True))
    summary = run.summary
    assert setup.eviction == "rlt-adaptive"
    assert (summary.requests, summary.completed, summary.lost) == (REQUESTS, REQUESTS, 0)
    assert [mark.kind for mark in run.marks] == ["killed"]
    assert {load.worker for load in summary.workers} == {"w0/0", "w1/0"}
    after = [r for r in run.records if r.arrival_ms > run.marks[0].at_ms + 1000]
    assert after
    assert {r.worker for r in after} == {"w0/0"}
    assert all(r.output_tokens == scenario.gsp.output_tokens for r in run.records)
    # The first request of each of 12 groups finds nothing; of the rest, half of the prompt is shared.
    assert summary.hit_rate is not None
    assert summary.hit_rate > 0.05
    assert "eviction policy rlt-adaptive," in (tmp_path / "logs" / "engine-0.log").read_text(errors="replace")
