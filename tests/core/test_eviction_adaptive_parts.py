"""The parts that the learning eviction is made of, each against its definition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.eviction.adaptive import BlockRecord, LearnedRule
from kvrouting_core.eviction.adaptive.ages import BUCKETS, AgeBuckets
from kvrouting_core.eviction.adaptive.debt import Debt
from kvrouting_core.eviction.adaptive.gittins import AgeGrid, index_at_edges
from kvrouting_core.eviction.adaptive.leaf_pool import LeafPool
from kvrouting_core.eviction.adaptive.learned_rule import CANDIDATES
from kvrouting_core.eviction.adaptive.monitor import Monitor
from kvrouting_core.eviction.adaptive.ring import Ring


def test_phi_is_clamped_below_and_safe_mode_has_hysteresis() -> None:
    debt = Debt(capacity=100, epsilon=0.0, beta=0.25, credit=0.1)
    debt.settle(own=0, ghost=500)
    assert debt.phi == -10
    debt.settle(own=35, ghost=0)
    assert not debt.is_safe
    debt.settle(own=1, ghost=0)
    assert debt.is_safe
    debt.settle(own=0, ghost=13)
    assert debt.is_safe
    debt.settle(own=0, ghost=1)
    assert (debt.is_safe, debt.safe_entries) == (False, 1)
    with pytest.raises(ValueError, match="beta must not be negative, got -1"):
        Debt(capacity=1, epsilon=0, beta=-1, credit=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    uses=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 400)), max_size=60),
    settle_every=st.integers(1, 20),
)
def test_the_monitor_counts_exposure_as_its_definition(uses: list[tuple[int, int, int]], settle_every: int) -> None:
    """Time at each age, summed up one unit of time at a time."""
    monitor = Monitor(64)
    ages = AgeBuckets(64)
    since: dict[int, tuple[int, int]] = {}
    exposure: dict[int, list[float]] = {}
    hits: dict[int, list[int]] = {}

    def spend(name: int, until: int) -> None:
        label, start = since[name]
        for unit in range(until - start):
            for bucket in range(BUCKETS):
                low = ages.starts[bucket]
                high = low + ages.widths[bucket]
                exposure.setdefault(label, [0.0] * BUCKETS)[bucket] += max(0.0, min(high, unit + 1) - max(low, unit))

    now = 0
    for number, (name, label, gap) in enumerate(uses):
        now += gap
        if name in since:
            spend(name, now)
            old_label, start = since[name]
            hits.setdefault(old_label, [0] * BUCKETS)[ages.of(now - start)] += 1
        since[name] = (label, now)
        monitor.used(name, label, now=now)
        if number % settle_every == 0:
            monitor.settle(now=now)
    for name in since:
        spend(name, now)
    monitor.settle(now=now)
    for label, counts in monitor.counts.items():
        assert counts.exposure == pytest.approx(exposure.get(label, [0.0] * BUCKETS), abs=1e-6)
        assert counts.hits == hits.get(label, [0] * BUCKETS)


def pool_of(count: int) -> LeafPool:
    pool = LeafPool()
    for number in range(count):
        leaf = BlockRecord(None, 1)
        leaf.accessed, leaf.tail_label = 1000 + number, number % 256
        pool.add(leaf)
    return pool


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 100, 1000])
def test_a_sample_is_of_different_leaves_each_as_likely_as_any_other(count: int) -> None:
    pool = pool_of(count)
    rule = LearnedRule(random.Random(2))
    drawn: list[Sequence[int]] = []

    class Watched(LeafPool):
        def every(self, stride: int, first: int, size: int) -> tuple[Sequence[int], bytearray]:
            accessed, labels = pool.every(stride, first, size)
            drawn.append(accessed)
            assert list(labels) == [(then - 1000) % 256 for then in accessed]
            return accessed, labels

    watched = Watched()
    watched.leaves = pool.leaves
    rounds = 4000
    for _ in range(rounds):
        rule._now += 1000 + count  # so that the reserve is of no use
        assert rule.pick(watched) in pool.leaves
    assert all(len(set(accessed)) == min(count, CANDIDATES) for accessed in drawn)
    times = Counter(then for accessed in drawn for then in accessed)
    expected = rounds * min(1.0, CANDIDATES / count)
    assert len(times) == count
    assert all(abs(seen - expected) < 6 * expected**0.5 for seen in times.values())


def test_the_pick_is_the_lowest_index_of_the_sample_at_any_age() -> None:
    rng = random.Random(5)
    pool = pool_of(CANDIDATES)
    rule = LearnedRule(random.Random(2))
    rule.sized(300)
    for _ in range(200):
        rule._now += 50_000
        for leaf in pool:
            leaf.accessed = rule._now - int(2 ** rng.uniform(0, 15.5))  # up to far beyond sixteen capacities
            leaf.tail_label = rng.choice([0, 0x40, 0x81, 0xC2])
            pool.refresh(leaf)
        assert rule.index_of(rule.pick(pool)) == min(map(rule.index_of, pool))


def test_the_second_lowest_is_next_unless_it_is_used_or_gone_or_time_has_passed() -> None:
    def second(change: str) -> bool:
        pool = pool_of(CANDIDATES)
        rule = LearnedRule(random.Random(2))
        rule.sized(3000)
        rule._now = 5000
        first, expected = sorted(pool, key=rule.index_of)[:2]
        assert rule.pick(pool) is first
        pool.remove(first)
        if change == "used":
            expected.accessed = rule.now
            pool.refresh(expected)
        elif change == "gone":
            pool.remove(expected)
        elif change == "time":
            rule._now += 1000
            newcomer = BlockRecord(None, 1)
            newcomer.accessed, newcomer.tail_label = 1, first.tail_label
            pool.add(newcomer)
        return rule.pick(pool) is expected

    assert [second(change) for change in ("", "used", "gone", "time")] == [True, False, False, False]


def test_the_grid_of_ages_is_fine_enough_for_the_index() -> None:
    for capacity in (1, 40, 300, 5000, 200_000):
        ages = AgeBuckets(capacity)
        grid = AgeGrid(ages, capacity)
        table = grid.between(ages.starts)
        for share in (1 / 16, 0.3, 1, 2, 7.9):
            age = max(1, round(share * capacity))
            assert table[grid.step_of(age)] == pytest.approx(age, rel=0.35, abs=capacity / 16)
        assert table[grid.step_of(10**9)] == pytest.approx(8 * capacity)


def test_the_index_of_a_constant_rate_is_that_rate() -> None:
    ages = AgeBuckets(1000)
    assert index_at_edges([0.01] * BUCKETS, ages) == pytest.approx([0.01] * BUCKETS)


def test_the_index_looks_beyond_a_lull() -> None:
    """A rate that rises later is worth waiting for, if the wait is short beside it; a falling one counts as it is."""
    ages = AgeBuckets(1000)
    falling = index_at_edges([1 / (1 + bucket) ** 2 / 100 for bucket in range(BUCKETS)], ages)
    assert falling == sorted(falling, reverse=True)
    peak = [1e-6] * BUCKETS
    peak[9] = 0.02
    rising = index_at_edges(peak, ages)
    assert rising[0] > 100 * 1e-6
    assert rising[8] > rising[0]
    assert rising[9] == pytest.approx(0.02)
    assert rising[10] < 1e-5


def test_the_ring_remembers_the_latest_only() -> None:
    ring = Ring()
    for name in (1, 2, 3, 1, 4):
        ring.put(name, name + 10, memory=3)
    assert [name for name in range(6) if name in ring] == [1, 3, 4]
    assert (ring.take(3), ring.take(3), len(ring)) == (13, None, 2)
    ring.put(5, 0, memory=0)
    assert len(ring) == 0
