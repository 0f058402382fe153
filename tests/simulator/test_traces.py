"""Readers of published traces: small files made here, and the real ones where they are at hand."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from kvrouting_core.eviction import make_policy
from kvrouting_core.radix_cache import RadixCache
from kvrouting_simulator.workloads import (
    AgentSessions,
    AzureTrace,
    MooncakeTrace,
    PoissonArrivals,
    ScheduledClient,
    TraceError,
    WorkItem,
    build_workload,
    read_agent_sessions,
    read_azure,
    read_mooncake,
)
from kvrouting_simulator.workloads.catalogue import trace_kind
from kvrouting_simulator.workloads.trace_files import TraceCall
from tests.shared_data import shared_data


def line(timestamp: float = 0, tokens: int = 1000, ids: Iterable[int] = (0, 1), **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 3, "hash_ids": list(ids), **more}


def agent_line(session: str, turn: int, timestamp_ms: float, tokens: int, ids: Iterable[int]) -> dict[str, object]:
    return {
        "suite": "s", "session": session, "turn": turn, "timestamp_ms": timestamp_ms,
        "input_length": tokens, "output_length": 5, "hash_ids": list(ids),
    }  # fmt: skip


def written(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def best_hit_rate(items: Iterable[WorkItem], page_size: int = 1) -> float:
    cache = RadixCache(capacity_tokens=1 << 40, page_size=page_size, policy=make_policy("lru", random.Random(0)))
    hits = total = 0
    for item in items:
        hits += min(cache.serve(item.tokens), len(item.tokens) - 1)
        total += len(item.tokens)
    return hits / total


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz", "t.jsonl.gz"])
def test_a_block_id_is_the_same_tokens_wherever_it_occurs(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [line(), line(5, ids=(0, 2)), line(9, tokens=512, ids=(0,))])
    first, second, third = MooncakeTrace(path=path).workload(seed=1).items
    assert [len(i.tokens) for i in (first, second, third)] == [1000, 1000, 512]
    assert first.tokens[:512] == second.tokens[:512] == third.tokens
    assert first.tokens[512] != second.tokens[512]
    assert len(set(first.tokens)) > 990
    assert [i.arrival_ms for i in (first, second, third)] == [0, 5, 9]


def test_slices_and_speed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [line(10), line(30), line(90)])
    items = MooncakeTrace(path=path, requests=2, speed=4).workload(seed=1).items
    assert [i.arrival_ms for i in items] == [0, 5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (line(20, tokens=1600), "2 hash_ids for input_length 1600: blocks of 512 make 3 or 4"),
        (line(tokens=-1), "input_length must be a whole number of at least 0, got -1"),
        (line(tokens="many"), "input_length must be a whole number of at least 0, got 'many'"),  # type: ignore[arg-type]
        (line(timestamp="noon"), "timestamp must be a number, got 'noon'"),  # type: ignore[arg-type]
        (line(timestamp=4), "timestamp 4.0 is before 10.0"),
        (line(20, ids=(0, -1)), r"hash_ids must hold whole numbers from 0 to 2\^47, got -1"),
        (line(20, hash_ids=7), "hash_ids must be a list, got 7"),
        ({"timestamp": 20}, "input_length is missing"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = written(tmp_path / "t.jsonl", [line(10), row])
    with pytest.raises(TraceError, match=rf"t.jsonl:2: {message}"):
        read_mooncake(path)


@pytest.mark.parametrize(("text", "message"), [("{oops", "not JSON"), ("[1]", r"not an object: '\[1\]'")])
def test_lines_that_are_no_objects_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{text}\n")
    with pytest.raises(TraceError, match=rf"t.jsonl:2: {message}"):
        read_mooncake(path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.jsonl.xz", "t.csv.gz"])
@pytest.mark.parametrize("read", [read_mooncake, read_agent_sessions, read_azure, trace_kind])
def test_a_file_without_lines_is_named_as_empty(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    with pytest.raises(TraceError, match=rf"{name}: the file is empty"):
        read(written(tmp_path / name, []))
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(TraceError, match=r"blank\.jsonl"):
        read(tmp_path / "blank.jsonl")


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz", "t.csv.gz"])
@pytest.mark.parametrize("read", [read_mooncake, read_azure, trace_kind])
def test_a_binary_file_is_named(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).write_bytes(bytes(range(255, 0, -1)))
    with pytest.raises(TraceError, match=rf"{name}: .*(no text in UTF-8|cannot be decompressed)"):
        read(tmp_path / name)


def test_half_a_compressed_file_is_named(tmp_path: Path) -> None:
    whole = written(tmp_path / "t.jsonl.xz", [line(10 * i) for i in range(100)]).read_bytes()
    (tmp_path / "t.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"t\.jsonl\.xz: cannot be decompressed"):
        read_mooncake(tmp_path / "t.jsonl.xz")


def test_sessions_start_at_arrivals_and_turns_follow_one_another(tmp_path: Path) -> None:
    rows = [
        agent_line("a", 0, 0, 16, [0]),
        agent_line("a", 1, 900, 40, [0, 1]),
        agent_line("a", 2, 700, 50, [0, 1, 2]),
        agent_line("b", 0, -50, 20, [0]),
        agent_line("b", 1, 10, 0, []),
    ]
    path = written(tmp_path / "t.jsonl", rows)
    items = AgentSessions(path=path, arrivals=PoissonArrivals(rate_per_s=1)).workload(seed=2).items
    by_id = {i.request_id: i for i in items}
    assert set(by_id) == {"s-a-0", "s-a-1", "s-a-2", "s-b-0"}
    start = by_id["s-a-0"].arrival_ms
    assert [by_id[f"s-a-{turn}"].arrival_ms - start for turn in (0, 1, 2)] == [0, 900, 900]
    assert [by_id[f"s-a-{turn}"].depends_on for turn in (0, 1, 2)] == [None, "s-a-0", "s-a-1"]
    assert 0 in (start, by_id["s-b-0"].arrival_ms)
    assert start != by_id["s-b-0"].arrival_ms
    assert by_id["s-a-1"].tokens[:16] == by_id["s-b-0"].tokens[:16]
    assert by_id["s-a-1"].tokens[32:] != by_id["s-a-2"].tokens[32:40]
    client = ScheduledClient(AgentSessions(path=path).workload(seed=2))
    assert {r.request_id for r in client.begin()} == {"s-a-0", "s-b-0"}
    (following,) = client.ended("s-a-0", [1, 2, 3], now_ms=1e6)
    assert following.prompt == by_id["s-a-1"].tokens
    assert following.start_ms == 1e6


def test_a_suite_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [agent_line("a", 0, 0, 16, [0])])
    with pytest.raises(ValueError, match="no call with a prompt of suite 'none'"):
        AgentSessions(path=path, suite="none").workload(seed=1)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
)


def test_azure_gives_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    rows = read_azure(path)
    assert [(r.input_tokens, r.output_tokens) for r in rows] == [(374, 44), (396, 0)]
    assert rows[1].timestamp_ms == pytest.approx(4314.579, abs=0.001)
    items = AzureTrace(path=path, speed=2).workload(seed=1).items
    assert [len(i.tokens) for i in items] == [374, 396]
    assert [i.output_tokens for i in items] == [44, 1]
    assert items[1].arrival_ms == pytest.approx(2157.29, abs=0.01)
    spec = build_workload("gsp", {"requests": 2, "arrivals": {"kind": "azure", "path": str(path)}})
    assert spec.client(seed=1).begin()[1].start_ms == pytest.approx(4314.579, abs=0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "azure.csv:1: no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        (AZURE + "soon,1,1\n", "azure.csv:4: TIMESTAMP must be a date and time, got 'soon'"),
        (AZURE + "2023-11-16 18:15:51,x,1\n", "azure.csv:4: ContextTokens must be a whole number .* got 'x'"),
        (AZURE + "2023-11-16 18:15:00,1,1\n", "azure.csv:4: TIMESTAMP 2023-11-16 18:15:00 is before"),
    ],
)
def test_bad_azure_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_azure(path)


def test_the_kind_of_a_trace_is_seen(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE)
    agents = written(tmp_path / "a.jsonl.gz", [agent_line("a", 0, 0, 16, [0])])
    assert [trace_kind(p) for p in (azure, agents, written(tmp_path / "m.jsonl", [line()]))] == [
        "azure", "agents", "mooncake",
    ]  # fmt: skip


def hit_rate_of_blocks(calls: Sequence[TraceCall]) -> float:
    """With a cache that forgets nothing and keeps whole blocks."""
    seen: set[int] = set()
    hits = 0
    for call in calls:
        held = next((i for i, block in enumerate(call.hash_ids) if block not in seen), len(call.hash_ids))
        hits += min(held * 512, call.input_tokens - 1)
        seen.update(call.hash_ids)
    return hits / sum(call.input_tokens for call in calls)


def test_the_mooncake_conversation_trace_has_its_known_facts() -> None:
    calls = read_mooncake(shared_data("mooncake_conversation_trace.jsonl.xz"))
    assert len(calls) == 12_031
    assert sum(call.input_tokens for call in calls) == 144_793_823
    assert hit_rate_of_blocks(calls) == pytest.approx(0.374, abs=0.0005)


def test_made_up_tokens_have_the_hit_rate_of_the_block_ids() -> None:
    path = shared_data("mooncake_conversation_trace.jsonl.xz")
    calls = read_mooncake(path, requests=1500)
    expected = hit_rate_of_blocks(calls)
    items = MooncakeTrace(path=path, requests=1500).workload(seed=1).items
    assert best_hit_rate(items) == pytest.approx(expected, abs=1e-5)


def test_the_agent_sessions_have_their_known_facts() -> None:
    path = shared_data("agent_sessions_block16.jsonl.xz")
    calls = read_agent_sessions(path)
    assert len(calls) == 1148
    assert {call.suite for call in calls} == {"magagent", "miniswe"}
    assert sum(call.input_tokens for call in calls) == 3_965_457
    workload = AgentSessions(path=path).workload(seed=1)
    assert len(workload) == sum(1 for call in calls if call.input_tokens)
    assert best_hit_rate(workload.items, page_size=16) == pytest.approx(0.899, abs=0.003)
