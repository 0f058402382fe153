"""The bound for evictions in a pool: the same placement of requests, and caches that know which come next.

A first run with the policy writes down which worker gets which request. In a second one each request goes where it
went, and each cache evicts what it will need last. An engine serves in the order of arrival, so the order of its
admissions is that of the first run; a scenario where it is not is refused, not approximated.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvrouting_core.eviction import Optimum
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.admission import Admission
from kvrouting_core.routing.choice import Choice
from kvrouting_core.routing.decision import Candidate, Reason
from kvrouting_core.routing.events import RoutingRequest
from kvrouting_core.routing.immediate import ImmediatePolicy
from kvrouting_core.routing.ledger import Worker
from kvrouting_simulator.experiment.scenario import Scenario, WorkerSpec
from kvrouting_simulator.experiment.simulation import NAMESPACE, Simulation, policy_of, run_of
from kvrouting_simulator.experiment.worker import EngineParts
from kvrouting_simulator.report.document import Run
from kvrouting_simulator.workloads import ReadyRequest


class Placed:
    """Chooses the worker that a placement names."""

    def __init__(self, placement: Mapping[str, WorkerId]) -> None:
        self._placement = placement

    def choose(
        self,
        request: RoutingRequest,
        workers: Sequence[Worker],
        *,
        now_ms: float,  # noqa: ARG002 - a Chooser is told the time
    ) -> Choice:
        """Raises: StopIteration if the worker is not there."""
        worker = next(w for w in workers if w.id == self._placement[request.request_id])
        tokens = request.prompt_tokens
        chosen = Candidate(worker.id, 0, 0, tokens, worker.in_flight, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Choice(chosen, Reason.ONLY_CANDIDATE, (chosen,))


class _Diary:
    def __init__(self) -> None:
        self.placement: dict[str, WorkerId] = {}
        self.prompts: dict[WorkerId, list[array[int]]] = {}

    def write(self, worker: WorkerId, ready: ReadyRequest) -> None:
        self.placement[ready.request_id] = worker
        self.prompts.setdefault(worker, []).append(ready.prompt)


def simulate_with_hindsight(scenario: Scenario) -> Run:
    """The figures of the second run.

    Raises: ValueError if a worker dies in the scenario, or if its requests come in another order the second time, as
    they may when turns wait for answers.
    """
    if scenario.failures:
        raise ValueError("the optimum needs workers that live: this scenario has failures")
    diary = _Diary()
    index = PrefixIndex()
    Simulation(scenario, policy=policy_of(scenario, index), index=index, on_dispatch=diary.write).run()

    def optimum(worker: WorkerId, spec: WorkerSpec, rng: random.Random) -> Optimum:  # noqa: ARG001 - no chance in it
        requests = [(NAMESPACE, prompt) for prompt in diary.prompts.get(worker, ())]
        return Optimum(requests, page_size=spec.page_size)

    policy = ImmediatePolicy(scenario.policy, Placed(diary.placement), admission=Admission(scenario.limits))
    replay = Simulation(scenario, policy=policy, index=PrefixIndex(), parts=EngineParts(eviction=optimum))
    return replace(run_of(scenario, replay.run()), name=f"{scenario.policy} + OPT")
