"""What is judged: both forms of lbgr on a pool of four, parts switched, workers as told or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvrouting_simulator.experiment.scenario import Delays, Scenario, WorkerSpec
from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.gsp import Gsp

WORKERS = 4
PAGE_TOKENS = 64
RATE_PER_S = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """name: for the table. late: requests wait in the router, else each is answered at once. parameters: of lbgr,
    besides. workers: None: four L40 as they say."""

    name: str
    late: bool = False
    parameters: Mapping[str, object] = field(default_factory=dict)
    workers: Sequence[WorkerSpec] | None = None
    rate_per_s: float = RATE_PER_S

    def scenario(self, *, requests: int, seed: int) -> Scenario:
        """GSP in random order."""
        return Scenario(
            name=self.name,
            workload=Gsp(arrivals=PoissonArrivals(rate_per_s=self.rate_per_s), requests=requests),
            workers=self.workers or [_L40] * WORKERS,
            policy="lbgr",
            policy_parameters={"binding": "late" if self.late else "immediate", **self.parameters},
            delays=Delays(report_on_change=True),
            seed=seed,
        )


_L40 = WorkerSpec(eviction="rlt", page_size=PAGE_TOKENS)
_SLOW = replace(_L40, slow_factor=3.0)
_MISTAKEN = replace(_L40, told_class="L40S")

CASES = (
    Case(name="late binding", late=True),
    Case(name="late binding, 5 requests/s", late=True, rate_per_s=5.0),
    Case(name="late binding, taken for L40S", late=True, workers=[_MISTAKEN] * WORKERS),
    Case(name="late binding, one worker at a third", late=True, workers=[_SLOW, _L40, _L40, _L40], rate_per_s=8.0),
    Case(name="immediate", late=False),
    Case(name="5 requests/s", rate_per_s=5.0),
    Case(name="with residual", parameters={"residual": True}),
    Case(name="decayed queue, as the paper", parameters={"queue": "decayed"}),
    Case(name="no price", parameters={"price": 0}),
    Case(name="taken for L40S, 1.5 times as fast", workers=[_MISTAKEN] * WORKERS),
    Case(
        name="the same (told L40S), speeds not learned",
        parameters={"learned_speed": False},
        workers=[_MISTAKEN] * WORKERS,
    ),
    Case(name="one worker at a third", workers=[_SLOW, _L40, _L40, _L40], rate_per_s=8.0),
    Case(
        name="the same (one at a third), speeds not learned",
        parameters={"learned_speed": False},
        workers=[_SLOW, _L40, _L40, _L40],
        rate_per_s=8.0,
    ),
)
