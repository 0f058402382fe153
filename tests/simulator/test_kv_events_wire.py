"""The wire format of events, replay and load, byte by byte: expected frames are packed by hand."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvrouting_core.blocks import Namespace
from kvrouting_core.radix_changes import StoredPages
from kvrouting_simulator.engine_process.event_faults import EventFaults
from kvrouting_simulator.engine_process.event_publisher import EventPublisher, PublisherLimits
from kvrouting_simulator.engine_process.kv_events import (
    AllBlocksCleared,
    EventBatch,
    EventRecorder,
    PageHasher,
)
from kvrouting_simulator.engine_process.load_reports import LoadPublisher, LoadStat


def packed(value: Any) -> bytes:
    """Msgpack of the values that occur here, written from its specification."""
    match value:
        case None:
            return b"\xc0"
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            assert len(value) < 32
            return bytes([0xA0 | len(value)]) + value.encode()
        case list():
            assert len(value) < 16
            return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
        case dict():
            assert len(value) < 16
            return bytes([0x80 | len(value)]) + b"".join(packed(k) + packed(v) for k, v in value.items())
        case int() if 0 <= value < 128:
            return bytes([value])
        case int() if value < 0:
            return packed_negative(value)
        case int() if value < 2**8:
            return b"\xcc" + struct.pack(">B", value)
        case int() if value < 2**16:
            return b"\xcd" + struct.pack(">H", value)
        case int() if value < 2**32:
            return b"\xce" + struct.pack(">I", value)
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case _:
            raise AssertionError(f"{value!r} does not occur")


def packed_negative(value: int) -> bytes:
    """Negative integers in their shortest form."""
    if value >= -32:
        return struct.pack(">b", value)
    for mark, code, bits in ((b"\xd0", ">b", 7), (b"\xd1", ">h", 15), (b"\xd2", ">i", 31)):
        if value >= -(2**bits):
            return mark + struct.pack(code, value)
    return b"\xd3" + struct.pack(">q", value)


def pages(
    hashes: list[int], tokens: list[int], *, parent: int | None, size: int = 1, namespace: Namespace | None = None
) -> StoredPages:
    """What a cache tells of pages that it stored."""
    return StoredPages(
        namespace=namespace or Namespace(model="m"),
        parent_hash=parent,
        hashes=array("Q", hashes),
        tokens=array("I", tokens),
        page_size=size,
    )


@pytest.fixture
def wire() -> Iterator[tuple[Any, Any, Any]]:
    """A publisher with limits of its own; a subscriber and a replay client that are connected to it."""
    context = zmq.Context()
    publish, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    subscriber, client = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (publish, replay, subscriber, client):
        socket.linger = 0
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publish, replay)]
    publisher = EventPublisher(
        publish=publish,
        replay=replay,
        limits=PublisherLimits(replay_batches=3),
        faults=EventFaults(random.Random(1)),
    )
    publisher.start()
    subscriber.subscribe(b"kv-events")
    subscriber.connect(f"tcp://127.0.0.1:{ports[0]}")
    client.connect(f"tcp://127.0.0.1:{ports[1]}")
    subscriber.rcvtimeo = client.rcvtimeo = 30_000
    # A subscription travels to the publisher by itself: repeat a batch until one has arrived.
    warm = EventBatch(ts=0.0, events=[], attn_dp_rank=0)
    while not subscriber.poll(20):
        publisher.publish(warm)
    while int.from_bytes(subscriber.recv_multipart()[1], "big") < publisher.next_sequence - 1:
        pass
    publisher.restart()
    yield publisher, subscriber, client
    publisher.stop()
    subscriber.close()
    client.close()
    context.term()


def test_a_batch_on_the_wire_is_topic_sequence_and_msgpack_as_sglang_packs_it(wire: tuple[Any, Any, Any]) -> None:
    publisher, subscriber, _ = wire
    recorder = EventRecorder()
    recorder.stored(pages([1, 2**63, 2**64 - 1], [7, 300, 70_000], parent=None))
    recorder.removed(array("Q", [2**64 - 200, 2**40]))
    recorder.cleared()
    publisher.publish(EventBatch(ts=1.5, events=recorder.take(), attn_dp_rank=2))

    topic, sequence, payload = subscriber.recv_multipart()

    assert topic == b"kv-events"
    assert sequence == b"\0\0\0\0\0\0\0\0"
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, -(2**63), -1],
        "parent_block_hash": None,
        "token_ids": [7, 300, 70_000],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [-200, 2**40], "medium": "GPU"}
    assert payload == packed([1.5, [stored, removed, {"type": "AllBlocksCleared"}], 2])


def test_salt_and_adapter_are_told_only_where_there_is_one() -> None:
    recorder = EventRecorder()
    recorder.stored(pages([5], [1], parent=9, namespace=Namespace(model="m", cache_salt="s")))
    recorder.stored(pages([6], [2], parent=5, namespace=Namespace(model="m", lora_adapter="a")))

    salted, adapted = recorder.take()

    assert salted.parent_block_hash == 9  # type: ignore[union-attr]
    assert (salted.cache_salt, salted.lora_name) == ("s", None)  # type: ignore[union-attr]
    assert (adapted.cache_salt, adapted.lora_name) == (None, "a")  # type: ignore[union-attr]


def test_consecutive_pages_of_one_chain_are_one_event_and_others_are_not() -> None:
    recorder = EventRecorder()
    recorder.stored(pages([1, 2], [10, 11, 12, 13], parent=None, size=2))
    recorder.stored(pages([3], [14, 15], parent=2, size=2))
    recorder.stored(pages([4], [16, 17], parent=2, size=2))
    recorder.removed(array("Q", [4]))
    recorder.removed(array("Q", [3]))

    events = recorder.take()

    assert [list(e.block_hashes) for e in events] == [[1, 2, 3], [4], [4, 3]]  # type: ignore[union-attr]
    assert events[0].token_ids == [10, 11, 12, 13, 14, 15]  # type: ignore[union-attr]
    assert events[1].parent_block_hash == 2  # type: ignore[union-attr]
    assert recorder.take() == []


def test_replay_gives_the_kept_batches_from_a_number_on_and_then_the_end_marker(wire: tuple[Any, Any, Any]) -> None:
    publisher, subscriber, client = wire
    for number in range(5):
        publisher.publish(EventBatch(ts=float(number), events=[AllBlocksCleared()], attn_dp_rank=0))
    live = [subscriber.recv_multipart() for _ in range(5)]

    client.send_multipart([b"", struct.pack(">Q", 3)])
    replayed = [client.recv_multipart() for _ in range(3)]
    client.send_multipart([b"", struct.pack(">Q", 0)])
    kept = [client.recv_multipart() for _ in range(4)]

    end = [b"", b"", b"\xff" * 8, b""]
    assert replayed == [[b"", *live[3]], [b"", *live[4]], end]
    assert kept == [[b"", *live[2]], [b"", *live[3]], [b"", *live[4]], end], "only the last three are kept"


def test_a_full_queue_holds_the_scheduler_up_and_is_counted() -> None:
    context = zmq.Context()
    publish = context.socket(zmq.PUB)
    publish.bind_to_random_port("tcp://127.0.0.1")
    publisher = EventPublisher(
        publish=publish,
        replay=None,
        limits=PublisherLimits(queue_batches=1),
        faults=EventFaults(random.Random(1)),
    )
    publisher.start()
    heavy = [AllBlocksCleared()] * 20_000
    for _ in range(20):
        publisher.publish(EventBatch(ts=0.0, events=heavy, attn_dp_rank=0))
    assert publisher.next_sequence == 20
    assert publisher.blocked_batches > 0
    publisher.stop()
    context.term()


async def test_load_is_sglangs_array_at_once_on_change_and_as_a_heartbeat() -> None:
    context = zmq.Context()
    publish, subscriber = context.socket(zmq.XPUB), context.socket(zmq.SUB)  # XPUB tells who has subscribed
    port = publish.bind_to_random_port("tcp://127.0.0.1")
    subscriber.subscribe(b"load")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    subscriber.rcvtimeo = publish.rcvtimeo = 30_000
    assert publish.recv() == b"\1load"
    now_s = [100.0]
    publisher = LoadPublisher(publish, monotonic_s=lambda: now_s[0])
    idle = LoadStat(
        num_running_reqs=0, num_waiting_reqs=0, num_tokens=300, max_total_num_tokens=197_000, attn_dp_rank=1,
        num_waiting_uncached_tokens=0, num_total_tokens=300, max_running_requests=2048,
        total_prefill_uncached_tokens=70_000, total_prefill_busy_us=5_000_000_000,
    )  # fmt: skip
    busy = [1, 0, 300, 197_000, 1, 0, 300, 2048, 70_000, 5_000_000_000]

    publisher.offer(idle)
    publisher.offer(idle)  # nothing changed
    publisher.beat(idle)  # nothing is due
    publisher.offer(LoadStat(*busy))
    busy[2] = 301
    publisher.offer(LoadStat(*busy))  # only tokens changed, a moment ago
    now_s[0] += 1
    publisher.beat(LoadStat(*busy))
    now_s[0] += 1
    publisher.beat(LoadStat(*busy))
    publisher.offer(LoadStat(*[0, *busy[1:]]))

    frames = [subscriber.recv_multipart() for _ in range(5)]
    assert [f[0] for f in frames] == [b"load"] * 5
    assert [f[1] for f in frames] == [struct.pack(">Q", n) for n in range(5)]
    idle_values = [0, 0, 300, 197_000, 1, 0, 300, 2048, 70_000, 5_000_000_000]
    assert frames[0][2] == packed(["LoadStat", *idle_values])
    assert [f[2] for f in frames[1:]] == [
        packed(["LoadStat", 1, 0, 300, *idle_values[3:]]),
        packed(["LoadStat", 1, 0, 301, *idle_values[3:]]),
        packed(["LoadStat", 1, 0, 301, *idle_values[3:]]),
        packed(["LoadStat", 0, 0, 301, *idle_values[3:]]),
    ]
    assert not subscriber.poll(50)
    publisher.stop()
    subscriber.close()
    context.term()


def test_pages_of_equal_tokens_in_different_namespaces_have_different_hashes() -> None:
    hasher = PageHasher(4)
    plain, salted = (hasher.root(Namespace(model="m", cache_salt=salt)) for salt in (None, "s"))
    tokens = array("I", range(8))

    assert list(hasher.extend(plain, 0, tokens)[0]) != list(hasher.extend(salted, 0, tokens)[0])
    with pytest.raises(TypeError, match="Namespace"):
        hasher.root("m")
