"""What the demo shows: two set-ups of one small pool under the same requests, and a worker that dies in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrouting_core.eviction import DEFAULT_POLICY
from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.demo.engine_launcher import EngineLauncher
from kvrouting_simulator.demo.pool_plan import PoolPlan
from kvrouting_simulator.demo.sglang_engines import VOCABULARY_SIZE, SglangEngines
from kvrouting_simulator.workloads.arrivals import PoissonArrivals
from kvrouting_simulator.workloads.gsp import Gsp


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A routing policy with its parameters, and an eviction policy."""

    policy: str
    eviction: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the report calls it."""
        values = "".join(f" {value}" for value in self.parameters.values())
        return f"{self.policy}{values} + {self.eviction}"

    @property
    def folder_name(self) -> str:
        """For its logs."""
        return f"{self.policy}-{self.eviction}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The engine of a worker is killed and, away_ms later, started again at its ports.

    It dies at the first moment from killed_ms on at which it has requests, busy_within_ms later at the latest.
    """

    worker: int
    killed_ms: float
    away_ms: float
    busy_within_ms: float = 2000.0

    def __post_init__(self) -> None:
        at_least(0, "killed_ms", self.killed_ms)
        positive("away_ms", self.away_ms)
        at_least(0, "busy_within_ms", self.busy_within_ms)


# A cache-aware router that does follow prefixes: GSP shares exactly half of each prompt, and the policy's own threshold
# asks for more than half.
FOLLOWING = Setup(policy="cache_aware", eviction="lru", parameters={"match_threshold": "0.4"})

# GSP at half its size: 64 groups instead of 128 on caches of 98,500 tokens instead of 197,000, so that the shared
# prefixes stand to the caches as in the whole benchmark and a minute is enough to fill them.
HALF_GSP = Gsp(groups=64, prompts_per_group=16, arrivals=PoissonArrivals(rate_per_s=10.0), requests=540)
HALF_CAPACITY_TOKENS = 98_500
RESUBMISSIONS = 1  # of a request whose answer was cut


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoScenario:
    """The pool is the same for all set-ups but for their two policies.

    setups: run on processes. reference: simulated only, under the failure of the first of them.
    launcher: of engines that are not simulated ones of `worker_class`.
    """

    reference: Setup = field(default_factory=lambda: FOLLOWING)
    setups: tuple[Setup, ...] = (
        Setup(policy="cache_aware", eviction="lru"),
        Setup(policy="lbgr", eviction=DEFAULT_POLICY),
    )
    engines: int = 4
    worker_class: str = "L40"
    capacity_tokens: int = HALF_CAPACITY_TOKENS
    page_size: int = 1
    block_tokens: int = 64
    speed: float = 1.0
    gsp: Gsp = field(default_factory=lambda: HALF_GSP)
    fault: Fault = field(default_factory=lambda: Fault(worker=2, killed_ms=25_000, away_ms=3_000))
    launcher: EngineLauncher | None = None
    router_options: Sequence[str] = ()
    seed: int = 1
    goodput_ttft_ms: float = 1000.0

    def __post_init__(self) -> None:
        if not 0 <= self.fault.worker < self.engines:
            raise ValueError(f"worker {self.fault.worker} is to be killed, there are only {self.engines}")

    def plan(self, setup: Setup) -> PoolPlan:
        """The pool of a set-up."""
        return PoolPlan(
            engines=self.engines,
            worker_class=self.worker_class,
            capacity_tokens=self.capacity_tokens,
            page_size=self.page_size,
            block_tokens=self.block_tokens,
            eviction=setup.eviction,
            policy=setup.policy,
            policy_parameters=setup.parameters,
            speed=self.speed,
            launcher=self.launcher,
            router_options=self.router_options,
            seed=self.seed,
        )

    def described(self, setup: Setup) -> dict[str, str | int | float | bool | None]:
        """Settings for the report."""
        return {
            "routing policy": setup.policy,
            "its parameters": ", ".join(f"{name} {value}" for name, value in setup.parameters.items()) or "default",
            "eviction policy": setup.eviction,
            "engines": f"{self.engines} {self.plan(setup).starts.described}",
            "KV cache of each (tokens)": self.capacity_tokens,
            "page / routing block (tokens)": f"{self.page_size} / {self.block_tokens}",
            "speed of the engines' clocks": self.speed,
            "GSP groups x prompts": f"{self.gsp.groups} x {self.gsp.prompts_per_group}, {self.gsp.order} order",
            "prompt lengths (tokens)": ", ".join(map(str, self.gsp.lengths_tokens)),
            "output (tokens)": self.gsp.output_tokens,
            "requests": self.gsp.requests or self.gsp.groups * self.gsp.prompts_per_group,
            "arrivals (requests/s)": getattr(self.gsp.arrivals, "rate_per_s", None),
            "seed": self.seed,
        }


def sglang_scenario(engines: SglangEngines, *, seed: int) -> DemoScenario:
    """What two cores carry: two servers, short prompts, two requests a second.

    Prompts and caches keep the whole benchmark's proportion: what all groups share, 3,584 tokens, fills one cache.
    A server takes most of a minute to start, and the worker that died is to serve again before the half is over.
    """
    return DemoScenario(
        engines=2,
        launcher=engines,
        capacity_tokens=3600,
        block_tokens=16,
        gsp=Gsp(
            groups=12,
            prompts_per_group=16,
            lengths_tokens=(256, 512, 1024),
            vocabulary_size=VOCABULARY_SIZE,
            arrivals=PoissonArrivals(rate_per_s=2.0),
            requests=180,
        ),
        fault=Fault(worker=1, killed_ms=15_000, away_ms=1_000, busy_within_ms=10_000),
        # On a busy machine a request may wait long; none is to be refused for that.
        router_options=("--max-expected-wait-ms", "600000"),
        seed=seed,
    )
