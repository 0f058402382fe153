"""How many tokens of KV events a sidecar takes in per second on one core, at page size 1.

What is timed is all that a batch costs after the socket: decoding, mirror with its verification history, and the
session of one router that encodes every change for the wire and is acknowledged at once. The baseline is the bare
decoding of the same batches by msgspec, run in turns with it, so that the ratio does not depend on the machine's mood.

    python -m benchmarks.sidecar_ingest [--quick]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.deltas import Delta
from kvrouting_sidecar.grpc_messages import view_change
from kvrouting_sidecar.mirror_terms import EventSource
from kvrouting_sidecar.rank_mirror import RankMirror
from kvrouting_sidecar.session import Session
from kvrouting_sidecar.wire_events import EventBatch, decode_batch

_TARGET_TOKENS_PER_S = 200_000
_CACHE_TOKENS = 200_000
_BATCHES_PER_FLUSH = 8  # 10 ms of a busy engine
_BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Encoded batches. tokens: stored in them; as many are removed again once the cache is full."""

    name: str
    payloads: list[bytes]
    tokens: int


def steady_state(name: str, *, stored_tokens: int, prompt_tokens: int, shared_tokens: int, seed: int) -> Workload:
    """Prompts of one length, some of which share a beginning; old tails go when the cache is full."""
    rng = random.Random(seed)
    payloads, cached, held, stored = [], [], 0, 0
    shared = [_chain(rng, None, shared_tokens) for _ in range(16)] if shared_tokens else []
    for _, pages, tokens in shared:
        payloads.append(_batch([_stored(None, pages, tokens)]))
    while stored < stored_tokens:
        parent = rng.choice(shared)[1][-1] if shared else None
        chain = _chain(rng, parent, prompt_tokens - shared_tokens)
        events = [_stored(*chain)]
        cached.append(chain[1])
        held += len(chain[1])
        stored += len(chain[1])
        if held > _CACHE_TOKENS:
            gone = cached.pop(0)
            held -= len(gone)
            # Eviction takes a tail first and the rest later, so that runs are cut as well as dropped.
            events += [
                {"type": "BlockRemoved", "block_hashes": part}
                for part in (gone[len(gone) // 2 :], gone[: len(gone) // 2])
            ]
        payloads.append(_batch(events))
    return Workload(name=name, payloads=payloads, tokens=stored)


def decode_steps(name: str, *, stored_tokens: int, requests: int, seed: int) -> Workload:
    """Answers stored in pieces of 16 tokens, so that every event's fixed cost counts.

    SGLang stores an answer when it ends, so this is beyond what it does.
    """
    rng = random.Random(seed)
    tails: list[int | None] = [None] * requests
    pages: list[list[int]] = [[] for _ in range(requests)]
    payloads, stored = [], 0
    while stored < stored_tokens:
        events = []
        for request in range(requests):
            parent, added, tokens = _chain(rng, tails[request], 16)
            events.append(_stored(parent, added, tokens))
            tails[request] = added[-1]
            pages[request] += added
            stored += 16
            if len(pages[request]) >= _CACHE_TOKENS // requests:
                events.append({"type": "BlockRemoved", "block_hashes": pages[request]})
                tails[request], pages[request] = None, []
        payloads.append(_batch(events))
    return Workload(name=name, payloads=payloads, tokens=stored)


def _chain(rng: random.Random, parent: int | None, length: int) -> tuple[int | None, list[int], list[int]]:
    pages = [rng.getrandbits(64) - (1 << 63) for _ in range(length)]
    return parent, pages, [rng.randrange(128_000) for _ in range(length)]


def _stored(parent: int | None, pages: list[int], tokens: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored", "block_hashes": pages, "parent_block_hash": parent, "token_ids": tokens, "block_size": 1,
        "lora_id": None, "medium": "GPU",
    }  # fmt: skip


def _batch(events: list[dict[str, object]]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


class _Receiver:
    """Encodes what one router would be sent."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.sent_bytes = 0

    def changed(self, deltas: list[Delta]) -> None:
        if self.session is not None:
            self.session.changed(deltas, now_s=0.0)

    def replaced(self) -> None:
        if self.session is not None:
            self.session.replaced()

    def new_epoch(self) -> None:
        """A stream would be opened anew."""
        self.session = None

    def flush(self) -> None:
        session = self.session
        if session is None:
            raise RuntimeError("the session is opened before the first flush")
        while (part := session.next_message(now_s=0.0)) is not None:
            self.sent_bytes += len(view_change(part, epoch="e").SerializeToString())
            session.acknowledged(session.sent_messages)


def ingest(workload: Workload) -> int:
    """All of a workload through mirror and session. Returns: bytes sent to the router."""
    receiver = _Receiver()
    mirror = RankMirror(
        ChainHasher(b"k" * 32, _BLOCK_SIZE), model="m", capacity_tokens=0, page_size_tokens=1, listener=receiver
    )
    mirror.identified(EventSource(epoch=None, fingerprint="1"), fallback_epoch="1")
    mirror.replay_ended(batches=0, failure=None)
    receiver.session = Session(mirror, window_messages=64)
    for sequence, payload in enumerate(workload.payloads):
        mirror.offer(sequence, decode_batch(payload).events)
        if sequence % _BATCHES_PER_FLUSH == 0:
            receiver.flush()
    receiver.flush()
    if mirror.counts.desyncs:
        raise RuntimeError("the workload is not a sound event stream")
    return receiver.sent_bytes


def bare_decode(workload: Workload) -> int:
    """The baseline: msgspec alone. Returns: events decoded."""
    decoder = msgspec.msgpack.Decoder(EventBatch)
    return sum(len(decoder.decode(payload).events) for payload in workload.payloads)


def _cpu_s(work: Callable[[Workload], int], workload: Workload) -> float:
    start_s = time.process_time()
    work(workload)
    return time.process_time() - start_s


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="a few seconds instead of half a minute")
    quick = arguments.parse_args().quick
    tokens, rounds = (300_000, 3) if quick else (1_000_000, 7)
    workloads = [
        steady_state("prompts of 2048", stored_tokens=tokens, prompt_tokens=2048, shared_tokens=0, seed=1),
        steady_state("prompts of 512, 256 shared", stored_tokens=tokens, prompt_tokens=512, shared_tokens=256, seed=2),
        decode_steps("stress: pieces of 16", stored_tokens=tokens, requests=32, seed=3),
    ]
    print(f"{'workload':<28}{'Mtokens/s':>10}{'of target':>11}{'bare decode':>13}{'cost / decode':>15}")
    for workload in workloads:
        pairs = [(_cpu_s(ingest, workload), _cpu_s(bare_decode, workload)) for _ in range(rounds)]
        rate = workload.tokens / statistics.median(full for full, _ in pairs)
        bare = workload.tokens / statistics.median(decode for _, decode in pairs)
        ratio = statistics.median(full / decode for full, decode in pairs)
        target = rate / _TARGET_TOKENS_PER_S
        print(f"{workload.name:<28}{rate / 1e6:>10.2f}{target:>10.1f}x{bare / 1e6:>13.2f}{ratio:>15.1f}")


if __name__ == "__main__":
    main()
