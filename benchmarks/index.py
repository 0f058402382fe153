"""Hashing, prefix index and tree mirror: CPU time and memory, each as a ratio to a plain way to do the same.

One process; each round measures every row of a table once, in turn, so that a ratio compares like with like.
`python -m benchmarks.index [--quick] [--blocks N]`
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrouting_core.blocks import ChainHasher, Namespace, Words
from kvrouting_core.identity import WorkerId
from kvrouting_core.prefix_index import PrefixIndex
from kvrouting_core.tree_mirror import TreeMirror

KEY = bytes(range(32))
PROMPT_TOKENS = 8192
WORKERS = [WorkerId(f"pod-{i:02}/0") for i in range(64)]
MESSAGE_BLOCKS = 1024
RUN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do a job. work(round) does it once; units: what one call handles, for the rate."""

    name: str
    work: Callable[[int], object]
    units: int = 1


def repeat(work: Callable[..., object], *arguments: object) -> Callable[[int], object]:
    """The same call in each round."""
    return lambda _: work(*arguments)


def in_turn(work: Callable[..., object], inputs: Sequence[object]) -> Callable[[int], object]:
    """The next input in each round."""
    return lambda number: work(inputs[number % len(inputs)])


def measure(rows: list[Row], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each call, row by row in turn."""
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            began = time.thread_time()
            row.work(number)
            seconds[row.name].append(time.thread_time() - began)
    return seconds


def table(title: str, rows: list[Row], rounds: int) -> None:
    """Medians; the first row is the baseline of the ratios."""
    seconds = {name: statistics.median(values) for name, values in measure(rows, rounds).items()}
    unit = seconds[rows[0].name] / rows[0].units
    print(f"\n{title}\n  {'':<44} {'p50 µs':>9} {'units/s':>9} {'time a unit to ' + rows[0].name:>32}")
    for row in rows:
        spent = seconds[row.name]
        rate = f"{row.units / spent / 1e6:.2f}M" if row.units > 1 else ""
        print(f"  {row.name:<44} {spent * 1e6:>9.1f} {rate:>9} {spent / row.units / unit:>32.3f}")


# --- hashing ---


def sha256_chain(tokens: array[int], block_size: int) -> list[bytes]:
    """A chain of one cryptographic hash for each block."""
    digest, data, step = b"", tokens.tobytes(), 4 * block_size
    digests = []
    for start in range(0, len(data), step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        digests.append(digest)
    return digests


def hashing(rounds: int) -> None:
    tokens = array("I", (random.Random(1).randrange(128_000) for _ in range(PROMPT_TOKENS)))
    as_list, namespace = tokens.tolist(), Namespace(model="m")
    for block_size in (16, 64):
        hasher = ChainHasher(KEY, block_size)
        rows = [
            Row("sha256 chain", repeat(sha256_chain, tokens, block_size), PROMPT_TOKENS),
            Row("keyed prefix sum, array", repeat(hasher.hash_blocks, namespace, tokens), PROMPT_TOKENS),
            Row("keyed prefix sum, list", repeat(hasher.hash_blocks, namespace, as_list), PROMPT_TOKENS),
        ]
        table(f"hash {PROMPT_TOKENS} tokens, block {block_size} (units: tokens)", rows, rounds)


# --- index ---


class SetsPerWorker:
    """The plain way: the blocks of each worker in a set of its own."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, set[int]] = {worker: set() for worker in WORKERS}

    def match(self, blocks: list[int]) -> dict[WorkerId, int]:
        """Bisection for each worker apart."""
        matched = {}
        for worker, held in self.held.items():
            least, most = 0, len(blocks)
            while least < most:
                middle = (least + most + 1) >> 1
                if blocks[middle - 1] in held:
                    least = middle
                else:
                    most = middle - 1
            if least:
                matched[worker] = least
        return matched


def random_blocks(rng: np.random.Generator, count: int) -> Words:
    """Hashes of blocks that nobody asks for."""
    return rng.integers(0, 2**64, count, dtype=np.uint64)


def fill(index: PrefixIndex, sets: SetsPerWorker, blocks: int, rng: np.random.Generator) -> None:
    """`blocks` distinct blocks, spread over the workers in messages; a second worker holds every fourth."""
    for number in range(blocks // MESSAGE_BLOCKS):
        message = random_blocks(rng, MESSAGE_BLOCKS).tolist()
        for offset in (0, 1) if number % 4 == 0 else (0,):
            worker = WORKERS[(number + offset) % len(WORKERS)]
            index.add(worker, message)
            sets.held[worker].update(message)


def prompts(
    index: PrefixIndex, sets: SetsPerWorker, length: int, rng: np.random.Generator, *, spread: bool
) -> list[list[int]]:
    """Prompts whose first quarter all workers hold and eight hold more; spread: each holds another depth."""
    chance, made = random.Random(length), []
    for _ in range(100):
        prompt = random_blocks(rng, length).tolist()
        depths = dict.fromkeys(WORKERS, length // 4)
        if spread:
            depths = {worker: length * (i + 1) // len(WORKERS) for i, worker in enumerate(WORKERS)}
        else:
            depths |= {w: chance.randrange(length // 4, length + 1) for w in chance.sample(WORKERS, 8)}
        for worker, depth in depths.items():
            index.add(worker, prompt[:depth])
            sets.held[worker].update(prompt[:depth])
        made.append(prompt)
    return made


def lookup(index: PrefixIndex, sets: SetsPerWorker, rounds: int, rng: np.random.Generator) -> None:
    for block_size in (64, 16):
        for spread in (False, True):
            asked = prompts(index, sets, PROMPT_TOKENS // block_size, rng, spread=spread)
            arrays = [np.array(prompt, dtype=np.uint64) for prompt in asked]
            rows = [
                Row("a set per worker, bisection", in_turn(sets.match, asked)),
                Row("block → mask, walk", in_turn(index.walk, asked)),
                Row("block → mask, bisection, list", in_turn(index.match, asked)),
                Row("block → mask, bisection, numpy", in_turn(index.match, arrays)),
            ]
            shape = "each worker at another depth" if spread else "a shared quarter, 8 deeper"
            table(f"lookup, {len(WORKERS)} workers, 8k tokens, block {block_size}, {shape}", rows, rounds)


def updates(index: PrefixIndex, sets: SetsPerWorker, rounds: int, rng: np.random.Generator) -> None:
    messages = [random_blocks(rng, MESSAGE_BLOCKS) for _ in range(rounds)]
    worker, other = WORKERS[3], WORKERS[4]
    rows = [
        Row("set.update", lambda n: sets.held[worker].update(messages[n].tolist()), MESSAGE_BLOCKS),
        Row("add, new blocks", lambda n: index.add(worker, messages[n]), MESSAGE_BLOCKS),
        Row("add, blocks that another holds", lambda n: index.add(other, messages[n]), MESSAGE_BLOCKS),
        Row("add, blocks that it holds", lambda n: index.add(other, messages[n]), MESSAGE_BLOCKS),
        Row("remove, blocks that another holds", lambda n: index.remove(other, messages[n]), MESSAGE_BLOCKS),
        Row("remove, blocks of its own", lambda n: index.remove(worker, messages[n]), MESSAGE_BLOCKS),
    ]
    table(f"delta ingest, {MESSAGE_BLOCKS} blocks a message, numpy (units: blocks)", rows, rounds)


def memory(index: PrefixIndex, sets: SetsPerWorker) -> None:
    """Containers, keys and masks, by the interpreter's own sizes."""
    shards = index._shards
    masks = {id(mask): mask for shard in shards for mask in shard.values()}
    keys = sum(map(sys.getsizeof, _every_key(shards)))
    index_bytes = sum(map(sys.getsizeof, shards)) + keys + sum(map(sys.getsizeof, masks.values()))
    pairs = sum(map(len, sets.held.values()))
    set_bytes = sum(map(sys.getsizeof, sets.held.values())) + keys
    blocks = len(index)
    print(f"\nmemory, {blocks} distinct blocks, {pairs} (worker, block) pairs")
    print(f"  {'':<44} {'bytes a block':>14} {'to a set per worker':>20}")
    for name, size in (("a set per worker", set_bytes), ("block → mask", index_bytes)):
        print(f"  {name:<44} {size / blocks:>14.1f} {size / set_bytes:>20.3f}")


def _every_key(shards: Iterable[dict[int, int]]) -> Iterator[int]:
    for shard in shards:
        yield from shard


def dropping(index: PrefixIndex, sets: SetsPerWorker) -> None:
    """The longest time that a caller waits when a worker with its share of the blocks goes."""
    worker = WORKERS[-1]
    count = index.count(worker)
    began = time.thread_time()
    for block in sets.held.pop(worker):
        index.remove(worker, [block])
    plain = time.thread_time() - began
    worker = WORKERS[-2]
    began = time.thread_time()
    index.drop(worker)
    steps = [time.thread_time() - began]
    more = True
    while more:
        began = time.thread_time()
        more = index.sweep(4096)
        steps.append(time.thread_time() - began)
    print(f"\ndrop a worker with {count} blocks: the longest wait of a caller")
    for name, wait in (("remove its blocks one by one", plain), ("drop and sweep in steps of 4096", max(steps))):
        print(f"  {name:<44} {wait * 1e3:>9.2f} ms {wait / plain:>10.3f}")


# --- mirror ---


def mirror_events(rounds: int) -> list[tuple[list[int], list[int]]]:
    """Page hashes and tokens of runs of one-token pages."""
    rng = random.Random(5)
    return [
        (
            [rng.randrange(-(2**63), 2**63) for _ in range(RUN_TOKENS)],
            [rng.randrange(128_000) for _ in range(RUN_TOKENS)],
        )
        for _ in range(rounds)
    ]


def mirror(rounds: int) -> None:
    runs = mirror_events(rounds)
    tree = TreeMirror(ChainHasher(KEY, 64), model="m", exact=True)
    plain: dict[int, tuple[int | None, int]] = {}
    half = RUN_TOKENS // 2

    def store_in_dictionary(number: int) -> None:
        parent: int | None = None
        for page, token in zip(*runs[number], strict=True):
            plain[page] = (parent, token)
            parent = page

    def trim_tails(number: int) -> None:
        for page in runs[number][0][: half - 1 : -1]:
            tree.removed([page])

    rows = [
        Row("one dictionary entry a page", store_in_dictionary, RUN_TOKENS),
        Row(
            f"store runs of {RUN_TOKENS} pages",
            lambda n: tree.stored(None, *runs[n], page_size=1),
            RUN_TOKENS,
        ),
        Row("store a run again", lambda n: tree.stored(None, *runs[n], page_size=1), RUN_TOKENS),
        Row("trim tails, one page an event", trim_tails, half),
        Row("trim a tail in one event", lambda n: tree.removed(runs[n][0][half // 2 : half]), half // 2),
    ]
    table("mirror, page 1, block 64 (units: tokens)", rows, rounds)


def main() -> None:
    """Prints every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and 200 thousand blocks")
    parser.add_argument("--blocks", type=int, help="distinct blocks in the index (default: 1 million)")
    options = parser.parse_args()
    rounds = 50 if options.quick else 500
    blocks = options.blocks or (200_000 if options.quick else 1_000_000)
    rng = np.random.default_rng(1)
    hashing(rounds)
    index, sets = PrefixIndex(), SetsPerWorker()
    fill(index, sets, blocks, rng)
    memory(index, sets)
    lookup(index, sets, rounds, rng)
    updates(index, sets, rounds, rng)
    dropping(index, sets)
    mirror(rounds)


if __name__ == "__main__":
    main()
