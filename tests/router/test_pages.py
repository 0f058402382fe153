"""What the router shows: decisions everywhere the same, workers, metrics, health, agreement."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouting_core.identity import WorkerId
from kvrouting_core.routing.decision import Candidate, Decision, Reason
from kvrouting_router.decision_log import ShownDecision
from kvrouting_router.json_log import JsonFormatter
from kvrouting_tokenization import ByteTokenizer
from tests.fakes.fake_http_engine import DONE, Answer, chat_body, chat_chunk, json_answer, running_engine, usage_chunk
from tests.router.router_under_test import PATIENCE_S, chat, config, options, running_router, static, text_blocks


def decision(workers: int) -> Decision:
    """A decision among so many workers, the last of them chosen."""
    names = [WorkerId(f"w{i}/0") for i in range(workers)]
    candidates = tuple(Candidate(n, i, i, 9, 0, 1.0, 2.0, 0.5, 3.5, 0.25, 3.75) for i, n in enumerate(names))
    return Decision(
        request_id="r",
        policy="p",
        worker=names[-1],
        reason=Reason.LOWEST_COST,
        decided_ms=1.0,
        waited_ms=0.0,
        prompt_tokens=9,
        candidates=candidates,
    )


def test_a_short_decision_is_its_own_header_and_a_long_one_gives_its_choice() -> None:
    short, long = ShownDecision(decision(2)), ShownDecision(decision(64))
    assert json.loads(short.header_value(limit_bytes=4096)) == decision(2).as_dict()
    value = long.header_value(limit_bytes=4096)
    assert len(value) < 4096
    header = json.loads(value)
    assert (header["worker"], header["matched_tokens"], header["candidates"]) == ("w63/0", 63, 64)
    assert header["prediction_ms"] == 3.5


async def test_header_page_file_and_log_show_the_same_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "decisions.jsonl"
    settings = config(decisions_file=file, log_decisions=True, policy="lbgr")
    caplog.set_level(logging.INFO, "kvrouting_router.decision_log")
    async with running_engine() as engine, running_router(settings) as router:
        engine.answer = lambda _: json_answer(chat_body(cached=48))
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, text_blocks("x" * 64))])
        await sidecar.acks(2)
        body = {"model": "m", "prompt": "x" * 100, "max_tokens": 7}
        _, _, headers = await router.post("/v1/completions", body)
        header = json.loads(headers["x-kvrouting-decision"])
        _, text = await router.get("/debug/decisions?last=1")
        assert json.loads(text) == [header]
    logged = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.getMessage() == "decision"]
    assert [line["decision"] for line in logged] == [header]
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert line["decision"] == header
    assert line["request"] == {
        "api": "/v1/completions",
        "arrived_ms": line["request"]["arrived_ms"],
        "prompt_tokens": 100,
        "further_prompt_tokens": 0,
        "sequences": 1,
        "max_output_tokens": 7,
        "exact": True,
        "stream": False,
    }
    outcome = line["outcome"]
    assert (outcome["outcome"], outcome["cached_tokens"], outcome["output_tokens"]) == ("completed", 48, 2)
    assert outcome["end_ms"] > 0
    assert next(c for c in header["candidates"])["matched_tokens"] == 64


async def test_every_attempt_is_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    async with running_engine() as engine, running_router(config(decisions_file=file)) as router:
        engine.answer = lambda _: Answer(die_after=-1)
        await router.sidecar(engine)
        await router.post("/v1/chat/completions", chat())
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), usage_chunk(prompt=9, completion=1, cached=2), DONE])
        await router.post("/v1/chat/completions", chat(stream=True))
    failed, streamed = [json.loads(line)["outcome"] for line in file.read_text().splitlines()]
    assert (failed["outcome"], failed["first_byte_ms"]) == ("failed", None)
    assert (streamed["outcome"], streamed["output_tokens"], streamed["cached_tokens"]) == ("completed", 1, 2)
    assert 0 < streamed["first_byte_ms"] <= streamed["end_ms"]


class BlockedTokenizer(ByteTokenizer):
    """Waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        self.go.wait(PATIENCE_S)
        return super().encode_chat(body)


async def test_health_does_not_wait_for_tokenization() -> None:
    tokenizer = BlockedTokenizer()
    async with running_engine() as engine, running_router(tokenizer=tokenizer) as router:
        await router.sidecar(engine)
        long = chat("x" * 2000)
        tasks = [asyncio.create_task(router.post("/v1/chat/completions", long)) for _ in range(8)]
        for page in ("/healthz", "/readyz", "/metrics", "/workers"):
            async with asyncio.timeout(PATIENCE_S):
                assert (await router.get(page))[0] == 200
        # Ids need no tokenizer: they overtake those who wait for it.
        status, _, _ = await router.post("/generate", {"input_ids": [1, 2, 3]})
        assert status == 200
        assert not any(t.done() for t in tasks)
        tokenizer.go.set()
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}


async def test_readiness_says_what_is_missing() -> None:
    async with running_engine() as engine, running_router() as router:
        assert await router.get("/healthz") == (200, "ok\n")
        assert await router.get("/readyz") == (503, "no worker is known\n")
        sidecar = await router.sidecar(engine)
        assert await router.get("/readyz") == (200, "ok\n")
        await sidecar.heartbeat(engine_healthy=False, reason="it is ill")
        await router.state("pod-a/0", "suspect")
        status, text = await router.get("/readyz")
        assert (status, text) == (503, "none of 1 workers is live (pod-a/0 is suspect: it is ill)\n")


async def test_the_page_of_workers_says_what_is_believed() -> None:
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router:
        sidecar = await router.sidecar(engine, gpu_class="H200")
        await sidecar.delta(extended=[(0, [1, 2, 3])])
        await sidecar.heartbeat()
        await router.until(lambda: router.router.pool.index.count(WorkerId("pod-a/0")) == 3)
        page = await router.workers()
        assert (page["policy"], page["model"], page["index_blocks"]) == ("lbgr", "m", 3)
        worker = page["workers"][0]
        expected = {
            "worker": "pod-a/0",
            "state": "live",
            "reason": "",
            "epoch": "e1",
            "endpoint": engine.url,
            "class": "H200",
            "mirror": "exact",
            "blocks": 3,
            "unique_blocks": 3,
            "capacity_tokens": 16_000,
            "in_flight": 0,
            "tokenizer_mismatch": "",
            "breaker_open": False,
            "end_to_end_verified": True,
        }
        assert {k: worker[k] for k in expected} == expected
        assert worker["beliefs"]["eligible"] is True
        assert worker["beliefs"]["prefill_ms_per_token"] > 0


@pytest.mark.parametrize(("reported", "flagged"), [(0, True), (64, False), (75, False)])
async def test_a_worker_whose_cached_tokens_disagree_for_long_is_flagged(reported: int, flagged: bool) -> None:
    """64 tokens are predicted for each of the prompts of 100."""
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: json_answer(chat_body(cached=reported))
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, text_blocks("x" * 64))])
        await sidecar.acks(2)
        for _ in range(19):
            await router.post("/v1/completions", {"model": "m", "prompt": "x" * 64 + "y" * 36})
        assert (await router.worker())["agreement"]["mismatch"] is False
        await router.post("/v1/completions", {"model": "m", "prompt": "x" * 64 + "y" * 36})
        agreement = (await router.worker())["agreement"]
        assert agreement["observations"] == 20
        assert agreement["mismatch"] is flagged
        assert agreement["predicted_share"] == pytest.approx(0.64)
        assert agreement["reported_share"] == pytest.approx(reported / 100)
        assert await router.metric("cache_mismatch", worker="pod-a/0") == float(flagged)


async def test_the_metrics_page_counts_what_happened() -> None:
    async with running_engine() as engine, running_router() as router:
        engine.answer = lambda _: json_answer(chat_body(cached=32))
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, text_blocks("x" * 32))])
        await sidecar.acks(2)
        await router.post("/v1/completions", {"model": "m", "prompt": "x" * 50})
        await router.post("/v1/completions", {"model": "m", "prompt": "x" * 50, "max_tokens": 0})
        status, text = await router.get("/metrics")
        assert status == 200
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        expected: dict[str, float] = {
            'requests_total{api="/v1/completions",outcome="completed"}': 1,
            'responses_total{api="/v1/completions",status="200"}': 1,
            'responses_total{api="/v1/completions",status="400"}': 1,
            'rejected_requests_total{error="InvalidRequestError"}': 1,
            "prompt_tokens_total": 50,
            "matched_tokens_total": 32,
            "cached_tokens_total": 32,
            "time_to_first_byte_seconds_count": 1,
            "end_to_end_seconds_count": 1,
            "decision_seconds_count": 1,
            "tokenization_seconds_count": 1,
            "index_blocks": 2,
            "waiting_requests": 0,
            'in_flight_requests{worker="pod-a/0"}': 0,
            'worker_blocks{worker="pod-a/0"}': 2,
            'worker_state{state="live",worker="pod-a/0"}': 1,
            'worker_state{state="suspect",worker="pod-a/0"}': 0,
            'eviction_policy_live{worker="pod-a/0"}': 1,
        }
        assert {k: float(samples[f"kvrouting_router_{k}"]) for k in expected} == expected


async def matched(router: Any, path: str, body: Any) -> int:
    """Matched tokens of the chosen worker."""
    _, _, headers = await router.post(path, body)
    header = json.loads(headers["x-kvrouting-decision"])
    return int(next(c for c in header["candidates"] if c["worker"] == header["worker"])["matched_tokens"])


async def test_without_a_tokenizer_text_is_matched_by_the_routers_own_decisions() -> None:
    first = "You are a helpful assistant. " * 20
    async with running_engine() as engine, running_router(config(policy="lbgr"), with_tokenizer=False) as router:
        await router.sidecar(engine)
        assert await matched(router, "/v1/chat/completions", chat(first)) == 0
        again = await matched(router, "/v1/chat/completions", chat(first))
        assert again > 100
        turns = chat(first)["messages"] + [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        assert await matched(router, "/v1/chat/completions", {"messages": turns}) >= again - 16
        assert await matched(router, "/v1/chat/completions", {"messages": turns, "cache_salt": "s"}) == 0
        assert await matched(router, "/v1/completions", {"prompt": first}) == 0
        assert await matched(router, "/v1/completions", {"prompt": first}) > 100


async def test_without_a_tokenizer_token_ids_are_exact() -> None:
    from tests.router.router_under_test import blocks_of

    tokens = list(range(100))
    async with running_engine() as engine, running_router(config(policy="lbgr"), with_tokenizer=False) as router:
        sidecar = await router.sidecar(engine)
        await sidecar.delta(extended=[(0, blocks_of(tokens))])
        await sidecar.acks(2)
        assert await matched(router, "/generate", {"input_ids": tokens}) == 96
        assert router.router.pool.guessed.count(WorkerId("pod-a/0")) == 0


async def test_a_worker_without_events_is_guessed_within_its_capacity() -> None:
    async with running_engine() as engine:
        settings = config(static_workers=[static(engine, capacity_tokens=160)], policy="lbgr")
        async with running_router(settings) as router:
            name = f"127.0.0.1:{engine.port}/0"
            await router.state(name, "live")
            prompts = [[i] * 96 for i in (1, 2)]
            assert await matched(router, "/generate", {"input_ids": prompts[0]}) == 0
            assert await matched(router, "/generate", {"input_ids": prompts[0]}) == 95
            assert await matched(router, "/generate", {"input_ids": prompts[1]}) == 0
            worker = await router.worker(name)
            assert (worker["mirror"], worker["blocks"]) == ("approximate", 10)
            # The older prompt has lost its tail, not its head.
            assert await matched(router, "/generate", {"input_ids": prompts[0]}) == 64


async def test_a_static_worker_that_was_away_has_an_empty_cache_again() -> None:
    async with running_engine() as engine:
        settings = config(
            static_workers=[static(engine)], policy="lbgr", options=options(sync={"heartbeat_interval_s": 0.05})
        )
        async with running_router(settings) as router:
            name = f"127.0.0.1:{engine.port}/0"
            await router.state(name, "live")
            await router.post("/generate", {"input_ids": [1] * 96})
            assert (await router.worker(name))["blocks"] == 6
            engine.healthy = False
            await router.until(lambda: engine.failed_probes > 1)  # so the router has heard the answer to the first
            engine.healthy = True
            await router.until(lambda: router.router.pool.guessed.count(WorkerId(name)) == 0)
            assert await matched(router, "/generate", {"input_ids": [1] * 96}) == 0


async def test_an_engine_with_a_sidecar_is_not_also_a_static_worker() -> None:
    async with running_engine() as engine, running_router(config(static_workers=[static(engine)])) as router:
        await router.state(f"127.0.0.1:{engine.port}/0", "live")
        await router.sidecar(engine)
        await asyncio.sleep(0.6)
        assert [w["worker"] for w in (await router.workers())["workers"]] == ["pod-a/0"]
