"""The shelf of live nodes, and the pauses of the thread that walks over it."""

from __future__ import annotations

import random
from types import SimpleNamespace

from kvrouting_sglang.node_shelf import NodeShelf
from kvrouting_sglang.pauses import Pauses


def test_a_walk_sees_what_is_there() -> None:
    shelf, rng = NodeShelf(), random.Random(0)
    nodes = {number: SimpleNamespace(id=number) for number in range(5000)}
    for node in nodes.values():
        shelf.put(node)
    gone = rng.sample(sorted(nodes), 3000)
    for number in gone:
        shelf.take(nodes.pop(number))
        shelf.take(SimpleNamespace(id=number))
    for after in (-1, 0, 255, 256, 3111, 4999):
        lists = list(shelf.walk(after=after))
        assert all(len(each) <= 256 for each in lists)
        assert [node.id for each in lists for node in each] == [number for number in nodes if number > after]
    assert shelf.newest == 4999
    shelf.clear()
    assert list(shelf.walk()) == []


def test_nodes_may_come_and_go_during_a_walk() -> None:
    shelf = NodeShelf()
    nodes = [SimpleNamespace(id=number) for number in range(2000)]
    for node in nodes[:1000]:
        shelf.put(node)
    seen = []
    for each in shelf.walk():
        seen += [node.id for node in each]
        for node in nodes[: len(seen)]:
            shelf.take(node)
        if shelf.newest < 1999:
            shelf.put(nodes[shelf.newest + 1])
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
