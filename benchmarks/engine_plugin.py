"""What the plug-in costs inside SGLang, against SGLang's own LRU in its Python tree and its Rust tree, in one run.

For trees of 1k, 10k and 100k leaves: CPU time per evicted token, per insert and per match, and how long the thread of
the state socket keeps the interpreter at a stretch. Needs SGLang: `make bench-engine`, or in its environment
`python -m benchmarks.engine_plugin [--quick]`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec

from kvrouting_core.service_time import WORKER_CLASSES

TRUNK_TOKENS, TAIL_TOKENS, TAILS_PER_TRUNK = 64, 32, 32
PREFILL_TOKENS = 2048
CALL_TOKENS = (64, PREFILL_TOKENS)

CARDS = ("L40", "H200")
"""Worker classes whose prefill step the eviction is compared with: the time model of kvrouting_core."""


@dataclass(frozen=True)
class Measured:
    """CPU microseconds, medians."""

    evict_us_per_token: dict[int, float]
    insert_us: float
    match_us: float


class Load:
    """A tree of so many leaves, and requests that add one."""

    def __init__(self, cache: Any, leaves: int) -> None:
        from tests.engine.real import caches

        self.cache = cache
        self._serve, self._admit = caches.serve, caches.admit
        self._rng = random.Random(leaves)
        self._trunks = [self._tokens(TRUNK_TOKENS) for _ in range(max(1, leaves // TAILS_PER_TRUNK))]
        for _ in range(leaves):
            self.insert()

    def path(self) -> list[int]:
        return self._rng.choice(self._trunks) + self._tokens(TAIL_TOKENS)

    def insert(self) -> None:
        self._serve(self.cache, self.path())
        self.cache.take_events()

    def match(self, path: list[int]) -> None:
        self.cache.unlock(self._admit(self.cache, path).lock)

    def evict(self, tokens: int) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        freed: int = self.cache.evict_for_alloc(EvictParams(num_tokens=tokens)).num_tokens_evicted
        return freed

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100_000) for _ in range(count)]


def cpu_us(work: Callable[[], Any]) -> float:
    """CPU time of one call."""
    started = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started) / 1000


def measure(load: Load, rounds: int) -> Measured:
    """Every round evicts and fills up again, untimed."""
    evict: dict[int, list[float]] = {tokens: [] for tokens in CALL_TOKENS}
    inserts, matches = [], []
    for tokens in CALL_TOKENS:
        for _ in range(rounds):
            freed = [0]

            def work(freed: list[int] = freed, tokens: int = tokens) -> None:
                freed[0] = load.evict(tokens)

            spent = cpu_us(work)
            evict[tokens].append(spent / freed[0])
            refill = max(1, freed[0] // TAIL_TOKENS)
            inserts += [cpu_us(load.insert) for _ in range(refill)]
            path = load.path()
            load.match(path)
            matches.append(cpu_us(partial(load.match, path)))
    return Measured(
        {tokens: statistics.median(each) for tokens, each in evict.items()},
        statistics.median(inserts),
        statistics.median(matches),
    )


def holds_ms(cache: Any) -> tuple[float, float, float]:
    """How long a snapshot's thread works without letting go of the interpreter: (99 of 100 stretches, the longest, all
    of them together).

    CPU time, so that a busy machine counts less; what a hypervisor takes away in between is in it, and shows in the
    longest of many. Encoding of the chunks included.
    """
    from kvrouting_sglang.engine_state import EngineState, RankIdentity
    from kvrouting_sglang.pauses import Pauses
    from kvrouting_sglang.tree_reader import TreeReader

    marks = [time.thread_time()]
    holds: list[float] = []

    def rest(seconds: float) -> None:
        holds.append(time.thread_time() - marks[-1])
        time.sleep(seconds)
        marks.append(time.thread_time())

    identity = RankIdentity(epoch="bench", dp_rank=0, events_port=None, policy="rlt", seed=0)
    reader = TreeReader(cache.tree_core, pauses=Pauses(sleep_s=rest))
    encoder = msgspec.msgpack.Encoder()
    for answer in EngineState(cache, identity=identity, reader=reader).snapshot():
        encoder.encode(answer)
    holds.append(time.thread_time() - marks[-1])
    holds.sort()
    return holds[int(0.99 * len(holds))] * 1000, holds[-1] * 1000, sum(holds) * 1000


def builders() -> dict[str, Callable[[int], Any]]:
    """The caches that are compared, each made with so many slots."""
    from tests.engine.real.caches import policy_cache, stock_cache

    return {
        "RLT, our tree": lambda slots: policy_cache(capacity=slots, page_size=1),
        "rlt-adaptive, our tree": lambda slots: policy_cache(capacity=slots, page_size=1, policy="rlt-adaptive"),
        "LRU, Python tree": lambda slots: stock_cache(capacity=slots, page_size=1, tree="python"),
        "LRU, Rust tree": lambda slots: stock_cache(capacity=slots, page_size=1, tree="rust"),
    }


def main() -> None:
    """Prints the tables of docs/engine.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller trees and fewer rounds")
    quick = parser.parse_args().quick
    if find_spec("sglang") is None:
        print("SGLang is not installed here: `make bench-engine` measures the plug-in in an environment that has it")
        return
    from tests.engine.real.caches import policy_cache, serve

    holds: list[tuple[str, float, float, float]] = []
    sizes, rounds = ((1_000,), 5) if quick else ((1_000, 10_000, 100_000), 15)
    print(f"CPU µs; page size 1, KV events on; an insert adds {TAIL_TOKENS} tokens below a path of {TRUNK_TOKENS}")
    heads = " | ".join(f"evict {tokens}: µs/token" for tokens in CALL_TOKENS)
    print(f"| leaves | cache | {heads} | insert | match | eviction for a prefill of {PREFILL_TOKENS} |")
    print("|---|---|" + "---|" * (len(CALL_TOKENS) + 3))
    for leaves in sizes:
        for name, build in builders().items():
            # No more slots than the tree takes: freeing costs SGLang's allocators a copy of their whole free list.
            load = Load(build(leaves * TAIL_TOKENS + (leaves // TAILS_PER_TRUNK + 32) * TRUNK_TOKENS), leaves)
            row = measure(load, rounds)
            evicted_ms = row.evict_us_per_token[PREFILL_TOKENS] * PREFILL_TOKENS / 1000
            steps = {card: WORKER_CLASSES[card].times.prefill_ms([(0, PREFILL_TOKENS)]) for card in CARDS}
            shares = ", ".join(f"{evicted_ms / step:.1%} of it on {card}" for card, step in steps.items())
            costs = " | ".join(f"{cost:.2f}" for cost in row.evict_us_per_token.values())
            print(f"| {leaves} | {name} | {costs} | {row.insert_us:.0f} | {row.match_us:.0f} | {shares} |", flush=True)
            if name == "RLT, our tree":
                holds.append((f"{leaves} leaves", *holds_ms(load.cache)))
    document = policy_cache(capacity=200_000, page_size=1)
    serve(document, range(131_072))
    holds.append(("one document of 131,072 tokens", *holds_ms(document)))
    for what, most, longest, whole in holds:
        intervals = f"99 of 100 stretches at most {most:.2f} ms, the longest {longest:.2f}"
        print(f"snapshot of {what}: {whole:.0f} ms of CPU time; {intervals}")


if __name__ == "__main__":
    main()
