"""Composes the engine's process: sockets, ranks, HTTP application, and its life from start to SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from aiohttp import web

from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.engine_process.endpoints import BoundRange, PortRange, bind_http, bind_ranks
from kvrouting_simulator.engine_process.engine import Engine
from kvrouting_simulator.engine_process.engine_clock import RealClock
from kvrouting_simulator.engine_process.event_faults import EventFaults
from kvrouting_simulator.engine_process.event_publisher import KV_TOPIC, EventPublisher, PublisherLimits
from kvrouting_simulator.engine_process.fault_injection import Fault, FaultInjection
from kvrouting_simulator.engine_process.http_admin import SGLANG_VERSION, AdminHandlers
from kvrouting_simulator.engine_process.http_answers import errors
from kvrouting_simulator.engine_process.http_generate import GenerateHandlers
from kvrouting_simulator.engine_process.http_openai import OpenAIHandlers
from kvrouting_simulator.engine_process.load_reports import LOAD_HIGH_WATER_MARK, LoadPublisher
from kvrouting_simulator.engine_process.metrics import EngineMetrics
from kvrouting_simulator.engine_process.rank import Rank, RankOptions, RankOutlets
from kvrouting_simulator.engine_process.tracing import Tracer, Tracing
from kvrouting_tokenization import Tokenizer, load_tokenizer

_MAX_BODY_BYTES = 256 * 2**20
_UNLIMITED = 0
_PLUG_IN = "rlt"  # its name as SGLang's `--radix-cache-backend`, whichever policy it runs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """All of the process's options. A port range that is None is not opened.

    own_answer_tokens: length of an answer whose request sets no limit. shutdown_s: what running requests get when the
    process is asked to end.
    """

    rank: RankOptions
    worker_class: str
    dp_size: int
    served_model: str
    tokenizer: str
    context_length: int
    own_answer_tokens: int
    speed: float
    cache_report: bool
    http: PortRange
    kv_events: PortRange | None
    replay: PortRange | None
    load: PortRange | None
    state: PortRange | None
    limits: PublisherLimits
    faults: Sequence[Fault]
    allow_misbehave: bool
    shutdown_s: float

    def __post_init__(self) -> None:
        for name in ("dp_size", "context_length", "own_answer_tokens"):
            at_least(1, name, getattr(self, name))
        positive("speed", self.speed)
        at_least(0, "shutdown_s", self.shutdown_s)
        if not self.served_model.strip():
            raise ValueError(f"served_model is {self.served_model!r}: give the name under which the model is asked for")
        if self.replay is not None and self.kv_events is None:
            raise ValueError("replay needs KV events: give --kv-events, or leave replay out with --no-replay")
        self._check_overlap()

    def _check_overlap(self) -> None:
        taken: dict[int, str] = {}
        for ports in (self.http, self.kv_events, self.replay, self.load, self.state):
            if ports is None or not ports.base:
                continue
            width = 1 if ports is self.http else self.dp_size
            for port in range(ports.base, ports.base + width):
                if port in taken:
                    raise ValueError(f"port {port} is claimed by {taken[port]} and by {ports.option}: move one")
                taken[port] = ports.option


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ports:
    kv_events: BoundRange | None
    replay: BoundRange | None
    load: BoundRange | None
    state: BoundRange | None


class EngineServer:
    """One engine process."""

    def __init__(self, options: ServerOptions, *, tracer: Tracer | None = None) -> None:
        """tracer: gets every request that was served; None: nothing is traced."""
        self._options = options
        self._tracer = tracer
        self._clock = RealClock(speed=options.speed, monotonic_s=time.monotonic)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bound: list[BoundRange] = []

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. Raises: ListenError; TokenizerNotFoundError; ValueError."""
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._options.tokenizer)
            with bind_http(self._options.http) as http:
                await self._run(tokenizer, http)
        finally:
            self._context.destroy(linger=0)
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    async def _run(self, tokenizer: Tokenizer, http: socket.socket) -> None:
        options, ports = self._options, self._bind()
        metrics = EngineMetrics(served_model=options.served_model)
        fault_injection = FaultInjection()
        ranks = [self._rank(number, ports, metrics, fault_injection) for number in range(options.dp_size)]
        fault_injection.take_over(ranks)
        metrics.watch(ranks)
        engine = Engine(
            ranks=ranks,
            tokenizer=tokenizer,
            served_model=options.served_model,
            context_length=options.context_length,
            own_answer_tokens=options.own_answer_tokens,
        )
        http_port = int(http.getsockname()[1])
        admin = AdminHandlers(engine, metrics=metrics, info=self._info(http_port, ports))
        runner = web.AppRunner(
            self._application(engine, admin, fault_injection),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=options.shutdown_s,
        )
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        await runner.setup()
        await web.SockSite(runner, http).start()
        for fault in options.faults:
            fault_injection.order(fault)
        _announce(http_port, ports)
        await self._serve(ranks, runner, admin, stop)

    async def _serve(
        self, ranks: Sequence[Rank], runner: web.AppRunner, admin: AdminHandlers, stop: asyncio.Event
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(rank.run()) for rank in ranks]
            await stop.wait()
            admin.leaving = True
            _log.info("ending: running requests get %s s", self._options.shutdown_s)
            await runner.cleanup()
            for task in running:
                task.cancel()

    def _bind(self) -> _Ports:
        def bind(kind: int, ports: PortRange | None, high_water_mark: int) -> BoundRange | None:
            if ports is None:
                return None
            ranks = self._options.dp_size
            bound = bind_ranks(self._context, kind, ports, ranks=ranks, high_water_mark=high_water_mark)
            self._bound.append(bound)  # kept, so that what is bound is closed even if the next family is not
            return bound

        options = self._options
        return _Ports(
            kv_events=bind(zmq.PUB, options.kv_events, options.limits.high_water_mark),
            replay=bind(zmq.ROUTER, options.replay, _UNLIMITED),
            load=bind(zmq.PUB, options.load, LOAD_HIGH_WATER_MARK),
            state=bind(zmq.ROUTER, options.state, _UNLIMITED),
        )

    def _rank(self, number: int, ports: _Ports, metrics: EngineMetrics, fault_injection: FaultInjection) -> Rank:
        faults = EventFaults(random.Random(self._options.rank.seed + number))
        events = None
        if ports.kv_events is not None:
            events = EventPublisher(
                publish=ports.kv_events.sockets[number],
                replay=None if ports.replay is None else ports.replay.sockets[number],
                limits=self._options.limits,
                faults=faults,
            )
        load = None
        if ports.load is not None:
            load = LoadPublisher(ports.load.sockets[number], monotonic_s=time.monotonic)
        return Rank(
            number=number,
            options=self._options.rank,
            outlets=RankOutlets(
                events=events,
                events_port=None if ports.kv_events is None else ports.kv_events.base + number,
                event_faults=faults,
                load=load,
                state=None if ports.state is None else ports.state.sockets[number],
            ),
            clock=self._clock,
            monotonic_s=time.monotonic,
            on_tokens=fault_injection.produced,
            on_step=metrics.late,
            on_end=metrics.ended,
        )

    def _application(self, engine: Engine, admin: AdminHandlers, fault_injection: FaultInjection) -> web.Application:
        traced = [] if self._tracer is None else [Tracing(self._tracer).middleware]
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[*traced, errors, fault_injection.middleware]
        )
        app.add_routes(admin.routes())
        app.add_routes(OpenAIHandlers(engine, cache_report=self._options.cache_report).routes())
        app.add_routes(GenerateHandlers(engine).routes())
        if self._options.allow_misbehave:
            app.add_routes([web.post("/misbehave", fault_injection.handle)])
        return app

    def _info(self, http_port: int, ports: _Ports) -> Mapping[str, Any]:
        options, scheduler = self._options, self._options.rank.scheduler
        return {
            "model_path": options.served_model,
            "served_model_name": options.served_model,
            "tokenizer_path": options.tokenizer,
            "host": options.http.host,
            "port": http_port,
            "dp_size": options.dp_size,
            "tp_size": 1,
            "context_length": options.context_length,
            "page_size": options.rank.page_size,
            "max_total_tokens": options.rank.capacity_tokens,
            "max_total_num_tokens": options.rank.capacity_tokens,
            "max_req_input_len": options.context_length - 1,
            "max_running_requests": scheduler.max_running_requests,
            "chunked_prefill_size": scheduler.chunked_prefill_tokens,
            "max_prefill_tokens": scheduler.max_prefill_tokens,
            "prefill_decode_interval": scheduler.prefill_decode_interval,
            "enable_mixed_chunk": scheduler.mixed_chunk,
            "schedule_policy": "fcfs",
            "radix_cache_backend": None if options.rank.eviction == "lru" else _PLUG_IN,
            "radix_eviction_policy": "lru",
            "disable_radix_cache": False,
            "enable_cache_report": options.cache_report,
            "enable_metrics": True,
            "load_publish_endpoint": _endpoint(ports.load),
            "kv_events": _described(options, ports),
            "simulated_worker_class": options.worker_class,
            "simulated_speed": options.speed,
            "version": SGLANG_VERSION,
            "frontend": "python",
        }


def _endpoint(bound: BoundRange | None) -> str | None:
    return None if bound is None else f"tcp://{bound.host}:{bound.base}"


def _described(options: ServerOptions, ports: _Ports) -> Mapping[str, Any] | None:
    """The publisher as SGLang's /server_info describes it; absent families are absent keys."""
    if ports.kv_events is None:
        return None
    described: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": ports.kv_events.host,
        "endpoint_port_base": ports.kv_events.base,
        "topic": KV_TOPIC.decode(),
        "block_size": options.rank.page_size,
        "dp_size": options.dp_size,
    }
    if ports.load is not None:
        described |= {"load_endpoint_port_base": ports.load.base, "load_topic": "load"}
    if ports.replay is not None:
        described["replay_endpoint_port_base"] = ports.replay.base
    return described


def _announce(http_port: int, ports: _Ports) -> None:
    """The line by which a parent learns the ports: bases, null where there is none."""
    families = {"kv_events": ports.kv_events, "replay": ports.replay, "load": ports.load, "state": ports.state}
    bases = {name: None if bound is None else bound.base for name, bound in families.items()}
    print(json.dumps({"event": "listening", "http": http_port, **bases}), file=sys.stderr, flush=True)
