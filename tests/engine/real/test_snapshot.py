"""Snapshots taken while the tree changes, and the state socket over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvrouting_sglang.backend import state_operations
from kvrouting_sglang.engine_state import EngineState, RankIdentity
from kvrouting_sglang.pauses import Pauses
from kvrouting_sglang.state_server import StateServer, StateSocketError
from kvrouting_sglang.tree_reader import TreeReader
from tests.engine.real.caches import policy_cache, serve
from tests.engine.real.histories import History
from tests.engine.real.mirrors import described_pages, digest, real_pages

PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])
IDENTITY = RankIdentity(epoch="e1", dp_rank=3, events_port=5560, policy="rlt", seed=7)

Page = tuple[int, tuple[int | None, tuple[int, ...]]]


def settled(snapshot: list[Page], batches: list[list[Any]]) -> dict[int, Any]:
    """What a reader makes of a snapshot and the batches after its position: a page's last event decides."""
    live = dict(snapshot)
    for event in (event for batch in batches for event in batch):
        if isinstance(event, BlockStored):
            live.update(described_pages(event))
        elif isinstance(event, BlockRemoved):
            for page in event.block_hashes:
                live.pop(page, None)
        elif isinstance(event, AllBlocksCleared):
            live.clear()
    return live


class Mutation:
    """A thread that changes the cache as a scheduler does and keeps the batches that it would publish."""

    def __init__(self, cache: Any, *, seed: int) -> None:
        self.cache = cache
        self.batches: list[list[Any]] = []
        self._history = History(cache, seed=seed)
        self._stopping = threading.Event()
        self.steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Mutation:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for _ in self._history.steps(5):
                self.steps += 1
            events = self.cache.take_events()
            if events:
                self.batches.append(events)
            time.sleep(0.0005)  # as a scheduler waits for the model


@PAGES
def test_a_snapshot_and_the_batches_after_it_are_the_live_set_under_mutation(page_size: int) -> None:
    cache = policy_cache(capacity=600 * page_size, page_size=page_size)
    reader = TreeReader(cache.tree_core, pauses=Pauses())
    taken: list[tuple[int, list[Page]]] = []
    with Mutation(cache, seed=page_size) as mutation:
        while mutation.steps < 3000 or len(taken) < 25:
            position = cache.tree_core.kv_events.published.sequence
            pages = [page for events in reader.snapshot() for event in events for page in described_pages(event)]
            taken.append((position, pages))
    batches = [*mutation.batches, *([events] if (events := cache.take_events()) else [])]
    assert len(batches) == cache.tree_core.kv_events.published.sequence
    live = real_pages(cache)
    assert cache.tree_core.evicted_tokens > 600 * page_size
    for position, pages in taken:
        assert settled(pages, batches[position:]) == live


@PAGES
def test_a_snapshot_of_a_tree_at_rest_is_the_tree(page_size: int) -> None:
    cache = policy_cache(capacity=5000 * page_size, page_size=page_size)
    history = History(cache, seed=1, prompt_pages=400)
    list(history.steps(80))
    pages = [
        page
        for events in TreeReader(cache.tree_core, pauses=Pauses()).snapshot()
        for event in events
        for page in described_pages(event)
    ]
    assert len(pages) == len(dict(pages))
    assert dict(pages) == real_pages(cache)


@pytest.mark.parametrize("change", ["split", "trimmed", "evicted"])
def test_a_long_prompt_that_changes_while_it_is_read_comes_out_right(change: str) -> None:
    """Its pages are told 512 at a time, from the tree's own list: nothing of its length is copied at once."""
    cache = policy_cache(capacity=20_000, page_size=1)
    serve(cache, range(16_000))
    cache.take_events()
    position = cache.tree_core.kv_events.published.sequence
    pieces = TreeReader(cache.tree_core, pauses=Pauses()).snapshot()
    told = [next(pieces)]
    if change == "split":
        serve(cache, [*range(9_000), *range(90_000, 90_100)])
    elif change == "trimmed":
        serve(cache, range(50_000, 60_000))
    else:
        serve(cache, range(50_000, 70_000))
    batches = [cache.take_events()]
    told += pieces
    pages = [[page for event in events for page in described_pages(event)] for events in told]
    assert max(map(len, pages)) <= 512
    assert settled([page for piece in pages for page in piece], batches) == real_pages(cache)
    assert cache.tree_core.kv_events.published.sequence == position + 1


def test_each_policy_tells_its_own_figures() -> None:
    cache = policy_cache(capacity=1000, page_size=1)
    state = EngineState(cache, identity=IDENTITY, reader=TreeReader(cache.tree_core, pauses=Pauses()))

    def told() -> tuple[int, int]:
        eviction = next(state.state())["eviction"]
        return eviction["phase"], eviction["marked_tokens"]

    serve(cache, range(300))
    serve(cache, range(1000, 1100))
    assert told() == (1, 400)
    serve(cache, range(2000, 2700))
    assert told() == (2, 700)
    lru = policy_cache(capacity=9, page_size=1, policy="lru")
    reader = TreeReader(lru.tree_core, pauses=Pauses())
    eviction = next(EngineState(lru, identity=IDENTITY, reader=reader).state())["eviction"]
    assert not {"phase", "marked_tokens"} & set(eviction)
    adaptive = policy_cache(capacity=6400, page_size=1, policy="rlt-adaptive")
    for number in range(30):
        serve(adaptive, [number] * 640)
    reader = TreeReader(adaptive.tree_core, pauses=Pauses())
    eviction = next(EngineState(adaptive, identity=IDENTITY, reader=reader).state())["eviction"]
    assert eviction["own_loaded_tokens"] == eviction["ghost_loaded_tokens"] == eviction["evicted_tokens"] + 6400
    assert (eviction["safe_mode"], eviction["phi_limit_tokens"]) == (False, 1600)


@pytest.fixture
def ask() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Starts a server over a cache and asks it."""
    context = zmq.Context()
    servers: list[StateServer] = []

    def asking(cache: Any, body: bytes) -> list[dict[str, Any]]:
        server = StateServer("tcp://127.0.0.1:*", state_operations(cache, IDENTITY))
        server.start()
        servers.append(server)
        dealer = context.socket(zmq.DEALER)
        dealer.connect(server.endpoint)
        dealer.send_multipart([b"", body])
        answers: list[dict[str, Any]] = []
        while not answers or not answers[-1].get("end"):
            assert dealer.poll(60_000)
            empty, payload = dealer.recv_multipart()
            assert empty == b""
            answers.append(msgspec.msgpack.decode(payload))
        dealer.close(linger=0)
        return answers

    yield asking
    for server in servers:
        server.stop()
    context.term()


def test_the_state_is_that_of_the_real_tree_at_the_last_batch(ask: Callable[..., list[dict[str, Any]]]) -> None:
    cache = policy_cache(capacity=800, page_size=4)
    for _ in History(cache, seed=2).steps(300):
        cache.take_events()
    pages = real_pages(cache)
    position = cache.tree_core.kv_events.published
    serve(cache, [7] * 40)  # not published yet
    (state,) = ask(cache, msgspec.msgpack.encode({"op": "state"}))
    assert state == {
        "version": 1,
        "end": True,
        "epoch": "e1",
        "dp_rank": 3,
        "page_size": 4,
        "sequence": position.sequence,
        "pages": len(pages),
        "digest": digest(pages),
        "capacity_tokens": 800,
        "cached_tokens": cache.evictable_size() + cache.protected_size(),
        "events_port": 5560,
        "eviction": {
            "policy": "rlt",
            "live": True,
            "seed": 7,
            "phase": cache.tree_core.policy.phase,
            "marked_tokens": cache.tree_core.policy.marked_pages * 4,
            "evicted_tokens": cache.tree_core.evicted_tokens,
        },
    }


def test_the_snapshot_comes_in_chunks_of_one_position(ask: Callable[..., list[dict[str, Any]]]) -> None:
    cache = policy_cache(capacity=6000, page_size=1)
    for _ in History(cache, seed=2, prompt_pages=300).steps(60):
        cache.take_events()
    position = cache.tree_core.kv_events.published.sequence
    answers = ask(cache, msgspec.msgpack.encode({"op": "snapshot"}))
    assert len(answers) > 3
    assert {(answer["epoch"], answer["position"]) for answer in answers} == {("e1", position)}
    assert [answer.get("end", False) for answer in answers] == [False] * (len(answers) - 1) + [True]
    events = [msgspec.convert(event, BlockStored) for answer in answers for event in answer["events"]]
    assert dict(page for event in events for page in described_pages(event)) == real_pages(cache)


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"op": "flush"})])
def test_a_question_that_is_none_gets_an_error(body: bytes, ask: Callable[..., list[dict[str, Any]]]) -> None:
    (answer,) = ask(policy_cache(capacity=8, page_size=1), body)
    assert answer["end"] is True
    assert answer["error"]


def test_without_events_the_state_has_no_position_and_the_snapshot_says_why(
    ask: Callable[..., list[dict[str, Any]]],
) -> None:
    cache = policy_cache(capacity=8, page_size=1, events=False)
    (state,) = ask(cache, msgspec.msgpack.encode({"op": "state"}))
    assert state["eviction"]["live"] is True
    assert not {"sequence", "pages", "digest"} & set(state)
    (snapshot,) = ask(cache, msgspec.msgpack.encode({"op": "snapshot"}))
    assert "--kv-events-config" in snapshot["error"]


def test_an_endpoint_in_use_is_refused_by_name() -> None:
    context = zmq.Context()
    taken = context.socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    server = StateServer(f"tcp://127.0.0.1:{port}", {})
    with pytest.raises(StateSocketError, match=f"127.0.0.1:{port}"):
        server.start()
    taken.close(linger=0)
    context.term()
