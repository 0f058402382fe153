"""The paths by which an engine is watched: health, server_info, metrics, loads, flush, steps."""

from __future__ import annotations

import asyncio
import datetime as dt
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from kvrouting_simulator.engine_process.engine import AnswerEnd, Engine, Job
from kvrouting_simulator.engine_process.generation import Prompt
from kvrouting_simulator.engine_process.http_answers import collected, json_reply
from kvrouting_simulator.engine_process.http_bodies import BadRequestError
from kvrouting_simulator.engine_process.metrics import EngineMetrics
from kvrouting_simulator.engine_process.rank import Rank

SGLANG_VERSION = "0.5.23"
"""The version whose surface this is."""

_HEALTH_TIMEOUT_S = 20.0  # SGLang's
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class AdminHandlers:
    """info: what /server_info tells beside what changes."""

    def __init__(self, engine: Engine, *, metrics: EngineMetrics, info: Mapping[str, Any]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._info = info
        self.leaving = False

    def routes(self) -> Sequence[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/metrics", self.metrics),
            web.get("/v1/loads", self.loads),
            web.get("/steps", self.steps),
            web.get("/flush_cache", self.flush),
            web.post("/flush_cache", self.flush),
        ]

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the handlers' signature
        """200 while the scheduler moves. A stuck one makes the answer wait, and 503 after 20 s, as in SGLang."""
        if self.leaving:
            return web.Response(status=503)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                for rank in self._engine.ranks:
                    await rank.loop.moving()
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def health_generate(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Generates a token on each rank; 503 if that takes 20 s."""
        if self.leaving:
            return web.Response(status=503)
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                for rank in self._engine.ranks:
                    await self._one_token(rank)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def _one_token(self, rank: Rank) -> None:
        namespace = self._engine.namespace(model=self._engine.served_model, lora_path=None, cache_salt=None)
        prompt = Prompt(tokens=array("I", [0]), namespace=namespace)
        job = Job(prompts=[prompt], n=1, ends=[AnswerEnd(max_tokens=1)], dp_rank=rank.number)
        _, generations = await self._engine.start(job)
        await collected(rank, generations)

    async def server_info(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Options as resolved, capacity, endpoints of events and load."""
        states = [{"dp_rank": r.number, "startup_time": r.startup_time} for r in self._engine.ranks]
        return json_reply({**self._info, "startup_time": self._engine.ranks[0].startup_time, "internal_states": states})

    async def model_info(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Which model is served."""
        return json_reply(
            {
                "model_path": self._info["model_path"],
                "served_model_name": self._engine.served_model,
                "tokenizer_path": self._info["tokenizer_path"],
                "is_generation": True,
                "weight_version": "default",
                "load_format": "dummy",
                "disaggregation_mode": "null",
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Prometheus' text format."""
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def loads(self, request: web.Request) -> web.Response:
        """SGLang's load report of each rank, or of `?dp_rank=`."""
        asked = request.query.get("dp_rank")
        ranks = self._engine.ranks
        if asked is not None:
            if not asked.isdigit() or int(asked) >= len(ranks):
                raise BadRequestError(f"dp_rank={asked} out of range [0, {len(ranks)})", param="dp_rank")
            ranks = [ranks[int(asked)]]
        return json_reply(
            {
                "timestamp": dt.datetime.now(dt.timezone.utc).isoformat(),
                "version": SGLANG_VERSION,
                "accelerator": self._info["simulated_worker_class"],
                "num_accelerators": 1,
                "loads": [rank.load_snapshot() for rank in ranks],
            }
        )

    async def steps(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """The last steps of each rank: what was planned, and how late the process was."""
        ranks = [
            {
                "dp_rank": rank.number,
                "steps": rank.log.steps,
                "lost_ms": rank.log.lost_ms,
                "blocked_event_batches": rank.blocked_batches,
                "recent": [msgspec.to_builtins(record) for record in rank.log.recent],
            }
            for rank in self._engine.ranks
        ]
        return json_reply({"ranks": ranks})

    async def flush(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Empties all caches; 400, and nothing is emptied, while a request runs or waits."""
        if not all(rank.idle for rank in self._engine.ranks):
            return web.Response(text="Flush cache failed.\n", status=400)
        for rank in self._engine.ranks:
            rank.flush()
        return web.Response(text=_FLUSHED)
