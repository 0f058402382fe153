"""Real servers with the plug-in, on the CPU, with a tiny model."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import zmq

from tests.engine.real.conftest import Servers
from tests.engine.real.servers import CACHE_TOKENS, RealServer

pytestmark = pytest.mark.timeout(1200)

SEEDS = (1, 2, 3)
PROMPT_TOKENS, PROMPTS, ROUNDS = 240, 10, 8


def cyclic_hit_rate(server: RealServer, seed: int) -> float:
    """Ten prompts in turn over a cache that holds 1/1.2 of them."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 512) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    server.post("/flush_cache", {})
    asked = cached = 0
    for _ in range(ROUNDS):
        for prompt in prompts:
            tokens, hit = server.generate(prompt)
            asked, cached = asked + tokens, cached + hit
    return cached / asked


def test_a_cycle_over_1_2_times_the_cache_hits_with_rlt_and_never_with_lru(servers: Servers) -> None:
    assert PROMPT_TOKENS * PROMPTS == 1.2 * CACHE_TOKENS
    rates = {
        (name, seed): round(cyclic_hit_rate(server, seed), 3)
        for seed in SEEDS
        for name, server in (("rlt 1", servers.rlt[1]), ("rlt 16", servers.rlt[16]), ("lru 1", servers.lru))
    }
    print(rates)
    for (name, _), rate in rates.items():
        assert rate <= 0.01 if name == "lru 1" else rate >= 0.4, rates


def ask(server: RealServer, operation: str, *, port: int | None = None) -> list[dict[str, Any]]:
    """All answers of the state socket, or of the one at a port."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port or server.ports.state}")
    dealer.send_multipart([b"", msgspec.msgpack.encode({"op": operation})])
    answers: list[dict[str, Any]] = []
    while not answers or not answers[-1].get("end"):
        assert dealer.poll(60_000), "the state socket is silent"
        answers.append(msgspec.msgpack.decode(dealer.recv_multipart()[1]))
    dealer.close(linger=0)
    context.term()
    return answers


class Subscriber:
    """Applies the published batches from a position on."""

    def __init__(self, server: RealServer) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://127.0.0.1:{server.ports.events}")
        rng = random.Random(5)
        while not self._socket.poll(200):  # until its subscription stands, it hears nothing
            server.generate([rng.randrange(5, 512) for _ in range(40)])
        self.live: set[int] = set()
        self.next = 0

    def begin(self, snapshot: list[dict[str, Any]]) -> None:
        self.live = {page for chunk in snapshot for event in chunk["events"] for page in event["block_hashes"]}
        self.next = snapshot[0]["position"]

    def apply_until(self, sequence: int) -> None:
        while self.next < sequence:
            assert self._socket.poll(60_000), f"no batch {self.next}"
            _, number, payload = self._socket.recv_multipart()
            if int.from_bytes(number, "big") < self.next:
                continue
            assert int.from_bytes(number, "big") == self.next
            self.next += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    self.live.update(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.live.difference_update(event["block_hashes"])
                else:
                    self.live.clear()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_late_reader_is_exact_after_the_snapshot_and_stays_so(servers: Servers, page_size: int) -> None:
    server = servers.rlt[page_size]
    for number in range(12):
        server.generate([20 + number] * 220)
    reader = Subscriber(server)
    server.generate([90] * 100)
    reader.begin(ask(server, "snapshot"))
    rng = random.Random(3)
    for _ in range(3):
        for _ in range(12):
            server.generate([rng.randrange(5, 60) for _ in range(rng.randrange(40, 300))])
        (state,) = ask(server, "state")
        reader.apply_until(state["sequence"])
        assert len(reader.live) == state["pages"] > 0
        assert sum(reader.live) % 2**64 == state["digest"]
    reader.close()


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_server_proves_that_rlt_is_at_work(servers: Servers, page_size: int) -> None:
    server = servers.rlt[page_size]
    (before,) = ask(server, "state")
    for number in range(15):
        server.generate([300 + number] * 290)
    (after,) = ask(server, "state")
    assert before["epoch"] == after["epoch"]
    assert after["capacity_tokens"] == CACHE_TOKENS
    assert after["page_size"] == page_size
    eviction = after["eviction"]
    assert (eviction["policy"], eviction["live"], eviction["seed"]) == ("rlt", True, 11)
    assert eviction["evicted_tokens"] > before["eviction"]["evicted_tokens"]
    assert eviction["phase"] > before["eviction"]["phase"]
    assert server.get("/server_info")["radix_cache_backend"] == "rlt"


def test_each_process_has_an_epoch_of_its_own(servers: Servers) -> None:
    epochs = {ask(server, "state")[0]["epoch"] for server in servers.rlt.values()}
    assert len(epochs) == 2


def test_an_unsupported_setup_ends_the_start_with_the_reason(starting_refused: Future[str]) -> None:
    log = starting_refused.result()
    assert "KVROUTING_ENGINE_POLICY is 'fifo'" in log
