"""Fences: whatever the network does, only the next message of the living process is applied."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouting_core.event_order import BatchOrder, FencingDecision, SyncOrder
from kvrouting_core.identity import WorkerId, WorkerIdentity

A = WorkerId("pod-a/0")
B = WorkerId("pod-b/0")


def started(next_sequence: int | None = 0, epoch: str | None = "e1") -> BatchOrder:
    order = BatchOrder()
    order.start(epoch=epoch, next_sequence=next_sequence)
    return order


def decisions(order: BatchOrder, *sequences: int, replayed: bool = False) -> list[FencingDecision]:
    return [order.judge(sequence, replayed=replayed).decision for sequence in sequences]


# --- one engine's batches ---


def test_batches_in_sequence_are_applied() -> None:
    assert decisions(started(), 0, 1, 2) == [FencingDecision.APPLY] * 3


def test_a_gap_names_what_is_missing_and_ends_when_it_is_replayed() -> None:
    order = started()
    order.judge(0)
    result = order.judge(4)
    assert (result.decision, result.missing) == (FencingDecision.GAP, range(1, 4))
    assert decisions(order, 1, 2, 3, 4, replayed=True) == [FencingDecision.APPLY] * 4
    assert decisions(order, 5) == [FencingDecision.APPLY]


def test_live_batches_that_the_replay_has_overtaken_are_duplicates() -> None:
    order = started()
    decisions(order, 0, 5)
    assert decisions(order, *range(1, 9), replayed=True) == [FencingDecision.APPLY] * 8
    assert decisions(order, 6, 7, 8, 9) == [FencingDecision.DUPLICATE] * 3 + [FencingDecision.APPLY]


def test_a_replay_may_repeat_what_is_applied() -> None:
    order = started()
    decisions(order, 0, 1, 2)
    assert decisions(order, 0, 1, 2, 3, replayed=True) == [FencingDecision.DUPLICATE] * 3 + [FencingDecision.APPLY]


@pytest.mark.parametrize("restarted_at", [0, 1, 2])
def test_a_number_that_goes_back_means_a_restart_until_the_order_starts_anew(restarted_at: int) -> None:
    order = started()
    decisions(order, 0, 1, 2)
    assert decisions(order, restarted_at, 3, 4) == [FencingDecision.RESTART] * 3
    assert decisions(order, 3, replayed=True) == [FencingDecision.RESTART]
    order.start(epoch="e2", next_sequence=restarted_at + 1)
    assert decisions(order, restarted_at + 1) == [FencingDecision.APPLY]


def test_an_epoch_learned_beside_the_stream_shows_a_restart_that_the_numbers_hide() -> None:
    order = started()
    decisions(order, 0, 1)
    assert order.learn_epoch("e1").decision is FencingDecision.APPLY
    assert order.learn_epoch("e2").decision is FencingDecision.RESTART
    assert decisions(order, 2) == [FencingDecision.RESTART]
    order.start(epoch="e2", next_sequence=7)
    assert order.learn_epoch("e1").decision is FencingDecision.STALE
    assert decisions(order, 7) == [FencingDecision.APPLY]
    with pytest.raises(ValueError, match="'e1' was given up"):
        order.start(epoch="e1", next_sequence=0)


def test_an_epoch_may_be_learned_after_the_start() -> None:
    order = started(epoch=None)
    assert order.learn_epoch("e1").decision is FencingDecision.APPLY
    assert order.epoch == "e1"
    assert order.learn_epoch("e2").decision is FencingDecision.RESTART


def test_without_a_snapshot_the_order_begins_with_whatever_comes() -> None:
    order = started(next_sequence=None, epoch=None)
    assert decisions(order, 41, 42, 44) == [FencingDecision.APPLY, FencingDecision.APPLY, FencingDecision.GAP]
    assert order.next_sequence == 43


def test_nothing_is_applied_before_the_start() -> None:
    assert decisions(BatchOrder(), 0) == [FencingDecision.RESTART]


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        BatchOrder().start(epoch=None, next_sequence=-1)


@dataclass(frozen=True)
class Batch:
    epoch: int
    sequence: int
    replayed: bool


@st.composite
def batch_histories(draw: st.DrawFn) -> list[Batch]:
    """One engine that restarts: its live stream loses and repeats batches, replays come at any time."""
    history: list[Batch] = []
    for epoch in range(draw(st.integers(1, 3))):
        for sequence in range(draw(st.integers(0, 12))):
            copies = draw(st.sampled_from([0, 1, 1, 1, 2]))
            history += [Batch(epoch, sequence, replayed=False)] * copies
            if draw(st.booleans()):
                first = draw(st.integers(0, sequence))
                history += [Batch(epoch, replay, replayed=True) for replay in range(first, sequence + 1)]
    return history


@settings(deadline=None)
@given(batch_histories())
def test_batches_are_applied_in_order_and_never_across_an_announced_restart(history: list[Batch]) -> None:
    order = started(epoch="0")
    applied: list[Batch] = []
    believed = 0
    for batch in history:
        if batch.epoch != believed:
            assert order.learn_epoch(str(batch.epoch)).decision is FencingDecision.RESTART
            assert order.judge(batch.sequence, replayed=batch.replayed).decision is FencingDecision.RESTART
            order.start(epoch=str(batch.epoch), next_sequence=0)
            believed, applied = batch.epoch, []
        result = order.judge(batch.sequence, replayed=batch.replayed)
        if result.decision is FencingDecision.APPLY:
            applied.append(batch)
        elif result.decision is FencingDecision.RESTART:
            order.start(epoch=str(believed), next_sequence=len(applied))
        elif result.decision is FencingDecision.GAP:
            assert result.missing == range(len(applied), batch.sequence)
        assert [b.sequence for b in applied] == list(range(len(applied)))
        assert {b.epoch for b in applied} <= {believed}


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(0, 30))
def test_an_unannounced_restart_is_noticed_as_soon_as_a_number_goes_back(lost: list[int], length: int) -> None:
    """Without an epoch: no batch of the new process is applied that does not continue the old numbers upwards."""
    order = started(epoch=None)
    for sequence in range(length):
        if sequence not in lost:
            order.judge(sequence)
    last_live = max((s for s in range(length) if s not in lost), default=-1)
    for sequence in range(last_live + 1):
        assert order.judge(sequence).decision is FencingDecision.RESTART


# --- all workers at a router ---


def opened(order: SyncOrder, worker: WorkerId = A, epoch: str = "e1", next_sequence: int | None = 0) -> int:
    stream = order.hello(worker, epoch).stream
    assert stream is not None
    if next_sequence is not None:
        order.judge_snapshot(worker, stream=stream, epoch=epoch, next_sequence=next_sequence)
    return stream


def delta(order: SyncOrder, stream: int, sequence: int, *, worker: WorkerId = A, epoch: str = "e1") -> FencingDecision:
    return order.judge(worker, stream=stream, epoch=epoch, sequence=sequence).decision


def test_deltas_wait_for_the_snapshot_of_their_stream() -> None:
    order = SyncOrder()
    stream = opened(order, next_sequence=None)
    early = order.judge(A, stream=stream, epoch="e1", sequence=0)
    assert (early.decision, early.missing) == (FencingDecision.GAP, None)
    assert order.judge_snapshot(A, stream=stream, epoch="e1", next_sequence=None).decision is FencingDecision.APPLY
    assert delta(order, stream, 0) is FencingDecision.GAP
    order.judge_snapshot(A, stream=stream, epoch="e1", next_sequence=5)
    assert [delta(order, stream, s) for s in (4, 5, 6, 6, 8)] == [
        FencingDecision.DUPLICATE,
        FencingDecision.APPLY,
        FencingDecision.APPLY,
        FencingDecision.DUPLICATE,
        FencingDecision.GAP,
    ]


def test_a_snapshot_ends_a_gap() -> None:
    order = SyncOrder()
    stream = opened(order)
    gap = order.judge(A, stream=stream, epoch="e1", sequence=3)
    assert (gap.decision, gap.missing) == (FencingDecision.GAP, range(3))
    order.judge_snapshot(A, stream=stream, epoch="e1", next_sequence=9)
    assert delta(order, stream, 9) is FencingDecision.APPLY


def test_a_snapshot_from_before_applied_deltas_is_stale() -> None:
    order = SyncOrder()
    stream = opened(order, next_sequence=4)
    assert delta(order, stream, 4) is FencingDecision.APPLY
    late = order.judge_snapshot(A, stream=stream, epoch="e1", next_sequence=4)
    assert late.decision is FencingDecision.STALE
    assert delta(order, stream, 5) is FencingDecision.APPLY


def test_a_reconnect_fences_the_former_stream() -> None:
    order = SyncOrder()
    old = opened(order)
    again = order.hello(A, "e1")
    assert again.decision is FencingDecision.APPLY
    assert delta(order, old, 0) is FencingDecision.STALE
    assert order.judge_snapshot(A, stream=old, epoch="e1", next_sequence=1).decision is FencingDecision.STALE


def test_a_new_epoch_voids_the_old_one_for_ever() -> None:
    order = SyncOrder()
    old = opened(order)
    assert order.hello(A, "e2").decision is FencingDecision.RESTART
    assert delta(order, old, 0) is FencingDecision.STALE
    late = order.hello(A, "e1")
    assert (late.decision, late.stream) == (FencingDecision.STALE, None)
    assert "the same pod uid" in late.reason


def test_an_epoch_that_said_no_hello_on_a_living_stream_is_a_restart() -> None:
    order = SyncOrder()
    opened(order, epoch="e0")
    stream = opened(order, epoch="e1")
    assert delta(order, stream, 0, epoch="e2") is FencingDecision.RESTART
    assert delta(order, stream, 0, epoch="e0") is FencingDecision.STALE
    assert delta(order, stream, 0, epoch="e1") is FencingDecision.APPLY


def test_a_worker_that_left_for_good_does_not_return() -> None:
    order = SyncOrder()
    stream = opened(order)
    order.leave(A, for_good=True)
    assert delta(order, stream, 0) is FencingDecision.STALE
    assert "a pod uid of its own" in order.hello(A, "e1").reason
    assert order.hello(A, "e1").decision is FencingDecision.STALE
    assert order.hello(A, "e2").decision is FencingDecision.STALE
    assert order.hello(B, "e1").decision is FencingDecision.APPLY


def test_a_silent_worker_may_return_with_the_same_or_a_new_process() -> None:
    order = SyncOrder()
    stream = opened(order)
    order.leave(A, for_good=False)
    assert delta(order, stream, 0) is FencingDecision.STALE
    assert order.hello(A, "e1").decision is FencingDecision.APPLY
    order.leave(A, for_good=False)
    assert order.hello(A, "e2").decision is FencingDecision.RESTART
    assert order.hello(A, "e1").decision is FencingDecision.STALE


def test_a_heartbeat_is_compared_only_with_the_view_it_describes() -> None:
    order = SyncOrder()
    stream = opened(order, next_sequence=None)

    def position(next_sequence: int) -> FencingDecision:
        return order.judge_position(A, stream=stream, epoch="e1", next_sequence=next_sequence).decision

    assert position(0) is FencingDecision.GAP
    order.judge_snapshot(A, stream=stream, epoch="e1", next_sequence=5)
    assert [position(n) for n in (4, 5, 7)] == [FencingDecision.DUPLICATE, FencingDecision.APPLY, FencingDecision.GAP]
    assert delta(order, stream, 5) is FencingDecision.APPLY
    assert position(6) is FencingDecision.APPLY
    assert position(5) is FencingDecision.DUPLICATE


def test_memory_of_the_dead_is_bounded_and_its_messages_stay_stale() -> None:
    order = SyncOrder(remembered=10)
    streams = []
    for i in range(500):
        worker = WorkerId(f"pod-{i}/0")
        streams.append(opened(order, worker))
        order.leave(worker, for_good=i % 2 == 0)
    assert order.remembered() <= 20
    assert delta(order, streams[0], 0, worker=WorkerId("pod-0/0")) is FencingDecision.STALE
    assert order.hello(WorkerId("pod-498/0"), "e1").decision is FencingDecision.STALE


def test_an_empty_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="pod-a/0"):
        SyncOrder().hello(A, "")


def test_a_worker_is_a_rank_of_a_pod() -> None:
    identity = WorkerIdentity(pool="p", pod_uid="pod-a", dp_rank=0)
    assert identity.worker_id == A
    for wrong, message in (
        ({"pool": ""}, "pool is empty"),
        ({"pod_uid": "a/b"}, "'a/b'"),
        ({"dp_rank": -1}, "-1"),
    ):
        with pytest.raises(ValueError, match=message):
            WorkerIdentity(**{"pool": "p", "pod_uid": "u", "dp_rank": 0, **wrong})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sent:
    """One message of a sidecar's stream."""

    epoch: int
    connection: int
    kind: str  # hello, snapshot, delta
    sequence: int


@st.composite
def network_histories(draw: st.DrawFn) -> list[Sent]:
    """A worker's engine restarts and its sidecar reconnects; messages are delayed, doubled and dropped.

    Only the first Hello of each epoch keeps its place before the first Hello of the next one: a sidecar
    opens its next stream after that.
    """
    arrivals: list[tuple[int, int, Sent]] = []
    sent = connection = 0
    for epoch in range(draw(st.integers(1, 3))):
        for stream in range(draw(st.integers(1, 2))):
            messages = [Sent(epoch, connection, "hello", 0), Sent(epoch, connection, "snapshot", 10)]
            messages += [Sent(epoch, connection, "delta", 10 + i) for i in range(draw(st.integers(0, 6)))]
            for message in messages:
                sent += 10
                first_hello = message.kind == "hello" and stream == 0
                copies = 1 if first_hello else draw(st.integers(0, 2))
                for _ in range(copies):
                    delay = 0 if first_hello else draw(st.sampled_from([0, 0, 15, 60, 200]))
                    arrivals.append((sent + delay, len(arrivals), message))
            connection += 1
    return [message for _, _, message in sorted(arrivals, key=lambda arrival: arrival[:2])]


@settings(max_examples=300, deadline=None)
@given(network_histories())
def test_no_network_makes_a_router_apply_out_of_order_or_from_a_dead_epoch(history: list[Sent]) -> None:
    order = SyncOrder()
    streams: dict[int, int] = {}  # the sidecar's connection → the number the router gave it
    newest_epoch = -1
    view_next: int | None = None
    for message in history:
        epoch = str(message.epoch)
        if message.kind == "hello":
            handshake = order.hello(A, epoch)
            if message.epoch < newest_epoch:
                assert handshake.decision is FencingDecision.STALE
            if handshake.stream is not None:
                newest_epoch, view_next = max(newest_epoch, message.epoch), None
                streams[message.connection] = handshake.stream
            continue
        stream = streams.get(message.connection, -1)
        if message.kind == "snapshot":
            result = order.judge_snapshot(A, stream=stream, epoch=epoch, next_sequence=message.sequence)
            if result.decision is FencingDecision.APPLY:
                assert message.epoch == newest_epoch
                assert view_next is None or message.sequence >= view_next
                view_next = message.sequence
            continue
        result = order.judge(A, stream=stream, epoch=epoch, sequence=message.sequence)
        if result.decision is FencingDecision.APPLY:
            assert message.epoch == newest_epoch
            assert message.sequence == view_next
            view_next = message.sequence + 1
