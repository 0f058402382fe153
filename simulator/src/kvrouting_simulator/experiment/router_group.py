"""Several routers before one pool, which know nothing of one another: what an engine says reaches all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_core.deltas import Delta
from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.events import LoadReport, WorkerProfile
from kvrouting_simulator.engine_model import TokenProduced
from kvrouting_simulator.experiment.router import SimulatedRouter
from kvrouting_simulator.workloads import ReadyRequest


class RouterGroup:
    """As one router. Requests go to each in turn, and stay with theirs."""

    def __init__(self, routers: Sequence[SimulatedRouter]) -> None:
        self._routers = routers
        self._of: dict[str, SimulatedRouter] = {}
        self._turn = 0

    @property
    def waiting(self) -> int:
        """Requests that the policies keep."""
        return sum(router.waiting for router in self._routers)

    @property
    def dispatched(self) -> int:
        """Requests that are with a worker."""
        return sum(router.dispatched for router in self._routers)

    def arrive(self, ready: ReadyRequest) -> None:
        """A client's request is at the next router."""
        router = self._of[ready.request_id] = self._routers[self._turn % len(self._routers)]
        self._turn += 1
        router.arrive(ready)

    def tokens(self, produced: Sequence[TokenProduced]) -> None:
        """Tokens came back from a worker, each to the router that asked."""
        for router in self._routers:
            router.tokens([token for token in produced if self._of[token.request_id] is router])

    def failed(self, request_id: str, attempt: int) -> None:
        """The worker of an attempt is not there any more."""
        self._of[request_id].failed(request_id, attempt)

    def rejected(self, request_id: str, error: str) -> None:
        """The worker refuses the request for its own fault."""
        self._of[request_id].rejected(request_id, error)

    def joined(self, profile: WorkerProfile, *, restarted: bool) -> None:
        """A worker is ready."""
        for router in self._routers:
            router.joined(profile, restarted=restarted)

    def lost(self, worker: WorkerId, served: Sequence[str], *, for_good: bool) -> None:
        """A worker's engine died."""
        for router in self._routers:
            router.lost(worker, [name for name in served if self._of[name] is router], for_good=for_good)

    def reported(self, report: LoadReport) -> None:
        """A load report came in."""
        for router in self._routers:
            router.reported(report)

    def cached(self, worker: WorkerId, deltas: Sequence[Delta], arrived: Sequence[str]) -> None:
        """Deltas of a worker's cache came in."""
        for router in self._routers:
            router.cached(worker, deltas, [name for name in arrived if self._of[name] is router])
