"""The generators make what their definitions say."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_simulator.workloads import Gsp, LongDocuments, MultiTurn, Workload, WorkloadSpec, build_workload


def best_hit_rate(workload: Workload) -> float:
    """Share of prompt tokens that a cache without limit finds, requests one after the other."""
    cache = RadixCache(capacity_tokens=1 << 40, policy=make_policy("lru", random.Random(0)))
    hits = sum(min(cache.serve(item.tokens), len(item.tokens) - 1) for item in workload.items)
    return hits / sum(len(item.tokens) for item in workload.items)


def shared(a: object, b: object) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):  # type: ignore[call-overload]
        if left != right:
            break
        count += 1
    return count


def test_gsp_has_4096_prompts_of_the_five_lengths_and_a_best_hit_rate_of_484() -> None:
    workload = Gsp().workload(seed=1)
    assert len(workload) == 4096
    lengths = Counter(len(item.tokens) for item in workload.items)
    assert lengths == {512: 26 * 32, 1024: 26 * 32, 2048: 26 * 32, 4096: 25 * 32, 8192: 25 * 32}
    assert {item.output_tokens for item in workload.items} == {4}
    assert best_hit_rate(workload) == pytest.approx(0.484, abs=0.0005)


def test_prompts_of_a_gsp_group_share_half_and_those_of_others_nothing() -> None:
    items = Gsp(order="grouped").workload(seed=1).items
    assert shared(items[0].tokens, items[1].tokens) == 256
    assert shared(items[0].tokens, items[32].tokens) == 0


def test_gsp_orders() -> None:
    def sessions(order: str) -> list[str]:
        spec = Gsp(groups=3, prompts_per_group=2, lengths_tokens=(8,), order=order)  # type: ignore[arg-type]
        return [item.session for item in spec.workload(seed=1).items]

    assert sessions("grouped") == ["group-0"] * 2 + ["group-1"] * 2 + ["group-2"] * 2
    assert sessions("round_robin") == ["group-0", "group-1", "group-2"] * 2
    assert sorted(sessions("random")) == sorted(sessions("grouped"))
    assert sessions("random") not in (sessions("grouped"), sessions("round_robin"))


def test_multi_turn_appends_turns_of_1024_tokens() -> None:
    items = MultiTurn().workload(seed=1).items
    assert len(items) == 32 * (2 + 4 + 6 + 8)
    assert {len(item.tokens) for item in items} == {1024}
    for item in items:
        assert item.continues == (item.turn > 0)
        assert item.depends_on == (f"{item.session}-{item.turn - 1}" if item.turn else None)


def test_long_documents_ask_short_questions_about_whole_documents() -> None:
    items = LongDocuments().workload(seed=1).items
    assert len(items) == 140 * 8
    asked = Counter(item.session for item in items)
    assert max(asked.values()) > 8
    for item in items:
        document = int(item.session.removeprefix("doc-"))
        assert 20 <= len(item.tokens) - (1024, 2048, 4096, 8192)[document % 4] <= 40
    first, second = [item for item in items if item.session == "doc-5"][:2]
    assert shared(first.tokens, second.tokens) >= 2048


def test_long_documents_go_round_robin() -> None:
    items = LongDocuments(documents=3, questions_per_document=2, order="round_robin").workload(seed=1).items
    assert [item.session for item in items] == ["doc-0", "doc-1", "doc-2"] * 2


@pytest.mark.parametrize("spec", [Gsp(requests=200), LongDocuments(requests=200), MultiTurn(requests=200)])
def test_a_seed_decides_everything_and_the_first_requests_are_a_slice(spec: Gsp | LongDocuments | MultiTurn) -> None:
    assert spec.workload(seed=4) == spec.workload(seed=4)
    assert spec.workload(seed=4) != spec.workload(seed=5)
    assert len(spec.workload(seed=4)) == 200


def test_seeds_share_the_content() -> None:
    def prompts(seed: int) -> dict[str, bytes]:
        return {item.request_id: item.tokens.tobytes() for item in Gsp().workload(seed=seed).items}

    assert prompts(1) == prompts(2)


def test_workloads_are_built_by_name_from_plain_values() -> None:
    built = build_workload(
        "gsp",
        {"order": "round_robin", "groups": "5", "lengths_tokens": [16, 32], "arrivals": {"kind": "gamma", "cv": 2}},
    )
    assert isinstance(built, Gsp)
    assert (built.order, built.groups, built.lengths_tokens) == ("round_robin", 5, (16, 32))
    assert built.arrivals.cv == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gps", {}, "unknown workload 'gps'; known: gsp"),
        ("gsp", {"group": 1}, "workload 'gsp' has no 'group'; known: groups"),
        ("gsp", {"groups": "many"}, "gsp.groups is 'many'"),
        ("gsp", {"groups": 0}, "groups must be at least 1, got 0"),
        ("gsp", {"order": "sorted"}, "gsp.order is 'sorted'"),
        ("gsp", {"prefix_ratio": 1.0}, r"prefix_ratio must be in \[0, 1\), got 1.0"),
        ("gsp", {"arrivals": 12}, "arrivals must be a mapping with a kind, got 12"),
        ("gsp", {"arrivals": {"kind": "burst"}}, "arrivals.kind must be one of poisson, gamma, .* got 'burst'"),
        ("gsp", {"arrivals": {"cv": 2}}, "arrivals of kind 'poisson' have no 'cv'"),
        ("gsp", {"arrivals": {"kind": "azure"}}, "arrivals of kind 'azure' need a path"),
        ("mooncake", {}, "workload 'mooncake' needs a trace: give its file with --trace"),
        ("multi_turn", {"turns": [0]}, r"turns must be numbers of at least 1, got \(0,\)"),
    ],
)
def test_nonsense_is_named(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_workload(name, parameters)


def test_the_paper_loop_has_no_planned_workload() -> None:
    with pytest.raises(ValueError, match="loop 'paper' draws its requests as it goes"):
        MultiTurn(loop="paper").workload(seed=1)


def test_every_kind_is_a_spec() -> None:
    specs: list[WorkloadSpec] = [Gsp(), MultiTurn(), LongDocuments()]
    assert all(spec.client(seed=1).begin() for spec in specs)
