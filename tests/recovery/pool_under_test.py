"""A pool of real processes under load, and the engine's own word to compare the router's view with."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvrouting_core.blocks import ChainHasher, Namespace
from kvrouting_simulator.demo.cluster import Cluster
from kvrouting_simulator.demo.pool_plan import MODEL, worker_id
from tests.engine_sockets import ask_state
from tests.processes import Generated, LocalPool

BLOCK_TOKENS = 64
_ANSWER_LIMIT_S = 300.0  # a request may wait for a frozen worker's return


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request as the client saw it. matched: what the router's decision claimed for the chosen worker."""

    status: int
    prompt: Sequence[int]
    worker: str
    request_id: str
    matched_tokens: int
    credited_tokens: int
    cached_tokens: int
    sent_unix_s: float
    ended_unix_s: float


def answer_of(got: Generated, prompt: Sequence[int], *, sent_unix_s: float) -> Answer:
    """What the router said of the choice beside what the engine said of its cache; ended now."""
    decision: Mapping[str, Any] = got.decision or {}
    chosen = got.chosen if decision else {}
    meta = got.meta if got.status == 200 else {}
    return Answer(
        status=got.status,
        prompt=prompt,
        worker=str(decision.get("worker", "")),
        request_id=str(decision.get("request_id", "")),
        matched_tokens=int(chosen.get("matched_tokens", 0)),
        credited_tokens=int(chosen.get("credited_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        sent_unix_s=sent_unix_s,
        ended_unix_s=time.time(),
    )


def routing_blocks(
    stored: Iterable[Mapping[str, Any]], *, key: bytes, model: str = MODEL, block_tokens: int = BLOCK_TOKENS
) -> set[int]:
    """The routing blocks that a cache of these `BlockStored` events holds, worked out page by page.

    The slow, obvious definition: each page's whole token path, hashed from its beginning.
    """
    pages: dict[int, tuple[int | None, list[int]]] = {}
    for event in stored:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        for i, page in enumerate(event["block_hashes"]):
            pages[page] = (parent, tokens[i * size : (i + 1) * size])
            parent = page
    parents = {parent for parent, _ in pages.values()}
    hasher = ChainHasher(key, block_tokens)
    namespace = Namespace(model=model, lora_adapter=None, cache_salt=None)
    blocks: set[int] = set()
    for leaf in pages.keys() - parents:
        path: list[list[int]] = []
        at: int | None = leaf
        while at is not None:
            at, tokens = pages[at]
            path.append(tokens)
        prompt = array("I", [token for tokens in reversed(path) for token in tokens])
        blocks.update(int(b) for b in hasher.hash_blocks(namespace, prompt))
    return blocks


def digest(blocks: Iterable[int]) -> str:
    """The order-independent digest as `/workers` shows it."""
    return f"{sum(blocks) % (1 << 64):016x}"


async def engine_blocks(pool: Cluster, number: int) -> set[int]:
    """What the engine's own tree holds now; nothing must run there meanwhile."""
    bodies = await ask_state(pool.engine_ports[number].state, "snapshot")
    return routing_blocks((e for body in bodies for e in body["events"]), key=pool.hash_key)


async def views_equal_engines(pool: Cluster, *, router: int = 0, timeout_s: float = 45.0) -> None:
    """Waits until the router's view of every worker is its engine's real cache.

    Raises: AssertionError with both sides if it does not come to be.
    """
    expected = [await engine_blocks(pool, n) for n in range(pool.plan.engines)]
    start = time.monotonic()
    seen: list[tuple[object, object, object]] = []
    while time.monotonic() - start < timeout_s:
        workers = await pool.workers(router=router)
        views = [workers.get(worker_id(n), {}) for n in range(pool.plan.engines)]
        seen = [(v.get("state"), v.get("blocks"), v.get("digest")) for v in views]
        if seen == [("live", len(blocks), digest(blocks)) for blocks in expected]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"router sees {seen}, engines hold {[(len(b), digest(b)) for b in expected]}")


class Load:
    """Requests with shared prefixes, a few at a time, until it is told to stop.

    groups prompts share `shared_tokens` and add `own_tokens` of their own; all from the seed.
    """

    def __init__(
        self, pool: LocalPool, *, seed: int, groups: int = 24, shared_tokens: int = 600, own_tokens: int = 200
    ) -> None:
        self._pool = pool
        self._rng = random.Random(seed)
        self._own_tokens = own_tokens
        self._prefixes = [self.fresh_tokens(shared_tokens) for _ in range(groups)]
        self.answers: list[Answer] = []

    def fresh_tokens(self, count: int) -> list[int]:
        """Token ids that no other prompt has in this order."""
        return [self._rng.randrange(1000, 128_000) for _ in range(count)]

    def prompt(self) -> list[int]:
        """The next prompt: a group's prefix and an end of its own."""
        return self._rng.choice(self._prefixes) + self.fresh_tokens(self._own_tokens)

    async def send(self, prompt: Sequence[int], *, router: int = 0, output_tokens: int = 4) -> Answer:
        """One request through the router. Raises: aiohttp.ClientError if the router itself is away."""
        sent = time.time()
        # Not a stream: the router may send it to another worker for as long as none has answered.
        got = await self._pool.generate(
            prompt,
            output_tokens=output_tokens,
            url=f"http://127.0.0.1:{self._pool.router_ports[router].http}",
            stream=False,
            timeout_s=_ANSWER_LIMIT_S,
        )
        answer = answer_of(got, prompt, sent_unix_s=sent)
        self.answers.append(answer)
        return answer

    async def run(self, *, clients: int = 6, requests: int | None = None, until: asyncio.Event | None = None) -> None:
        """Each client sends one request after the other; failures while a router is away are waited out."""
        left = iter(range(requests)) if requests is not None else iter(int, 1)

        async def client() -> None:
            for _ in left:
                if until is not None and until.is_set():
                    return
                try:
                    await self.send(self.prompt())
                except (aiohttp.ClientError, ConnectionError):
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as clients_running:
            for _ in range(clients):
                clients_running.create_task(client())

    async def credited_rightly(self, *, requests: int = 10, router: int = 0) -> None:
        """One request at a time on a quiet pool: the router claims exactly what the engine then finds.

        Raises: AssertionError naming the request otherwise.
        """
        for i in range(requests):
            answer = await self.send(self.prompt(), router=router)
            assert answer.status == 200, answer.status
            claimed, found = answer.matched_tokens, answer.cached_tokens
            assert claimed <= found < claimed + BLOCK_TOKENS, f"request {i} on {answer.worker}: {claimed=} {found=}"
            await views_equal_engines(self._pool, router=router)  # before the next one is decided


async def misbehave(pool: Cluster, number: int, **fault: object) -> None:
    """Orders a fault from one engine."""
    url = f"{pool.engine_urls[number]}/misbehave"
    async with aiohttp.ClientSession() as session, session.post(url, json=fault) as response:
        assert response.status == 200, await response.text()


async def flush(pool: Cluster, number: int) -> None:
    """Empties an engine's cache; waits until it is idle."""
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            async with session.post(f"{pool.engine_urls[number]}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError(f"engine {number} never became idle")
