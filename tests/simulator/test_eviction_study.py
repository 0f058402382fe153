"""The study of eviction policies: what it runs, what it keeps, what it shows."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrouting_core.radix_cache import RadixCache
from kvrouting_simulator.eviction_study import pages
from kvrouting_simulator.eviction_study.arc_rule import arc_on_the_tree
from kvrouting_simulator.eviction_study.command import evictions
from kvrouting_simulator.eviction_study.loads import LOADS
from kvrouting_simulator.eviction_study.outcomes import POLICY_TITLES, Case, Outcome, OutcomeFile, cases, run_case

NOWHERE = Path("nowhere")


@pytest.mark.parametrize("load", [name for name, load in LOADS.items() if load.trace is None])
def test_a_load_is_the_same_for_a_seed_and_repeats_prefixes(load: str) -> None:
    first, again, other = (LOADS[load].prompts(seed, NOWHERE) for seed in (1, 1, 2))
    assert first == again
    assert load == "gsp-round-robin" or first != other
    unlimited = RadixCache(capacity_tokens=1 << 40, page_size=64, policy=arc_on_the_tree(random.Random(0)))
    hits = sum(map(unlimited.serve, first[:600]))
    assert load.startswith("gsp") or 0.2 < hits / sum(map(len, first[:600])) < 0.95


def test_arc_keeps_what_was_seen_again_from_a_scan() -> None:
    cache = RadixCache(capacity_tokens=64 * 40, page_size=64, policy=arc_on_the_tree(random.Random(1)))
    hot = [array("I", [number] * 128) for number in range(8)]
    for prompt in hot * 2:
        cache.serve(prompt)
    for number in range(200):
        cache.serve(array("I", [1000 + number] * 128))
    assert sum(cache.match(prompt).tokens for prompt in hot) == 8 * 128


def test_arc_gives_room_to_recency_when_it_misses_what_it_just_evicted() -> None:
    """A working set of one-time pages that turns into a repeated one is kept in the end."""
    cache = RadixCache(capacity_tokens=64 * 20, page_size=64, policy=arc_on_the_tree(random.Random(1)))
    old = [array("I", [number] * 64) for number in range(16)]
    for prompt in old * 3:
        cache.serve(prompt)
    new = [array("I", [100 + number] * 64) for number in range(16)]
    for prompt in new * 12:
        cache.serve(prompt)
    assert sum(cache.serve(prompt) for prompt in new) > 0.8 * 16 * 64


@pytest.mark.parametrize("policy", list(POLICY_TITLES))
def test_every_policy_runs_and_none_beats_the_optimum(policy: str) -> None:
    rng = random.Random(3)
    heads = [array("I", rng.randbytes(4 * 256)) for _ in range(12)]
    prompts = [heads[int(rng.random() ** 2 * 12)] + array("I", rng.randbytes(4 * 128)) for _ in range(150)]
    case = Case(load="chat", capacity_tokens=3000, page_size=64, policy=policy, seed=1)
    outcome = run_case(case, prompts)
    best = run_case(Case(load="chat", capacity_tokens=3000, page_size=64, policy="opt", seed=1), prompts)
    assert 0 < outcome.hit_rate <= best.hit_rate
    assert run_case(case, prompts) == outcome
    assert (outcome.own_loads > 0) == (policy == "rlt-adaptive")
    assert outcome.share_of_bound <= 1


def test_what_has_no_chance_in_it_runs_once() -> None:
    planned = cases(["gsp-round-robin"], ["lru", "rlt"], [1, 2], 64)
    assert [(case.policy, case.seed) for case in planned if case.capacity_tokens == 197_000] == [
        ("lru", 1),
        ("rlt", 1),
        ("rlt", 2),
    ]
    assert len(cases(["chat"], ["lru"], [1, 2], 64)) == 2 * len(LOADS["chat"].capacities_tokens)


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    file = OutcomeFile(tmp_path / "hit_rates.csv")
    for page_size in (1, 64):
        for seed, rate in ((1, 0.25), (2, 0.35)):
            case = Case(load="chat", capacity_tokens=60_000, page_size=page_size, policy="rlt-adaptive", seed=seed)
            file.add(Outcome(case=case, hit_rate=rate, own_loads=7, ghost_loads=9, share_of_bound=0.5))
    file.add(Outcome(case=Case(load="chat", capacity_tokens=60_000, page_size=64, policy="opt", seed=1), hit_rate=0.5))
    again = OutcomeFile(tmp_path / "hit_rates.csv")
    assert again.outcomes == file.outcomes
    line = "| chat | 60k | – | – | – | – | **.300 ± .071** | .500 |"
    assert line in pages.table(again.outcomes.values()).splitlines()
    assert "| chat | 60k | .300 ± .071 | .300 ± .071 |" in pages.blocks(again.outcomes.values())
    assert pages.plot(again.outcomes.values()).startswith(b"\x89PNG")


def test_the_command_leaves_out_what_it_has_no_trace_for_and_runs_nothing_twice(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--seed", "1", "--policy", "lru", "--traces", str(tmp_path)]
    options += ["--load", "documents", "--capacity", "120000", "--load", "mooncake"]
    first = CliRunner().invoke(evictions, options)
    assert first.exit_code == 0, first.output
    assert "mooncake: left out" in first.output
    assert "documents 120000 lru seed 1" in first.output
    table = (tmp_path / "table.md").read_text()
    again = CliRunner().invoke(evictions, options)
    assert "seed 1" not in again.output
    assert (tmp_path / "table.md").read_text() == table


def test_the_documentation_shows_the_table_of_the_committed_results() -> None:
    docs = Path(__file__).parents[2] / "docs"
    outcomes = OutcomeFile(docs / "results/eviction/hit_rates.csv").outcomes.values()
    text = (docs / "eviction.md").read_text(encoding="utf-8")
    assert pages.table(outcomes) in text
    assert pages.blocks(outcomes) in text
    assert (docs / "results/eviction/table.md").read_text(encoding="utf-8").startswith(pages.table(outcomes))


def test_the_committed_results_keep_to_the_theorem() -> None:
    outcomes = OutcomeFile(Path(__file__).parents[2] / "docs/results/eviction/hit_rates.csv").outcomes.values()
    adaptive = [outcome for outcome in outcomes if outcome.case.policy == "rlt-adaptive"]
    assert adaptive
    assert all(0 < outcome.share_of_bound <= 1 for outcome in adaptive)
