"""Router, sidecars and real engines: what the router believes is what the engines hold and then find."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import urllib.error
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.real.conftest import ENGINE_SERVICE, JaegerAddress, Servers
from tests.engine.real.servers import CACHE_TOKENS
from tests.engine.real.whole_path import BLOCK_TOKENS, PATIENCE_S, RealLoad, RealPool, eventually
from tests.engine_sockets import ask_state
from tests.jaeger import spans_of
from tests.recovery.attribution import cause
from tests.recovery.event_log import EventLog
from tests.recovery.pool_under_test import Answer

pytestmark = [pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]

ENGINE_SPANS = ("api_server_dispatch", "request_process", "prefill_forward")

# A decision may rest on a view that is older than on a quiet machine.
VIEW_AGE_S = 10.0


@asynccontextmanager
async def recorded(pool: RealPool) -> AsyncIterator[Mapping[str, EventLog]]:
    """The engines' own event logs from an empty cache on; worker -> log."""
    logs = {f"{name}/0": EventLog(server.ports.events) for name, server in pool.servers.items()}
    recording = [asyncio.create_task(log.record()) for log in logs.values()]
    load = RealLoad(seed=0)

    async def all_begin_empty() -> bool:
        """Until its subscription stands, a log hears nothing: so it is emptied again."""
        for server in pool.servers.values():
            with contextlib.suppress(urllib.error.HTTPError):  # a server refuses while a request ends
                await asyncio.to_thread(server.post, "/flush_cache", {})
            await asyncio.to_thread(server.generate, load.fresh_tokens(40))
        begun = [log.forget_before_flush() for log in logs.values()]
        return all(begun)

    try:
        await eventually(all_begin_empty, what=lambda: {name: len(log.batches) for name, log in logs.items()})
        yield logs
    finally:
        for task in recording:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def until_recorded(pool: RealPool, logs: Mapping[str, EventLog]) -> None:
    """Waits until the logs hold all that the engines have published."""

    async def complete() -> bool:
        for name, server in pool.servers.items():
            (state,) = await ask_state(server.ports.state, "state", seconds=30)
            batches = logs[f"{name}/0"].batches
            if batches[-1].sequence + 1 != state["sequence"]:
                return False
        return True

    await eventually(complete, what=lambda: {name: log.batches[-1].sequence for name, log in logs.items()})


def history(answer: Answer, log: EventLog) -> list[tuple[float, int]]:
    """(seconds from the request's beginning, leading tokens of its prompt that were cached then), where it changes."""
    told: list[tuple[float, int]] = []
    for at_s, held in log.cached_prefix(answer.prompt):
        if not told or told[-1][1] != held:
            told.append((round(at_s - answer.sent_unix_s, 3), held))
    return [*told, (round(answer.ended_unix_s - answer.sent_unix_s, 3), -1)]


async def test_matched_tokens_are_those_that_the_engines_find_and_each_difference_has_its_cause(
    pool: RealPool,
) -> None:
    async with recorded(pool) as logs:
        load = RealLoad(seed=1)
        answers = await load.through(pool, requests=160)
        await until_recorded(pool, logs)
    assert {answer.status for answer in answers} == {200}
    assert all(log.is_contiguous() for log in logs.values())
    removed = {
        name: sum(len(e["block_hashes"]) for b in log.batches for e in b.events if e["type"] == "BlockRemoved")
        for name, log in logs.items()
    }
    assert min(removed.values()) > 0, removed
    found = [cause(answer, logs[answer.worker], block_tokens=BLOCK_TOKENS, view_age_s=VIEW_AGE_S) for answer in answers]
    causes = Counter(found)
    assert causes["unexplained"] == 0, (
        causes,
        [
            (answer.worker, answer.matched_tokens, answer.cached_tokens, history(answer, logs[answer.worker]))
            for answer, why in zip(answers, found, strict=True)
            if why == "unexplained"
        ],
    )
    assert causes["none"] > len(answers) / 2, causes
    assert {answer.worker for answer in answers if answer.cached_tokens} == set(logs)
    last = answers[-1]
    forged = dataclasses.replace(last, matched_tokens=len(last.prompt) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert cause(forged, logs[last.worker], block_tokens=BLOCK_TOKENS, view_age_s=VIEW_AGE_S) == "unexplained"


async def test_the_routers_view_is_the_engines_real_tree_and_is_credited_exactly(pool: RealPool) -> None:
    load = RealLoad(seed=2)
    await load.through(pool, requests=40)
    blocks = await pool.until_views_equal_engines()
    assert min(blocks.values()) > 0, blocks
    credited = 0
    for _ in range(10):
        answer = await pool.send(load.prompt())
        claimed, found = answer.matched_tokens, answer.cached_tokens
        assert claimed <= found < claimed + BLOCK_TOKENS, f"on {answer.worker}: {claimed=} {found=}"
        credited += claimed
        await pool.until_views_equal_engines()
    assert credited > 0


async def test_an_engine_with_plain_lru_never_becomes_ready_and_says_why(servers: Servers, tmp_path: Path) -> None:
    """Stock SGLang with events and no state socket: it is served as a part of its cache, but not as an RLT worker."""
    pool = RealPool({"lru": servers.lru}, folder=tmp_path)
    checks: dict[str, Any] = {}

    async def all_else_holds() -> bool:
        nonlocal checks
        checks = (await pool.readiness("lru"))["checks"]
        await asyncio.to_thread(servers.lru.generate, RealLoad(seed=5).prompt())
        failing = {name for name, check in checks.items() if check["required"] and not check["holds"]}
        return failing == {"eviction_policy_live"}

    try:
        for process in (pool.router, pool.sidecars["lru"]):
            await process.start()
            await process.wait_for_event("listening", timeout_s=PATIENCE_S)
        await eventually(all_else_holds, what=lambda: checks)
        reason = checks["eviction_policy_live"]["reason"]
        assert "rlt" in reason
        assert "not proven (it was started with 'lru')" in reason
        assert not (await pool.readiness("lru"))["ready"]
        assert (await pool.workers())["lru/0"]["mirror"] == "partial"
    finally:
        await pool.stop()


async def test_load_reports_alone_change_what_the_router_believes_of_an_engine(
    servers: Servers, tmp_path: Path
) -> None:
    """A router that sends nothing itself: all that it can know of the engine's speed are the reports."""
    server, load = servers.rlt[1], RealLoad(seed=3)
    async with RealPool({"reported": server}, folder=tmp_path) as pool:
        before = (await pool.workers())["reported/0"]
        view = before

        async def learned() -> bool:
            nonlocal view
            for _ in range(3):
                await asyncio.to_thread(server.generate, load.fresh_tokens(250))
            view = (await pool.workers())["reported/0"]
            return bool(view["beliefs"]["speed_factor"] != before["beliefs"]["speed_factor"])

        await eventually(learned, what=lambda: view["beliefs"])
    busy_ms, tokens = (
        view["load"][field] - (before["load"] or {}).get(field, 0)
        for field in ("total_prefill_busy_us", "total_prefill_uncached_tokens")
    )
    assert view["beliefs"]["observations"] == 0
    assert tokens >= 500
    assert busy_ms > 0
    assert view["load"]["max_total_tokens"] == CACHE_TOKENS


async def test_one_trace_leads_from_the_client_through_the_router_into_the_engines_own_spans(
    pool: RealPool, jaeger: JaegerAddress | None
) -> None:
    if jaeger is None:
        pytest.skip("no tracing backend beside the repository")
    trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
    answer = await pool.send(RealLoad(seed=4).prompt(), headers={"traceparent": f"00-{trace_id}-{client_span}-01"})
    assert answer.status == 200
    spans: list[Any] = []

    async def engine_has_told() -> bool:
        """Its processes send their spans each at its own time."""
        nonlocal spans
        spans = await asyncio.to_thread(spans_of, jaeger.query, trace_id)
        return {"attempt", *ENGINE_SPANS} <= {name for name, *_ in spans}

    await eventually(engine_has_told, what=lambda: spans)
    by_name = {name: (service, parent, span) for name, service, parent, span in spans}
    assert by_name["POST /generate"][:2] == ("kvrouting-router", client_span)
    assert by_name["attempt"][0] == "kvrouting-router"
    above = {span: parent for _, _, parent, span in spans}
    for name in ENGINE_SPANS:
        service, parent, _ = by_name[name]
        assert service == ENGINE_SERVICE
        while above.get(parent) is not None and parent != by_name["attempt"][2]:
            parent = above[parent]
        assert parent == by_name["attempt"][2], f"{name} does not lie below the router's attempt: {spans}"
