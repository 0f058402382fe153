"""One run: workers, router and client on one virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_core.deltas import Delta
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.events import LoadReport
from kvrouting_core.routing.policy import Policy
from kvrouting_core.routing.registry import build_policy
from kvrouting_simulator.engine_model import (
    EngineLoad,
    EngineRequest,
    RequestTooLong,
    SeededAnswers,
)
from kvrouting_simulator.experiment.clock import VirtualClock
from kvrouting_simulator.experiment.index_feed import block_hasher
from kvrouting_simulator.experiment.request_lifecycle import RequestLifecycle
from kvrouting_simulator.experiment.router import SimulatedRouter
from kvrouting_simulator.experiment.router_group import RouterGroup
from kvrouting_simulator.experiment.scenario import Failure, Scenario
from kvrouting_simulator.experiment.worker import EngineParts, SimulatedWorker, StepResult
from kvrouting_simulator.report import PoolMark, RequestRecord, summarise
from kvrouting_simulator.report.document import Run
from kvrouting_simulator.workloads import ReadyRequest
from kvrouting_simulator.workloads.tokens import VOCABULARY_SIZE

NAMESPACE = Namespace(model="simulated")
_LONGEST_SILENCE_MS = 3_600_000.0
# A policy may average over reports. After so many of the same it remembers nothing of what was before: at one report a
# second, half a minute's memory has faded to e^-120.
_REPORTS_TO_FORGET = 3600


class PolicyStuckError(RuntimeError):
    """A policy keeps requests for an hour although nothing runs: it will never send them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """records: in order of their ends. busy_ms: time inside steps by worker."""

    records: tuple[RequestRecord, ...]
    busy_ms: dict[str, float]
    marks: tuple[PoolMark, ...]
    loads: dict[str, EngineLoad]


def simulate(scenario: Scenario) -> Run:
    """Runs a scenario with the policy that it names; the run is ready for a report.

    Raises: ValueError for an unknown policy or parameter; PolicyStuckError.
    """
    indices = [PrefixIndex() for _ in range(scenario.routers)]
    policy, *others = (policy_of(scenario, index, number=number) for number, index in enumerate(indices))
    further = tuple(zip(others, indices[1:], strict=True))
    return run_of(scenario, Simulation(scenario, policy=policy, index=indices[0], further=further).run())


def policy_of(scenario: Scenario, index: PrefixIndex, *, number: int = 0) -> Policy:
    """The policy that the scenario names, on an index. number: of its router, from 0.

    Raises: ValueError for an unknown policy or parameter.
    """
    seed = scenario.seed if scenario.tie_seed is None else scenario.tie_seed
    return build_policy(
        scenario.policy,
        scenario.policy_parameters,
        cache=index,
        block_size_tokens=scenario.block_tokens,
        rng=random.Random(f"{seed}/policy/{number}" if number else f"{seed}/policy"),
        limits=scenario.limits,
    )


def run_of(scenario: Scenario, result: SimulationResult) -> Run:
    """A simulation's result as a report takes it."""
    return Run(
        name=scenario.title,
        parameters={"policy": scenario.policy, "seed": scenario.seed, **scenario.settings},
        records=result.records,
        summary=summarise(
            result.records,
            goodput_ttft_ms=scenario.goodput_ttft_ms,
            workers=result.busy_ms,
            busy_ms=result.busy_ms,
        ),
        marks=result.marks,
    )


class Simulation:
    """A scenario with a policy that is given. cache view of the policy: `index`.

    further: policies of further routers before the same workers, each with its index, and each with its share of the
    requests. parts: what the engines are made of. on_dispatch: told of each request that is sent, with its worker.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        policy: Policy,
        index: PrefixIndex,
        further: Sequence[tuple[Policy, PrefixIndex]] = (),
        parts: EngineParts | None = None,
        on_dispatch: Callable[[WorkerId, ReadyRequest], None] | None = None,
    ) -> None:
        self._on_dispatch = on_dispatch
        self._scenario = scenario
        self._delays = scenario.delays
        self._clock = VirtualClock()
        blocks = block_hasher(scenario.block_tokens)
        answers = SeededAnswers(seed=scenario.seed, vocabulary_size=VOCABULARY_SIZE)
        self._client = scenario.workload.client(seed=scenario.seed)
        routers = [self._make_router(*each, blocks) for each in ((policy, index), *further)]
        self._router = routers[0] if len(routers) == 1 else RouterGroup(routers)
        self._workers = {
            worker: SimulatedWorker(
                worker=worker,
                spec=spec,
                seed=scenario.seed,
                clock=self._clock,
                blocks=blocks,
                namespace=NAMESPACE,
                answer_token=answers,
                on_step=self._stepped,
                parts=parts,
            )
            for worker, spec in ((WorkerId(f"w{i}/0"), spec) for i, spec in enumerate(scenario.workers))
        }
        self._outstanding = 0  # requests that were planned and have not ended
        self._last_progress_ms = 0.0
        self._records: list[RequestRecord] = []
        self._marks: list[PoolMark] = []
        self._reported: dict[WorkerId, EngineLoad] = {}
        self._quiet_reports = 0  # the latest ones in a row that told nothing new

    def _make_router(self, policy: Policy, index: PrefixIndex, blocks: ChainHasher) -> SimulatedRouter:
        scenario = self._scenario
        return SimulatedRouter(
            policy=policy,
            index=index,
            clock=self._clock,
            blocks=blocks,
            namespace=NAMESPACE,
            max_attempts=scenario.max_attempts,
            resubmissions=scenario.resubmissions,
            send=self._send,
            on_end=self._ended,
        )

    def run(self) -> SimulationResult:
        """From the first request to the last end. Raises: PolicyStuckError."""
        for worker in self._workers.values():
            self._router.joined(worker.profile, restarted=False)
        self._clock.after(self._delays.report_interval_ms, self._report_regularly)
        for failure in self._scenario.failures:
            self._plan(failure)
        self._plan_requests(self._client.begin())
        self._clock.run()
        return SimulationResult(
            records=tuple(self._records),
            busy_ms={str(name): worker.busy_ms for name, worker in self._workers.items()},
            marks=tuple(self._marks),
            loads={str(name): load for name, worker in self._workers.items() if (load := worker.load())},
        )

    # ---- requests ----

    def _plan_requests(self, requests: Sequence[ReadyRequest]) -> None:
        self._outstanding += len(requests)
        for ready in requests:
            self._clock.at(ready.start_ms, partial(self._router.arrive, ready))

    def _send(self, lifecycle: RequestLifecycle, worker: WorkerId) -> None:
        self._last_progress_ms = self._clock.now_ms
        if self._on_dispatch is not None:
            self._on_dispatch(worker, lifecycle.ready)
        self._hop(partial(self._deliver, self._workers[worker], lifecycle.ready, lifecycle.attempt))

    def _deliver(self, worker: SimulatedWorker, ready: ReadyRequest, attempt: int) -> None:
        if not worker.alive:
            self._hop(partial(self._router.failed, ready.request_id, attempt))
            return
        request = EngineRequest(
            request_id=ready.request_id,
            prompt=ready.prompt,
            output_tokens=ready.output_tokens,
            namespace=NAMESPACE,
        )
        try:
            worker.submit(request)
        except RequestTooLong as error:
            self._hop(partial(self._router.rejected, ready.request_id, f"too_long: {error}"))

    def _stepped(self, worker: SimulatedWorker, result: StepResult) -> None:
        if result.tokens:
            self._last_progress_ms = self._clock.now_ms
            self._hop(partial(self._router.tokens, result.tokens))
        if self._delays.report_on_change:
            self._report(worker, only_changes=True)
        arrived = [token.request_id for token in result.tokens if token.index == 0]
        if result.deltas or arrived:
            came = partial(self._deltas_came, worker, worker.incarnation, result.deltas, arrived)
            self._clock.after(self._delays.index_ms, came)

    def _deltas_came(
        self, worker: SimulatedWorker, incarnation: int, deltas: Sequence[Delta], arrived: Sequence[str]
    ) -> None:
        if incarnation == worker.incarnation:
            self._router.cached(worker.worker, deltas, arrived)

    def _ended(self, record: RequestRecord, answer: Sequence[int]) -> None:
        self._records.append(record)
        self._outstanding -= 1
        self._plan_requests(self._client.ended(record.request_id, answer, now_ms=self._clock.now_ms))

    # ---- reports and failures ----

    def _report_regularly(self) -> None:
        if not self._outstanding:
            return
        quiet_ms = self._quiet_ms()
        for worker in self._workers.values():
            self._report(worker, only_changes=False)
        self._check_progress()
        self._clock.after(max(self._delays.report_interval_ms, quiet_ms), self._report_regularly)

    def _quiet_ms(self) -> float:
        """How long reports may stay away since they could only repeat themselves: up to the last one that is due before
        something else happens, so that the reports after it count from there. 0: not at all.
        """
        changed = any(w.load() not in (None, self._reported.get(w.worker)) for w in self._workers.values())
        if changed or self._router.waiting:
            self._quiet_reports = 0
            return 0.0
        self._quiet_reports += 1
        if self._quiet_reports < _REPORTS_TO_FORGET or self._clock.next_ms == math.inf:
            return 0.0
        interval_ms = self._delays.report_interval_ms
        intervals = math.ceil((self._clock.next_ms - self._clock.now_ms) / interval_ms) - 1
        return intervals * interval_ms

    def _report(self, worker: SimulatedWorker, *, only_changes: bool) -> None:
        load = worker.load()
        if load is None or (only_changes and load == self._reported.get(worker.worker)):
            return
        self._reported[worker.worker] = load
        report = LoadReport(
            worker=worker.worker,
            reported_ms=self._clock.now_ms,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            used_tokens=load.used_tokens,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
            total_prefill_busy_us=load.total_prefill_busy_us,
        )
        self._hop(partial(self._reported_alive, worker, worker.incarnation, report))

    def _reported_alive(self, worker: SimulatedWorker, incarnation: int, report: LoadReport) -> None:
        if incarnation == worker.incarnation:
            self._router.reported(report)

    def _check_progress(self) -> None:
        silent_ms = self._clock.now_ms - self._last_progress_ms
        if self._router.waiting and not self._router.dispatched and silent_ms > _LONGEST_SILENCE_MS:
            raise PolicyStuckError(
                f"policy {self._scenario.policy!r} has kept {self._router.waiting} requests for "
                f"{silent_ms / 1000:.0f} s although nothing runs"
            )

    def _plan(self, failure: Failure) -> None:
        worker = list(self._workers.values())[failure.worker]
        self._clock.at(failure.killed_ms, partial(self._kill, worker, for_good=failure.back_ms is None))
        if failure.back_ms is not None:
            self._clock.at(failure.back_ms, partial(self._bring_back, worker))

    def _kill(self, worker: SimulatedWorker, *, for_good: bool) -> None:
        if not worker.alive:
            return
        self._mark("killed", worker)
        served = worker.kill()
        self._hop(partial(self._router.lost, worker.worker, served, for_good=for_good))

    def _bring_back(self, worker: SimulatedWorker) -> None:
        if worker.alive:
            return
        self._mark("returned", worker)
        worker.start()
        self._hop(partial(self._router.joined, worker.profile, restarted=True))

    def _mark(self, kind: str, worker: SimulatedWorker) -> None:
        self._marks.append(PoolMark(at_ms=self._clock.now_ms, kind=kind, worker=worker.worker))

    def _hop(self, action: Callable[[], None]) -> None:
        """Between router and engine, either way."""
        self._clock.after(self._delays.hop_ms, action)
