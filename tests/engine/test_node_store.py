"""The shelf of live nodes, and the pauses of the thread that walks over it."""

from __future__ import annotations

import random
from types import SimpleNamespace

from kvrouting_sglang.node_store import NodeStore
from kvrouting_sglang.pauses import Pauses


def test_a_walk_sees_what_is_there() -> None:
    store, rng = NodeStore(), random.Random(0)
    nodes = {number: SimpleNamespace(id=number) for number in range(5000)}
    for node in nodes.values():
        store.put(node)
    gone = rng.sample(sorted(nodes), 3000)
    for number in gone:
        store.take(nodes.pop(number))
        store.take(SimpleNamespace(id=number))
    for after in (-1, 0, 255, 256, 3111, 4999):
        lists = list(store.walk(after=after))
        assert all(len(each) <= 256 for each in lists)
        assert [node.id for each in lists for node in each] == [number for number in nodes if number > after]
    assert store.newest == 4999
    store.clear()
    assert list(store.walk()) == []


def test_nodes_may_come_and_go_during_a_walk() -> None:
    store = NodeStore()
    nodes = [SimpleNamespace(id=number) for number in range(2000)]
    for node in nodes[:1000]:
        store.put(node)
    seen = []
    for each in store.walk():
        seen += [node.id for node in each]
        for node in nodes[: len(seen)]:
            store.take(node)
        if store.newest < 1999:
            store.put(nodes[store.newest + 1])
    assert seen[:1000] == list(range(1000))


def test_work_is_interrupted_after_its_time() -> None:
    now_s = [0.0]
    slept: list[float] = []
    pauses = Pauses(clock_s=lambda: now_s[0], sleep_s=slept.append)
    for _ in range(10):
        now_s[0] += 0.0001
        pauses.between_steps()
    assert len(slept) == 2
    pauses.rest()
    assert len(slept) == 3
