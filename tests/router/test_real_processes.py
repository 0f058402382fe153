"""The router process with real sidecars and simulated engines: the official client, agreement, restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvrouting_simulator.demo.cluster import Cluster
from kvrouting_simulator.demo.pool_plan import MODEL, PoolPlan
from tests.recovery.pool_under_test import views_equal_engines

pytestmark = pytest.mark.processes

PREFIX = "All conversations of this test begin with the same long and quite boring preamble. " * 20


async def page(cluster: Cluster, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(cluster.router_url + path) as response:
        return json.loads(await response.text())


async def metrics(cluster: Cluster) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(cluster.router_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def test_the_official_client_a_hot_prefix_and_a_router_that_restarts(tmp_path: Path) -> None:
    plan = PoolPlan(
        engines=2,
        speed=20,
        router_options=["--tokenizer", "bytes", "--audit-every", "1", "--decision-header-bytes", "8192"],
    )
    async with Cluster(plan, folder=tmp_path) as cluster:
        async with openai.AsyncOpenAI(base_url=cluster.router_url + "/v1", api_key="x", max_retries=0) as client:
            await talk(client)
            await views_equal_engines(cluster)  # the events of what was served have arrived
            answer = await client.completions.with_raw_response.create(
                model=MODEL, prompt=PREFIX + "last", max_tokens=4
            )
            decision = json.loads(answer.headers["x-kvrouting-decision"])
            matched = next(c for c in decision["candidates"] if c["worker"] == decision["worker"])["matched_tokens"]
            usage = answer.parse().usage
            assert usage is not None
            assert usage.prompt_tokens == decision["prompt_tokens"]
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            assert len(PREFIX) // 64 * 64 <= matched <= cached < matched + 64
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="x", max_tokens=0)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="x")
        await everything_agrees(cluster)
        before = {w["worker"]: w["blocks"] for w in (await page(cluster, "/workers"))["workers"]}
        await cluster.routers[0].kill()
        await cluster.routers[0].start()
        await cluster.routers[0].wait_for_event("listening", timeout_s=30)
        await cluster.wait_live(range(2), timeout_s=30)
        after = {w["worker"]: w["blocks"] for w in (await page(cluster, "/workers"))["workers"]}
        assert after == before


async def talk(client: openai.AsyncOpenAI) -> None:
    """Completions, chats and streams, some at once, one given up."""
    for i in range(4):
        await client.completions.create(model=MODEL, prompt=f"{PREFIX} {i}", max_tokens=4)
    messages: list[Any] = [{"role": "user", "content": PREFIX}]
    for _ in range(3):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        content = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]

    async def stream(number: int) -> int:
        count = 0
        async for _ in await client.chat.completions.create(
            model=MODEL,
            messages=[*messages, {"role": "user", "content": str(number)}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        ):
            count += 1
        return count

    assert min(await asyncio.gather(*(stream(i) for i in range(8)))) > 1
    given_up = await client.completions.create(model=MODEL, prompt="x" * 500, max_tokens=2000, stream=True)
    async for _ in given_up:
        break
    await given_up.close()
    both = await client.completions.create(model=MODEL, prompt=["one", "two"], n=1, max_tokens=3)
    assert len(both.choices) == 2


async def everything_agrees(cluster: Cluster) -> None:
    """Nothing in flight, digests compared, no drift, no mismatch."""
    async with asyncio.timeout(60):
        while True:
            workers = (await page(cluster, "/workers"))["workers"]
            counted = await metrics(cluster)
            if not any(w["in_flight"] for w in workers) and counted["kvrouting_router_digest_checks_total"] >= 4:
                break
            await asyncio.sleep(0.1)
    assert [w["mirror"] for w in workers] == ["exact", "exact"]
    assert not any(w["agreement"]["mismatch"] or w["tokenizer_mismatch"] for w in workers)
    assert max(w["agreement"]["disagreement_share"] for w in workers) < 0.05
    assert counted["kvrouting_router_drifts_total"] == 0
    assert counted["kvrouting_router_audits_total"] > 10
    assert not any(v for k, v in counted.items() if k.startswith("kvrouting_router_resyncs_total"))
