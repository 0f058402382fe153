"""Clients send what depends on answers only after them, and build it from them."""

from __future__ import annotations

from array import array

import pytest

from kvrouting_simulator.workloads import MultiTurn, PaperClient, ReadyRequest, ScheduledClient, WorkItem, Workload


def item(request_id: str, arrival_ms: float, tokens: list[int], **more: object) -> WorkItem:
    return WorkItem(
        request_id=request_id,
        arrival_ms=arrival_ms,
        tokens=array("I", tokens),
        output_tokens=2,
        session="s",
        **more,  # type: ignore[arg-type]
    )


def chat() -> Workload:
    return Workload(
        name="chat",
        items=[
            item("a", 0, [1, 2]),
            item("other", 5, [9]),
            item("b", 10, [3], depends_on="a", continues=True, think_ms=4),
            item("c", 500, [4], depends_on="b", continues=True),
            item("alone", 600, [5, 6], depends_on="b"),
        ],
    )


def test_a_turn_is_its_history_and_what_is_said() -> None:
    client = ScheduledClient(chat())
    assert [(r.request_id, r.start_ms) for r in client.begin()] == [("a", 0), ("other", 5)]
    (b,) = client.ended("a", [70, 71], now_ms=100)
    assert (b.request_id, b.start_ms, list(b.prompt)) == ("b", 104, [1, 2, 70, 71, 3])
    c, alone = client.ended("b", [72], now_ms=200)
    assert (c.start_ms, list(c.prompt)) == (500, [1, 2, 70, 71, 3, 72, 4])
    assert (alone.start_ms, list(alone.prompt)) == (600, [5, 6])


def test_a_request_that_is_not_under_way_cannot_end() -> None:
    client = ScheduledClient(chat())
    client.begin()
    with pytest.raises(ValueError, match="b is not under way"):
        client.ended("b", [], now_ms=1)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item("a", 0, [1]), item("a", 1, [1])], "a occurs twice"),
        ([item("a", 5, [1]), item("b", 1, [1])], "b arrives at 1 ms, before"),
        ([item("b", 0, [1], depends_on="a")], "b depends on a, which is not before it"),
    ],
)
def test_workloads_that_contradict_themselves_are_refused(items: list[WorkItem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(name="w", items=items)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"arrival_ms": -1}, "arrival_ms of a must be at least 0, got -1"),
        ({"tokens": []}, "tokens of a are empty"),
        ({"continues": True}, "a continues a conversation but depends on no request"),
        ({"think_ms": -3}, "think_ms of a must be at least 0, got -3"),
        ({"turn": -1}, "turn of a must not be negative, got -1"),
    ],
)
def test_items_without_sense_are_refused(more: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"arrival_ms": 0, "tokens": [1], **more}
    with pytest.raises(ValueError, match=message):
        item("a", **arguments)  # type: ignore[arg-type]


def test_an_open_loop_keeps_one_turn_of_a_conversation_under_way() -> None:
    client = MultiTurn(conversations=6, turn_tokens=4).client(seed=3)
    under_way = list(client.begin())
    assert sorted(r.session for r in under_way) == [f"chat-{c}" for c in range(6)]
    served = 0
    now_ms = 0.0
    while under_way:
        ready = under_way.pop(0)
        now_ms = max(now_ms, ready.start_ms) + 1
        assert ready.turn == 0 or len(ready.prompt) == 4 * (ready.turn + 1) + 4 * ready.turn
        under_way += client.ended(ready.request_id, [1, 2, 3, 4], now_ms=now_ms)
        assert len({r.session for r in under_way}) == len(under_way)
        served += 1
    assert served == 2 + 4 + 6 + 8 + 2 + 4


def paper_run(concurrency: int, conversations: int = 128) -> tuple[list[ReadyRequest], float]:
    """All requests of the paper's loop served in order, and the share that repeated a turn under way."""
    turns = MultiTurn(conversations=conversations, turn_tokens=1).user_turns()
    client = PaperClient(turns, output_tokens=1, concurrency=concurrency, max_requests=None, seed=1)
    under_way = list(client.begin())
    sent = list(under_way)
    repeated = sum((r.session, r.turn) in {(o.session, o.turn) for o in sent[:i]} for i, r in enumerate(sent))
    now_ms = 0.0
    while under_way:
        ready = under_way.pop(0)
        now_ms += 1
        for following in client.ended(ready.request_id, [7], now_ms=now_ms):
            repeated += any((o.session, o.turn) == (following.session, following.turn) for o in under_way)
            under_way.append(following)
            sent.append(following)
    return sent, repeated / len(sent)


def test_the_paper_loop_repeats_most_of_its_requests() -> None:
    sent, repeated = paper_run(128)
    assert 0.6 < repeated < 0.8
    turns = {(r.session, r.turn) for r in sent}
    assert len(turns) == 32 * (2 + 4 + 6 + 8)


def test_the_paper_loop_with_one_client_repeats_nothing() -> None:
    sent, repeated = paper_run(1, conversations=8)
    assert repeated == 0
    assert len(sent) == 2 * (2 + 4 + 6 + 8)
    longest = max(sent, key=lambda r: r.turn)
    assert len(longest.prompt) == 8 + 7


def test_the_paper_loop_stops_at_its_limit_and_knows_what_is_under_way() -> None:
    client = MultiTurn(loop="paper", requests=5, concurrency=3, turn_tokens=1).client(seed=1)
    first = client.begin()
    assert len(first) == 3
    rest = [r for ready in first for r in client.ended(ready.request_id, [1], now_ms=9)]
    assert [r.start_ms for r in rest] == [9, 9]
    assert [client.ended(r.request_id, [1], now_ms=10) for r in rest] == [[], []]
    with pytest.raises(ValueError, match="not under way"):
        client.ended(first[0].request_id, [1], now_ms=11)
