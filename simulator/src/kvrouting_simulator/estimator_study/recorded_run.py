"""A simulation with every decision kept, and the same simulation up to a request that goes somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.decision import Action, Decision, Dispatch
from kvrouting_core.routing.events import Event
from kvrouting_core.routing.immediate import ImmediatePolicy
from kvrouting_core.routing.policy import Policy, WorkerBelief
from kvrouting_simulator.experiment.scenario import Scenario
from kvrouting_simulator.experiment.simulation import Simulation, policy_of
from kvrouting_simulator.report import RequestRecord
from kvrouting_simulator.study.hindsight import Placed
from kvrouting_simulator.workloads import Client, ReadyRequest


class Recorder:
    """A policy that acts as another one does, and keeps its decisions."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.decisions: dict[str, Decision] = {}

    @property
    def name(self) -> str:
        """Of the policy."""
        return self._policy.name

    @property
    def waiting(self) -> int:
        """Requests in the queue of the policy."""
        return self._policy.waiting

    def in_flight(self, worker: WorkerId) -> int:
        """What the policy has dispatched to the worker."""
        return self._policy.in_flight(worker)

    def handle(self, event: Event, *, now_ms: float) -> Sequence[Action]:
        """What the policy answers."""
        actions = self._policy.handle(event, now_ms=now_ms)
        for action in actions:
            if isinstance(action, Dispatch):
                self.decisions[action.request_id] = action.decision
        return actions

    def beliefs(self, *, now_ms: float) -> Sequence[WorkerBelief]:
        """What the policy believes."""
        return self._policy.beliefs(now_ms=now_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """By request: what was decided, and what came of it. requests: all that were sent to a worker, in that order, each
    with the time of its decision for its start: of a request that waits in the router the prediction is made anew."""

    scenario: Scenario
    requests: Sequence[ReadyRequest]
    decisions: Mapping[str, Decision]
    records: Mapping[str, RequestRecord]

    @property
    def served(self) -> Sequence[str]:
        """Requests that completed, by arrival."""
        done = (r for r in self.records.values() if r.completed and r.request_id in self.decisions)
        return [r.request_id for r in sorted(done, key=lambda r: (r.arrival_ms, r.request_id))]

    def happened_ms(self, request_id: str) -> float:
        """What was predicted: from the decision to the end."""
        return self.records[request_id].end_ms - self.decisions[request_id].decided_ms


def recorded(scenario: Scenario) -> RecordedRun:
    """Runs the scenario.

    Raises: ValueError for a scenario with failures, and for an unknown policy or parameter.
    """
    if scenario.failures:
        raise ValueError("predictions are judged where workers live: this scenario has failures")
    index = PrefixIndex()
    recorder = Recorder(policy_of(scenario, index))
    result = Simulation(scenario, policy=recorder, index=index).run()
    arrivals = {each.request_id: each for each in scenario.workload.client(seed=scenario.seed).begin()}
    return RecordedRun(
        scenario=scenario,
        requests=[replace(arrivals[name], start_ms=d.decided_ms) for name, d in recorder.decisions.items()],
        decisions=recorder.decisions,
        records={record.request_id: record for record in result.records},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _UpTo:
    """The part of a workload that was sent no later than a request."""

    requests: Sequence[ReadyRequest]

    def client(self, *, seed: int) -> Client:  # noqa: ARG002 - nothing is left to chance
        """Who sends it."""
        return _Sender(self.requests)


class _Sender:
    def __init__(self, requests: Sequence[ReadyRequest]) -> None:
        self._requests = requests

    def begin(self) -> Sequence[ReadyRequest]:
        return self._requests

    def ended(self, request_id: str, answer: Sequence[int], *, now_ms: float) -> Sequence[ReadyRequest]:  # noqa: ARG002
        return ()


def undisturbed_ms(run: RecordedRun, request_id: str, worker: WorkerId) -> float:
    """How long the request would have taken on that worker, from its decision, had no request been sent after it: the
    run once more, so far, with each request sent when it was.

    What was sent later is left out: it went where it went because of this request's worker, and so would speak for it.
    """
    placement = {each: decision.worker for each, decision in run.decisions.items()}
    placement[request_id] = worker
    place = next(n for n, each in enumerate(run.requests) if each.request_id == request_id)
    scenario = replace(run.scenario, workload=_UpTo(requests=run.requests[: place + 1]))
    policy = ImmediatePolicy(scenario.policy, Placed(placement), admission=Admission(scenario.limits))
    replayed = Simulation(scenario, policy=policy, index=PrefixIndex()).run()
    return next(r.latency_ms for r in replayed.records if r.request_id == request_id)
