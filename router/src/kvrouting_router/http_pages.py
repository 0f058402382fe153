"""The pages beside the generation surfaces: models, workers, decisions, metrics, health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrouting_core.routing.policy import WorkerBelief
from kvrouting_router.client_call import ApiKeys
from kvrouting_router.decision_log import DecisionLog
from kvrouting_router.errors import InvalidRequestError, UpstreamError
from kvrouting_router.http_headers import to_client
from kvrouting_router.metrics import RouterMetrics, gauge, labelled_gauge
from kvrouting_router.pool import Pool
from kvrouting_router.upstream import Upstream
from kvrouting_router.worker_registry import Mirror, Worker, WorkerState

_MODELS_LIMIT_S = 5.0
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Readiness:
    """What keeps the router from serving, beside the workers; empty: nothing."""

    starting: str = "starting"
    stopping: str = ""


def worker_view(pool: Pool, worker: Worker, belief: WorkerBelief | None, *, now_s: float) -> dict[str, object]:
    """What the router believes of one worker, as plain values."""
    facts, vitals = worker.facts, worker.vitals
    view: dict[str, object] = {
        "worker": facts.worker,
        "state": worker.state.value,
        "reason": worker.reason,
        "since_s": round(now_s - worker.since_s, 3),
        "epoch": facts.epoch,
        "endpoint": facts.endpoint,
        "dp_rank": facts.dp_rank,
        "dp_size": facts.dp_size,
        "class": facts.worker_class,
        "engine_version": facts.engine_version,
        "sidecar": facts.has_sidecar,
        "mirror": worker.mirror.value,
        "blocks": _blocks(pool, worker),
        "digest": f"{pool.index.digest(facts.worker):016x}",
        "unique_blocks": pool.index.unique_blocks(facts.worker),
        "cached_tokens": vitals.cached_tokens if vitals else None,
        "capacity_tokens": facts.capacity_tokens,
        "page_size_tokens": facts.page_size_tokens,
        "in_flight": pool.dispatcher.in_flight(facts.worker),
        "sync_lag_s": round(now_s - worker.last_seen_s, 3),
        "resyncs": worker.resyncs,
        "tokenizer_mismatch": worker.facts.tokenizer_mismatch,
        "breaker_open": worker.breaker.is_open,
        "scheduler": facts.scheduler,
        "agreement": worker.agreement.as_dict(),
        "prompt_tokens": worker.prompt_tokens,
        "matched_tokens": worker.matched_tokens,
        "reported_cached_tokens": worker.reported_cached_tokens,
        "beliefs": belief,
    }
    view.update(_vitals_view(worker))
    return view


def _blocks(pool: Pool, worker: Worker) -> int:
    return pool.index.count(worker.facts.worker) or pool.guessed.count(worker.facts.worker)


def _vitals_view(worker: Worker) -> dict[str, object]:
    vitals = worker.vitals
    if vitals is None:
        return {"load": None, "eviction_policy": None, "events_flowing": None, "end_to_end_verified": None}
    return {
        "load": vitals.load,
        "eviction_policy": {"name": vitals.eviction_policy, "live": vitals.eviction_proven_live},
        "events_flowing": vitals.events_flowing,
        "end_to_end_verified": vitals.end_to_end_verified,
    }


class Pages:
    """Handlers by path. None of them waits for tokenization or for the policy."""

    def __init__(
        self,
        *,
        pool: Pool,
        upstream: Upstream,
        decisions: DecisionLog,
        metrics: RouterMetrics,
        keys: ApiKeys,
        model: str,
        readiness: Readiness,
        now_s: Callable[[], float],
        started_unix_s: int,
    ) -> None:
        self._pool = pool
        self._upstream = upstream
        self._decisions = decisions
        self._metrics = metrics
        self._keys = keys
        self._model = model
        self._readiness = readiness
        self._now_s = now_s
        self._started_unix_s = started_unix_s

    def handlers(self) -> dict[str, Handler]:
        """Path → handler, all for GET."""
        return {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics_page,
            "/workers": self._workers,
            "/debug/decisions": self._last_decisions,
            "/v1/models": self._models,
        }

    def why_not_serving(self) -> str:
        """Why no request can be taken at all; empty: it can."""
        return self._readiness.stopping or self._readiness.starting

    async def _healthz(self, _request: web.BaseRequest) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.BaseRequest) -> web.Response:
        reason = self.why_not_serving() or self._why_no_worker()
        if reason:
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    def _why_no_worker(self) -> str:
        workers = list(self._pool.registry)
        if any(w.state is WorkerState.LIVE for w in workers):
            return ""
        if not workers:
            return "no worker is known"
        states = ", ".join(f"{w.facts.worker} is {w.state.value}: {w.reason}" for w in workers[:8])
        return f"none of {len(workers)} workers is live ({states})"

    async def _metrics_page(self, _request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": _PROMETHEUS})

    async def _workers(self, request: web.BaseRequest) -> web.Response:
        self._keys.check(request.headers.get("Authorization"))
        beliefs = {b.worker: b for b in self._pool.dispatcher.beliefs()}
        now_s = self._now_s()
        page = {
            "policy": self._pool.dispatcher.policy_name,
            "model": self._model,
            "waiting": self._pool.dispatcher.waiting,
            "in_flight": self._pool.dispatcher.dispatched,
            "index_blocks": len(self._pool.index),
            "workers": [
                worker_view(self._pool, w, beliefs.get(w.facts.worker), now_s=now_s) for w in self._pool.registry
            ],
        }
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def _last_decisions(self, request: web.BaseRequest) -> web.Response:
        self._keys.check(request.headers.get("Authorization"))
        wanted = request.rel_url.query.get("last", "100")
        if not wanted.isdecimal() or int(wanted) < 1:
            raise InvalidRequestError(f"last must be a positive integer, got {wanted!r}")
        return web.Response(body=self._decisions.page(int(wanted)), content_type="application/json")

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """A live engine's own list, which knows adapters and lengths; ours while there is none."""
        self._keys.check(request.headers.get("Authorization"))
        for worker in self._pool.registry:
            if worker.state is not WorkerState.LIVE:
                continue
            try:
                status, headers, body = await self._upstream.get(
                    worker.facts.endpoint, "/v1/models", limit_s=_MODELS_LIMIT_S
                )
            except (UpstreamError, TimeoutError):
                continue
            if status == 200:
                return web.Response(body=body, headers=to_client(headers))
        own = {"id": self._model, "object": "model", "created": self._started_unix_s, "owned_by": "kvrouting"}
        page = {"object": "list", "data": [own]}
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")


class PoolCollector(Collector):
    """Metrics that are looked up: states, views, in-flight counts."""

    def __init__(self, pool: Pool, *, now_s: Callable[[], float]) -> None:
        self._pool = pool
        self._now_s = now_s

    def collect(self) -> Iterable[Metric]:
        """All values of this moment."""
        pool = self._pool
        yield gauge("waiting_requests", "Requests in the router's own queue", pool.dispatcher.waiting)
        yield gauge("index_blocks", "Distinct blocks in the exact index", len(pool.index))
        yield gauge("guessed_blocks", "Distinct blocks in the guessed index", len(pool.guessed))
        yield gauge("known_workers", "Workers that are not gone", len(pool.registry))
        yield self._states()
        yield from self._per_worker()

    def _states(self) -> Metric:
        family = labelled_gauge("worker_state", "1 for the state the worker is in", ["worker", "state"])
        for worker in self._pool.registry:
            for state in WorkerState:
                family.add_metric([worker.facts.worker, state.value], float(worker.state is state))
        return family

    def _per_worker(self) -> Iterable[Metric]:
        now_s = self._now_s()
        values: dict[str, tuple[str, Callable[[Worker], float]]] = {
            "in_flight_requests": (
                "Requests of this router on the worker",
                lambda w: self._pool.dispatcher.in_flight(w.facts.worker),
            ),
            "worker_blocks": ("Blocks in the worker's view", lambda w: _blocks(self._pool, w)),
            "worker_capacity_tokens": ("KV cache of the worker", lambda w: w.facts.capacity_tokens),
            "worker_cached_tokens": (
                "Tokens that the engine holds, as its sidecar says",
                lambda w: w.vitals.cached_tokens if w.vitals else 0,
            ),
            "sync_lag_seconds": ("Since the worker was last heard", lambda w: now_s - w.last_seen_s),
            "approximate_worker": (
                "1 if the view is guessed from own decisions",
                lambda w: float(w.mirror is Mirror.APPROXIMATE),
            ),
            "cache_mismatch": (
                "1 if predicted and reported cached tokens have disagreed for long",
                lambda w: float(w.agreement.is_mismatched),
            ),
            "tokenizer_mismatch": (
                "1 if the worker's tokenizer is another one",
                lambda w: float(bool(w.facts.tokenizer_mismatch)),
            ),
            "eviction_policy_live": (
                "1 if the engine proves its eviction policy at work",
                lambda w: float(w.vitals.eviction_proven_live) if w.vitals else 0.0,
            ),
        }
        for name, (text, value) in values.items():
            family = labelled_gauge(name, text, ["worker"])
            for worker in self._pool.registry:
                family.add_metric([worker.facts.worker], value(worker))
            yield family
