"""The composition root: everything is made here, and started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from kvrouting_core.blocks import ChainHasher, routing_block_size
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.routing.events import Tick
from kvrouting_core.routing.policy import AdmissionLimits, CacheView, Policy
from kvrouting_core.routing.registry import build_policy
from kvrouting_core.service_time import StepTimes
from kvrouting_router.class_files import known_classes
from kvrouting_router.client_call import ApiKeys, CallReader
from kvrouting_router.decision_log import DecisionFile, DecisionLog
from kvrouting_router.dispatcher import Dispatcher
from kvrouting_router.engine_probe import EngineProbes, StaticWorker
from kvrouting_router.grpc_pick import PickService
from kvrouting_router.grpc_server import GrpcServer, TlsFiles
from kvrouting_router.grpc_sync import PoolTerms, WorkerSyncService
from kvrouting_router.guessed_cache import GuessedCache, PoolCache
from kvrouting_router.http_pages import Pages, PoolCollector, Readiness
from kvrouting_router.http_protocol import ClientServer
from kvrouting_router.http_server import HttpSurface
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.options import RouterOptions
from kvrouting_router.pool import Pool
from kvrouting_router.prompt_reading import PromptReader, PromptTokenizer
from kvrouting_router.relay import Relay
from kvrouting_router.tracing import Tracer
from kvrouting_router.upstream import Upstream
from kvrouting_router.worker_registry import Transition, WorkerRegistry, WorkerState

_logger = logging.getLogger(__name__)

_TICK_S = 0.25
# What a tick may clear of views that were dropped: a millisecond or two.
_SWEPT_A_TICK = 16384

PolicyFactory = Callable[[CacheView], Policy]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """What one router process is told. Ports: 0 for a free one."""

    pool: str
    model: str
    block_size_tokens: int
    hash_key: bytes
    http_host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 9090
    tls: TlsFiles | None = None
    join_token: str | None = None
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    engine_key: str | None = None
    policy: str = "lbgr"
    policy_parameters: Mapping[str, object] = field(default_factory=dict)
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    seed: int | None = None
    static_workers: Sequence[StaticWorker] = ()
    class_times: Mapping[str, StepTimes] = field(default_factory=dict)
    health_path: str = "/health"
    decisions_file: Path | None = None
    log_decisions: bool = True
    tokenizer_threads: int = 2
    options: RouterOptions = field(default_factory=RouterOptions)

    def __post_init__(self) -> None:
        routing_block_size(self.block_size_tokens)
        if not self.pool or not self.model:
            raise ValueError(f"pool and model must be named, got pool {self.pool!r} and model {self.model!r}")
        if self.tokenizer_threads < 1:
            raise ValueError(f"tokenizer_threads must be at least 1, got {self.tokenizer_threads}")

    def configured_policy(self, cache: CacheView) -> Policy:
        """The policy by its name. Raises: ValueError naming what is wrong and what is known."""
        return build_policy(
            self.policy,
            self.policy_parameters,
            cache=cache,
            block_size_tokens=self.block_size_tokens,
            rng=random.Random(self.seed),
            limits=self.limits,
        )


class Router:
    """One router process's worth of objects, on the running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        tokenizer: PromptTokenizer | None,
        tracer: Tracer,
        policy: PolicyFactory | None = None,
    ) -> None:
        self._config = config
        self._tracer = tracer
        self._now_s = asyncio.get_running_loop().time
        self._readiness = Readiness()
        self.metrics = RouterMetrics()
        self._executor = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self._hasher = ChainHasher(config.hash_key, config.block_size_tokens)
        self._reader = PromptReader(hasher=self._hasher, executor=self._executor, tokenizer=tokenizer)
        self._decisions = DecisionLog(kept=config.options.routing.kept_decisions, log_each=config.log_decisions)
        self._decision_file = DecisionFile(config.decisions_file) if config.decisions_file else None
        self._upstream = Upstream(config.options.times, engine_key=config.engine_key)
        self.pool = self._make_pool(policy or config.configured_policy)
        self._relay = self._make_relay()
        self._pages = self._make_pages()
        self._http = self._make_http()
        self._grpc = self._make_grpc()
        self._probes = EngineProbes(
            pool=self.pool,
            upstream=self._upstream,
            static_workers=config.static_workers,
            interval_s=config.options.sync.heartbeat_interval_s,
            health_path=config.health_path,
            now_s=self._now_s,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _make_pool(self, policy: PolicyFactory) -> Pool:
        config, index, guessed = self._config, PrefixIndex(), GuessedCache()
        dispatcher = Dispatcher(policy(PoolCache(exact=index, guessed=guessed)), now_ms=lambda: self._now_s() * 1000)
        registry = WorkerRegistry(
            sync=config.options.sync,
            breaker=config.options.breaker,
            block_size_tokens=config.block_size_tokens,
        )
        pool = Pool(
            dispatcher=dispatcher,
            registry=registry,
            index=index,
            guessed=guessed,
            metrics=self.metrics,
            now_s=self._now_s,
            block_size_tokens=config.block_size_tokens,
            class_times=config.class_times,
        )
        pool.on_transition(_log_transition)
        self.metrics.watch(PoolCollector(pool, now_s=self._now_s))
        return pool

    def _make_relay(self) -> Relay:
        config = self._config
        calls = CallReader(
            model=config.model,
            keys=config.api_keys,
            times=config.options.times,
            sizes=config.options.sizes,
            executor=self._executor,
        )
        return Relay(
            pool=self.pool,
            reader=self._reader,
            calls=calls,
            upstream=self._upstream,
            decisions=self._decisions,
            decision_file=self._decision_file,
            metrics=self.metrics,
            tracer=self._tracer,
            options=config.options,
        )

    def _make_pages(self) -> Pages:
        return Pages(
            pool=self.pool,
            upstream=self._upstream,
            decisions=self._decisions,
            metrics=self.metrics,
            keys=self._config.api_keys,
            model=self._config.model,
            readiness=self._readiness,
            now_s=self._now_s,
            started_unix_s=int(time.time()),
        )

    def _make_http(self) -> web.ServerRunner:
        options = self._config.options
        server = ClientServer(
            HttpSurface(relay=self._relay, pages=self._pages, metrics=self.metrics),
            headers_limit_s=options.times.client_read_s,
            max_header_bytes=options.sizes.max_header_bytes,
        )
        return web.ServerRunner(server, shutdown_timeout=options.times.shutdown_s)

    def _make_grpc(self) -> GrpcServer:
        config = self._config
        terms = PoolTerms(
            pool=config.pool,
            model=config.model,
            block_size_tokens=config.block_size_tokens,
            hash_key_id=self._hasher.key_id,
            tokenizer_fingerprint=self._reader.fingerprint,
            gpu_classes=known_classes(config.class_times),
            join_token=config.join_token,
        )
        sync = WorkerSyncService(
            pool=self.pool, terms=terms, options=config.options.sync, metrics=self.metrics, now_s=self._now_s
        )
        pick = PickService(
            pool=self.pool,
            reader=self._reader,
            relay=self._relay,
            decisions=self._decisions,
            keys=config.api_keys,
            model=config.model,
            times=config.options.times,
            prefix_credit_s=config.options.routing.prefix_credit_s,
            max_sequences=config.options.sizes.max_sequences,
            why_not_serving=self._pages.why_not_serving,
        )
        return GrpcServer(sync=sync, pick=pick, host=config.grpc_host, port=config.grpc_port, tls=config.tls)

    @property
    def http_port(self) -> int:
        """The port that is listened on."""
        port: int = self._http.addresses[0][1]
        return port

    @property
    def grpc_port(self) -> int:
        """The port that is listened on."""
        return self._grpc.port

    async def start(self) -> None:
        """Listens and serves from now on. Raises: OSError, RuntimeError naming a port that is taken."""
        await self._http.setup()
        await web.TCPSite(self._http, self._config.http_host, self._config.http_port, backlog=1024).start()
        await self._grpc.start()
        self._tasks = [asyncio.create_task(self._probes.run()), asyncio.create_task(self._tick())]
        if self._decision_file is not None:
            self._tasks.append(asyncio.create_task(self._write_decisions(self._decision_file)))
        self._readiness.starting = ""
        _logger.info("listening", extra={"fields": {"http": self.http_port, "grpc": self.grpc_port}})

    async def failed(self) -> None:
        """Returns when one of the router's own tasks has ended, which none should; raises its error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Takes nothing new, lets running requests end within their limit, then closes everything."""
        self._readiness.stopping = "the router is shutting down"
        await self._grpc.announce_stop()
        self.pool.dispatcher.stop()
        await self._http.cleanup()
        await self._grpc.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._upstream.close()
        loop = asyncio.get_running_loop()
        if self._decision_file is not None:
            await loop.run_in_executor(self._executor, self._decision_file.close)
        await loop.run_in_executor(self._executor, self._tracer.close)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _tick(self) -> None:
        """Time alone changes states and makes room; idle moments clear what is left of dropped views."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.pool.refresh()
            if self.pool.dispatcher.waiting:
                self.pool.dispatcher.tell(Tick())
            self.pool.index.sweep(_SWEPT_A_TICK)

    async def _write_decisions(self, file: DecisionFile) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            await loop.run_in_executor(self._executor, file.write, file.take())


def _log_transition(change: Transition) -> None:
    level = logging.INFO if change.new in (WorkerState.LIVE, WorkerState.SYNCING) else logging.WARNING
    _logger.log(
        level,
        "worker state",
        extra={
            "fields": {
                "worker": change.worker.facts.worker,
                "from": change.old.value,
                "to": change.new.value,
                "reason": change.reason,
            }
        },
    )
