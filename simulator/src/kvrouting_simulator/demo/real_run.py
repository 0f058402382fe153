"""One set-up on real processes: the requests go through the HTTP API while a worker is killed and comes back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from kvrouting_simulator.demo.background_tasks import with_background_tasks
from kvrouting_simulator.demo.cluster import Cluster
from kvrouting_simulator.demo.cpu_use import CpuMeter
from kvrouting_simulator.demo.pool_plan import worker_id
from kvrouting_simulator.demo.scenario import RESUBMISSIONS, DemoScenario, Fault, Setup
from kvrouting_simulator.loadgen.apis import build_api
from kvrouting_simulator.loadgen.drive import Target, drive, lateness_notes
from kvrouting_simulator.loadgen.generator import Limits, LoadGenerator
from kvrouting_simulator.loadgen.progress import progress_view
from kvrouting_simulator.report import PoolMark, RequestRecord, Run, summarise
from kvrouting_simulator.workloads.client import ScheduledClient

_BUSY_SHARE = 0.85  # of all cores: above it processes wait for one another and times are no longer the engines'
_BUSY_POLL_S = 0.02


@dataclass(slots=True)
class _Course:
    """What happened to the pool, on the run's clock."""

    started: asyncio.Future[LoadGenerator]
    marks: list[PoolMark] = field(default_factory=list)
    in_flight_at_kill: int = 0


async def run_setup(scenario: DemoScenario, setup: Setup, *, folder: Path, console: Console) -> Run:
    """Starts the pool, sends everything, ends the pool. folder: for the logs.

    Raises: ProcessFailedError, PoolNotLiveError.
    """
    plan = scenario.plan(setup)
    console.print(
        f"{setup.name}: starting {plan.engines} engines, {plan.engines} sidecars and the router", highlight=False
    )
    async with Cluster(plan, folder=folder) as pool:
        meter = CpuMeter({"engines": pool.engines, "sidecars": pool.sidecars, "router": pool.routers})
        course = _Course(started=asyncio.get_running_loop().create_future())
        records = await _drive(pool, scenario, setup, course, meter, console)
        shares = meter.percents()
    summary = summarise(
        records,
        goodput_ttft_ms=scenario.goodput_ttft_ms,
        workers=[worker_id(number) for number in range(plan.engines)],
    )
    return Run(
        name=setup.name,
        parameters={
            **scenario.described(setup),
            **{f"CPU of {name} (% of a core)": round(share, 1) for name, share in shares.items()},
        },
        records=records,
        summary=summary,
        marks=tuple(course.marks),
        notes=(
            *_course_notes(course, scenario.fault),
            *_starved_notes(sum(shares.values()), os.cpu_count() or 1),
            *lateness_notes(summary, max_connections=None),
        ),
    )


async def _drive(
    pool: Cluster, scenario: DemoScenario, setup: Setup, course: _Course, meter: CpuMeter, console: Console
) -> tuple[RequestRecord, ...]:
    workload = scenario.gsp.workload(seed=scenario.seed)
    target = Target(url=pool.router_url, api=build_api("generate", model="default"))
    with progress_view(console, setup.name, total=len(workload), monotonic_s=time.monotonic) as progress:
        driving = drive(
            target,
            ScheduledClient(workload),
            limits=Limits(resubmissions=RESUBMISSIONS),
            progress=progress,
            on_start=course.started.set_result,
        )
        return await with_background_tasks(
            driving, pool.watch(), _fault(pool, scenario.fault, course, before_kill=meter.look)
        )


async def _fault(pool: Cluster, fault: Fault, course: _Course, *, before_kill: Callable[[], None]) -> None:
    generator = await course.started
    worker = worker_id(fault.worker)

    def mark(kind: str) -> None:
        course.marks.append(PoolMark(at_ms=generator.now_ms, kind=kind, worker=worker))

    await _sleep_until(fault.killed_ms, lambda: generator.now_ms)
    course.in_flight_at_kill = await _busy_moment(pool, worker, patience_ms=fault.busy_within_ms)
    before_kill()
    mark("killed")
    await pool.kill_engine(fault.worker)
    await asyncio.sleep(fault.away_ms / 1000)
    await pool.restart_engine(fault.worker)
    await pool.wait_live([fault.worker], timeout_s=pool.plan.starts.start_limit_s)
    mark("returned")


async def _busy_moment(pool: Cluster, worker: str, *, patience_ms: float) -> int:
    """Returns when the router has requests at the worker, or patience ends: how many it has."""
    tries = max(1, round(patience_ms / 1000 / _BUSY_POLL_S))
    for _ in range(tries):
        in_flight = int((await pool.workers())[worker]["in_flight"])
        if in_flight:
            return in_flight
        await asyncio.sleep(_BUSY_POLL_S)
    return 0


async def _sleep_until(moment_ms: float, now_ms: Callable[[], float]) -> None:
    await asyncio.sleep(max(0.0, moment_ms - now_ms()) / 1000)


def _course_notes(course: _Course, fault: Fault) -> tuple[str, ...]:
    if not course.marks:
        return ("the run was over before a worker could be killed",)
    killed, *rest = course.marks
    note = (
        f"the engine of {killed.worker} was killed (-9) after {killed.at_ms / 1000:.1f} s "
        f"with {course.in_flight_at_kill} request{'' if course.in_flight_at_kill == 1 else 's'} in flight"
    )
    if not rest:
        return (f"{note}; it was not back before the run was over",)
    took_s = (rest[0].at_ms - killed.at_ms - fault.away_ms) / 1000
    return (
        (
            f"{note}; it was started again {fault.away_ms / 1000:.1f} s later and served again "
            f"{took_s:.1f} s after that, with an empty cache"
        ),
    )


def _starved_notes(total_percent: float, cores: int) -> tuple[str, ...]:
    if total_percent <= 100 * _BUSY_SHARE * cores:
        return ()
    return (
        (
            f"all processes together used {total_percent:.0f} % of {cores} cores' {100 * cores} %: "
            "this machine was too busy, and times include the waiting for a core"
        ),
    )
